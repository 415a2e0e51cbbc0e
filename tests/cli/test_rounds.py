"""The table of rounds that `fedsweep run` prints."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedsweep.cli.output import plan_table, progress_console, result_console, show_recorded
from fedsweep.cli.run import RoundTable
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from fedsweep.results.history import RoundRecord
from fedsweep.tracking import single_run as recorded_run

METRICS = ["accuracy/mean", "accuracy/worst_domain", "accuracy/domain/sketch", "accuracy/domain/art_painting"]


def test_columns_are_aligned_with_complete_headings(tiny, capsys):
    data = tiny.data.model_copy(update={"domains": ("sketch", "art_painting")})
    with RoundTable(tiny.model_copy(update={"data": data}), as_json=False) as table:
        table.add(RoundRecord(0, dict.fromkeys(METRICS, 0.5), 1.0))
        table.add(RoundRecord(1, dict.fromkeys(METRICS, 1.0) | {"loss/train": 0.25}, 1.0))
    headings, untuned, first = capsys.readouterr().out.splitlines()
    assert headings.split("  ")[-2:] == ["art_painting", "train loss"]
    assert len(headings) == len(untuned) == len(first)
    assert untuned.split() == ["0", *["50.00%"] * 4]
    assert first.split() == ["1", *["100.00%"] * 4, "0.2500"]


SURROGATE = {"synthetic": "surrogate", "partition.proxy_share": 0.1}
WITH_SURROGATES = {**SURROGATE, "method": {"name": "ft", "synthetic_epochs": 1}}


@pytest.mark.parametrize(("changes", "said"), [(WITH_SURROGATES, 1), (SURROGATE, 0), ({}, 0)])
def test_a_run_with_surrogate_images_prints_one_warning_on_stderr(tiny, capsys, changes, said):
    show_recorded(progress_console(), tiny.override(changes, "test"), Path.cwd(), "fedsweep ui")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("Synthetic images: surrogates") == said
    assert printed.err.startswith("Recorded in ")


def test_a_run_outside_a_sweep_records_its_provenance(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_run, "run_resumably", lambda *_, **__: iter(()))
    monkeypatch.setattr(recorded_run, "Recorder", MagicMock())  # the real class would create MLflow's database
    config = tiny.override(WITH_SURROGATES, "test")
    trial, _ = recorded_run.record_run("tiny", config, Store(tmp_path), "cpu", lambda _: None)
    assert trial.read().plan.marks == {"synthetic": "surrogate"}


def test_the_shipped_fedag_experiment_uses_and_names_surrogate_images():
    config = RunConfig.of(read_yaml(find("experiments", "fedag_digits")), "fedag_digits")
    assert config.marks() == {"synthetic": "surrogate"}


def test_lists_of_words_are_not_rendered_as_styles(capsys):
    label = "data.held_out_domains=[plain]"
    result_console().print(plan_table("mine", {}, [{"data.held_out_domains": ["plain"]}]))
    result_console().print(label)
    assert capsys.readouterr().out.count(label) == 2
