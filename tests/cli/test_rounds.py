"""The table of rounds that `fedsweep run` prints."""

import io
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from rich.progress import Progress

from fedsweep.cli.output import plan_table, progress_console, result_console, show_recorded
from fedsweep.cli.round_table import RoundBar, RoundTable
from fedsweep.common.paths import find
from fedsweep.common.progress import TimeLeft
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from fedsweep.results.history import RoundRecord
from fedsweep.tracking import single_run as recorded_run
from tests.common.test_progress import Clock

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


@pytest.mark.parametrize(
    ("width", "shown", "note"),
    [
        (80, ["round", "mean", "worst", "sketch", "art_painting", "train", "loss"], ""),
        (64, ["round", "mean", "worst", "sketch", "train", "loss"], "1 domain is left out of the table, "),
        (40, ["round", "mean", "worst", "train", "loss"], "2 domains are left out of the table, "),
    ],
)
def test_rows_are_not_wider_than_the_terminal(tiny, capsys, monkeypatch, width, shown, note):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    data = tiny.data.model_copy(update={"domains": ("sketch", "art_painting")})
    with RoundTable(tiny.model_copy(update={"data": data}), as_json=False):
        pass
    printed = capsys.readouterr()
    assert printed.out.split() == shown
    assert printed.err.startswith(note)
    assert bool(printed.err) == bool(note)


def test_the_time_left_counts_neither_the_start_nor_round_0(tiny):
    table, clock = RoundTable(tiny.override({"federation.rounds": 12}, "test"), as_json=True), Clock()
    table.time = TimeLeft(clock)
    table.add(RoundRecord(0, {}, 0.5))
    assert table.left() is None
    clock.now += 35.0
    for number in (1, 2):
        table.add(RoundRecord(number, {}, 17.0))
    assert table.left() == pytest.approx(10 * 17.0)


def test_the_bar_within_a_round_follows_clients_and_test_images():
    progress = Progress(console=Console(force_terminal=True, file=io.StringIO()))
    bar = RoundBar(progress)
    (task,) = progress.tasks
    bar.training(0.5, 6)
    assert (task.description, task.completed, task.total) == ("training clients", 0.5, 6)
    bar.tested(64)  # a prediction that the method makes while clients train
    assert (task.description, task.completed) == ("training clients", 0.5)
    bar.testing(100)
    bar.tested(64)
    assert (task.description, task.completed, task.total) == ("testing images", 64, 100)
    bar.tested(64)
    assert task.completed == 100


@pytest.mark.parametrize(
    ("rounds", "kept"),
    [(0, "no round has been"), (1, "round 0 is kept in runs"), (3, "rounds 0 to 2 are kept in runs")],
)
def test_ctrl_c_says_at_once_what_is_kept(tiny, capsys, rounds, kept):
    table = RoundTable(tiny, as_json=True)
    for number in range(rounds):
        table.add(RoundRecord(number, {}, 1.0))
    capsys.readouterr()
    table.stop("runs")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"Stopping ... {kept}")


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


def test_the_title_of_a_narrow_plan_is_on_one_line(capsys):
    result_console().print(plan_table("a/search/space/with/a/long/name", {}, [{"lora.rank": 1}]))
    assert capsys.readouterr().out.splitlines()[0].strip() == "a/search/space/with/a/long/name"
