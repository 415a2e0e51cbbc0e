"""Sweeps whose trials do not all finish, through the command line, Ray and MLflow."""

import csv
import io
import os
import signal
from pathlib import Path

import pytest

from tests.sweep.helpers import (
    GRID,
    SAMPLED,
    SMALL,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    newest,
    runs,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = pytest.mark.slow


def test_pruned_trials_say_so_everywhere(tmp_path: Path) -> None:
    write_space(tmp_path, "search", SAMPLED)
    done = fedsweep(tmp_path, "tune", "search")
    trials = newest(tmp_path, "search").trials()
    outcomes = [trial.outcome and trial.outcome.outcome for trial in trials]
    assert len(outcomes) == 6
    assert set(outcomes) == {"finished", "pruned"}
    for trial in trials:
        if trial.outcome and trial.outcome.outcome == "pruned":
            assert trial.outcome.round in (1, 2)
            assert trial.last_round == trial.outcome.round
    assert_mlflow_equals_store(tmp_path, "search")
    _, children, _ = runs(tmp_path, "search")
    statuses = {run.data.tags["fedsweep.outcome"]: run.info.status for run in children}
    assert statuses == {"finished": "FINISHED", "pruned": "KILLED"}
    assert "pruned" in done.stdout
    rows = list(csv.DictReader(io.StringIO(table(tmp_path, "search"))))
    assert len(rows) == 6


def test_a_pruned_search_killed_and_resumed_asks_the_same_questions(tmp_path: Path) -> None:
    """One trial at a time, so that the order of arrival is the same: then even pruning is repeated exactly."""
    alone = {**SAMPLED, "resources": {"cpus_per_trial": len(os.sched_getaffinity(0))}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        write_space(folder, "search", alone)
    fedsweep(whole, "tune", "search")
    process = start(broken, "tune", "search")
    wait_for_rounds(broken, "search", 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    fedsweep(broken, "tune", "search", "--resume")
    assert histories(newest(broken, "search")) == histories(newest(whole, "search"))
    assert_mlflow_equals_store(broken, "search")


def test_a_failing_trial_is_recorded_and_does_not_stop_the_others(tmp_path: Path) -> None:
    diverging = {
        **GRID,
        "fixed": {**SMALL, "local.steps": 6, "optimizer.clip_norm": None},
        "space": {"optimizer.lr": {"grid": [1e30, 0.01]}},
        "seeds": [0],
        "baseline": {"optimizer.lr": 0.01},
    }
    write_space(tmp_path, "diverging", diverging)
    done = fedsweep(tmp_path, "tune", "diverging", code=1)
    outcomes = {trial.plan.arm["optimizer.lr"]: trial.outcome for trial in newest(tmp_path, "diverging").trials()}
    failed, finished = outcomes[1e30], outcomes[0.01]
    assert failed is not None
    assert finished is not None
    assert (failed.outcome, finished.outcome) == ("failed", "finished")
    assert failed.error is not None
    assert "DivergenceError" in failed.error
    _, children, client = runs(tmp_path, "diverging")
    (run,) = [run for run in children if run.info.status == "FAILED"]
    assert "error.txt" in [file.path for file in client.list_artifacts(run.info.run_id)]
    assert "1 trials failed" in done.stdout or "1 trial failed" in done.stdout
