"""Sweeps with successive halving of single trials, whose pruned trials do not depend on workers or faults."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.helpers import (
    GRID,
    SAMPLED,
    SMALL,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    kill,
    newest,
    played,
    start,
    table,
    wait_for_rounds,
    workers_of,
    write_space,
)

pytestmark = pytest.mark.slow

HALVED = {
    "fixed": {**SMALL, "federation.rounds": 5, "local.steps": 4},
    "scheduler": {"name": "asha", "grace_rounds": 1, "reduction_factor": 2},
}
SPACES: dict[str, dict[str, Any]] = {
    "tpe": {**SAMPLED, **HALVED, "search": {"name": "tpe", "samples": 9, "startup": 4, "seed": 0, "in_flight": 3}},
    "grid": {**GRID, **HALVED, "space": {"optimizer.lr": {"grid": [0.01, 0.03, 0.1, 0.3]}}, "baseline": None},
}


def assert_the_same(folder: Path, other: Path, name: str) -> None:
    assert histories(newest(folder, name)) == histories(newest(other, name))
    assert table(folder, name) == table(other, name)
    assert_mlflow_equals_store(folder, name)


@pytest.mark.parametrize("name", list(SPACES))
def test_the_same_trials_are_pruned_for_any_number_of_workers_and_after_kills(tmp_path: Path, name: str) -> None:
    folders = {workers: tmp_path / str(workers) for workers in ((1, 2, 3) if name == "tpe" else (1, 3))}
    for workers, folder in folders.items():
        folder.mkdir()
        write_space(folder, name, SPACES[name])
        fedsweep(folder, "tune", name, "--at-once", str(workers))
        assert_the_same(folder, folders[1], name)
    outcomes = [trial.outcome and trial.outcome.outcome for trial in newest(folders[1], name).trials()]
    assert {*outcomes} == {"finished", "pruned"}
    assert not (newest(folders[1], name).folder / "decisions.jsonl").exists()
    if name == "grid":
        return

    folder = tmp_path / "killed"
    folder.mkdir()
    write_space(folder, name, SPACES[name])
    process = start(folder, "tune", name, "--at-once", "2")
    wait_for_rounds(folder, name, 3, process)
    workers_of(process.pid)[0].kill()
    wait_for_rounds(folder, name, 6, process)
    for rounds in (3, 3, 3):
        kill(process)
        process = start(folder, "tune", name, "--resume", "--at-once", "2")
        wait_for_rounds(folder, name, played(folder, name) + rounds, process)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    fedsweep(folder, "tune", name, "--resume")
    assert_the_same(folder, folders[1], name)
