"""Sweeps over a prepared data set and a weights file, named by relative paths."""

import csv
import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from fedsweep.cli import main
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.federation.build_and_run import check_digests, split
from fedsweep.results import Store
from fedsweep.sweep import TuneOptions
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from fedsweep.sweep.running.tune import rehearsed
from tests.sweep.helpers import assert_mlflow_equals_store, launch, newest, runs, table

QUICK = ["federation.rounds=1", "local.steps=1", "local.batch_size=8"]
SPACE = "ablations/dirichlet_alpha"


@pytest.fixture
def project(pacs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working directory that contains a data folder at the default path, and return it."""
    shutil.copytree(pacs_folder, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(changes: dict[str, Json] | None = None, **space: Any) -> Plan:
    return Plan.read(SPACE, changes or {}, space)


def rewrite(weights: Path) -> None:
    """Write other weights of the same shapes, with a matching card."""
    tensors = load_file(weights)
    save_file({name: values + np.float32(0.01) for name, values in tensors.items()}, weights)
    card = json.loads(weights.with_suffix(".json").read_text())
    card.pop("sha256")
    weights.with_suffix(".json").write_text(json.dumps(card))


def test_arms_differ_only_in_their_clients(project: Path) -> None:
    plan = read()
    parts = [split(plan.resolve(arm, 0))[1] for arm in plan.arms]
    ids = [[client.id for client in one.clients] for one in parts]
    assert ids == [ids[0]] * 5
    assert len(ids[0]) == 20
    sizes = [tuple(len(client.train) for client in one.clients) for one in parts]
    assert len(set(sizes)) == 5
    assert {sum(one) for one in sizes} == {4 * 7 * 16}


def test_the_key_of_a_trial_depends_on_its_weights_and_images(project: Path) -> None:
    before, digests = [trial.key for trial in read().grid()], read().digests()
    rewrite(project / "data" / "backbones" / "tinyimagenet_vit.safetensors")
    after = [trial.key for trial in read().grid()]
    assert not set(before) & set(after)
    assert read().digests() == {**digests, "data": read().digests()["data"]} != digests


def test_a_data_set_that_was_prepared_again_is_not_read_from_memory(project: Path) -> None:
    before = split(read().base)[0]
    card = project / "data" / "pacs-64" / "card.json"
    card.write_text(card.read_text().replace(before.digest, "0" * 64))
    assert split(read().base)[0].digest == "0" * 64
    with pytest.raises(UserError, match="the data of this trial changed after its sweep began"):
        check_digests(read().base, {"data": before.digest, "weights": read().base.backbone.fingerprint()})


def test_a_sweep_whose_weights_changed_is_not_resumed(project: Path) -> None:
    store = Store(project / "mlruns")
    sweep = new_sweep(read(), store)
    resumed_sweep(read(), store, sweep)
    rewrite(project / "data" / "backbones" / "tinyimagenet_vit.safetensors")
    with pytest.raises(UserError, match="cannot be resumed because its data or weights have changed since"):
        resumed_sweep(read(), store, sweep)


def test_a_changed_pixel_is_found_by_verify_before_a_sweep_is_resumed(project: Path, monkeypatch, capsys) -> None:
    new_sweep(read(), Store(project / "mlruns"))
    options = TuneOptions(SPACE, resume=True, verify=True)
    with rehearsed(options, Console(quiet=True)) as ready:
        assert ready.plan.name == SPACE
    path = project / "data" / "pacs-64" / "photo.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with rehearsed(replace(options, verify=False), Console(quiet=True)):
        pass  # a resume does not read all pixels by default
    rule = "pacs-64 has changed since it was prepared: its digest is "
    with pytest.raises(UserError, match=rule), rehearsed(options, Console(quiet=True)):
        pass
    monkeypatch.setattr(sys, "argv", ["fedsweep", "run", "fedra_pacs", "--verify"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert rule in capsys.readouterr().err
    assert not (project / "mlruns" / "runs").exists()


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda data: shutil.rmtree(data / "pacs-64"), "there is no prepared data set `pacs` in "),
        (lambda data: (data / "pacs-64" / "photo.arrow").write_bytes(b"short"), "photo.arrow must have "),
        (
            lambda data: (data / "backbones" / "tinyimagenet_vit.safetensors").unlink(),
            "`fedsweep pretrain tinyimagenet_vit`",
        ),
    ],
)
def test_missing_or_damaged_files_are_reported_before_anything_starts(project: Path, break_it, sentence) -> None:
    plan = read()
    break_it(project / "data")
    with pytest.raises(UserError) as refused:
        plan.preflight()
    assert sentence in str(refused.value)


def test_an_impossible_partition_is_reported_before_anything_starts(project: Path) -> None:
    plan = read({"partition.min_size": 22})
    with pytest.raises(UserError, match=r"`partition.alpha` 0.1 leaves one of the 5 clients of domain art_painting"):
        plan.preflight()


@pytest.mark.slow
def test_a_sweep_over_prepared_data_ends_with_its_table(project: Path) -> None:
    # By default, Ray under `uv run` copies the working directory to its workers, up to 512 MiB.
    launcher = ["uv", "run", "--no-project"] if shutil.which("uv") else []
    with (project / "data" / "large").open("wb") as file:
        file.truncate(600 * 2**20)
    launch(project, "tune", SPACE, *QUICK, "--seeds", "0", "--at-once", "1", launcher=launcher)
    rows = list(csv.DictReader(io.StringIO(table(project, SPACE))))
    assert [float(row["partition.alpha"]) for row in rows] == [0.1, 0.5, 1, 10, 100]
    trials = newest(project, SPACE).trials()
    assert [trial.outcome and trial.outcome.outcome for trial in trials] == ["finished"] * 5
    assert_mlflow_equals_store(project, SPACE)
    plan = read()
    for run in runs(project, SPACE)[1]:
        tags = run.data.tags
        assert tags["fedsweep.data_digest"] == split(plan.base)[0].digest
        assert tags["fedsweep.weights_digest"] == plan.base.backbone.fingerprint()
