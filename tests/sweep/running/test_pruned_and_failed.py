"""Sweeps whose trials do not all finish, through the command line, Ray and MLflow."""

import csv
import io
from pathlib import Path

import pytest
import torch

from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Outcome, Store
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.sweep.search.ray_searchers import SampledSearch
from tests.sweep.helpers import (
    GRID,
    SAMPLED,
    SMALL,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    kill,
    newest,
    runs,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = pytest.mark.slow

ALONE = {
    **SAMPLED,
    "scheduler": {"name": "asha_async", "grace_rounds": 1, "reduction_factor": 2},
    "space": {
        "optimizer.lr": {"loguniform": [0.001, 0.3]},
        "lora.dropout": {"uniform": [0.0, 0.5], "step": 0.05},
        "method": {"choice": ["fedra", "inclusivefl"]},
        "method.beta": {"uniform": [0.0, 0.5], "step": 0.1, "when": {"method.name": "inclusivefl"}},
        "lora.rank": {"loginteger": [1, 8]},
    },
}
ONE = ("--at-once", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a search in which some trials are pruned, one trial at a time, and return its working directory."""
    folder = tmp_path_factory.mktemp("whole")
    write_space(folder, "search", ALONE)
    assert "pruned" in fedsweep(folder, "tune", "search", *ONE).stdout
    return folder


def test_pruned_trials_are_marked_everywhere(whole: Path) -> None:
    trials = newest(whole, "search").trials()
    outcomes = [trial.outcome and trial.outcome.outcome for trial in trials]
    assert len(outcomes) == 6
    assert set(outcomes) == {"finished", "pruned"}
    for trial in trials:
        if trial.outcome and trial.outcome.outcome == "pruned":
            assert trial.outcome.round in (1, 2)
            assert trial.last_round == trial.outcome.round
    assert_mlflow_equals_store(whole, "search")
    _, children, _ = runs(whole, "search")
    statuses = {run.data.tags["fedsweep.outcome"]: run.info.status for run in children}
    assert statuses == {"finished": "FINISHED", "pruned": "KILLED"}
    rows = list(csv.DictReader(io.StringIO(table(whole, "search"))))
    assert len(rows) == 6


def test_samples_meet_their_conditions(whole: Path) -> None:
    trials = newest(whole, "search").trials()
    assert {trial.plan.arm["method"] for trial in trials} == {"fedra", "inclusivefl"}
    for trial in trials:
        assert ("method.beta" in trial.plan.arm) == (trial.plan.arm["method"] == "inclusivefl")
        assert trial.plan.config["method"].get("beta") == trial.plan.arm.get("method.beta")
        assert trial.plan.arm["lora.dropout"] in [round(0.05 * place, 2) for place in range(11)]


def test_a_pruned_search_that_is_killed_and_resumed_draws_the_same_samples(whole: Path, tmp_path: Path) -> None:
    """Trials run one at a time, so that results arrive in the same order and the same trials are pruned."""
    write_space(tmp_path, "search", ALONE)
    process = start(tmp_path, "tune", "search", *ONE)
    wait_for_rounds(tmp_path, "search", 4, process)
    kill(process)
    fedsweep(tmp_path, "tune", "search", "--resume", *ONE)
    assert histories(newest(tmp_path, "search")) == histories(newest(whole, "search"))
    assert_mlflow_equals_store(tmp_path, "search")


def test_a_search_with_several_workers_equals_one_with_a_single_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs the trials in order without Ray; `test_ray_searchers.py` tests killed processes."""
    search_space = {**SAMPLED, "scheduler": {"name": "none"}, "search": {**SAMPLED["search"], "in_flight": 2}}
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        write_space(folder, "search", search_space)
    fedsweep(together, "tune", "search")
    monkeypatch.chdir(alone)
    plan = Plan.read("search", {}, {})
    sweep = new_sweep(plan, Store(alone / "mlruns"))
    search = SampledSearch(plan, sweep, lambda trial: sweep.trial(trial.key).plan(trial), Packing(0, 1, sweep))
    torch.set_num_threads(1)
    while isinstance(suggestion := search.suggest("t"), dict):
        trial = sweep.trial(str(suggestion["trial"]))
        *_, last = run_resumably(RunConfig.of(trial.read().plan.config, "test"), trial.checkpoint, "cpu")
        trial.end(Outcome(outcome="finished", round=last.round))
        search.on_trial_complete("t")
    assert len(sweep.trials()) == 6
    assert histories(newest(together, "search")) == histories(sweep)


def test_a_diverging_trial_is_recorded_and_does_not_stop_the_others(tmp_path: Path) -> None:
    diverging = {
        **GRID,
        "fixed": {**SMALL, "local.steps": 6, "optimizer.clip_norm": None},
        "space": {"optimizer.lr": {"grid": [1e30, 0.01]}},
        "seeds": [0],
        "baseline": {"optimizer.lr": 0.01},
    }
    write_space(tmp_path, "diverging", diverging)
    done = fedsweep(tmp_path, "tune", "diverging", *ONE)
    outcomes = {trial.plan.arm["optimizer.lr"]: trial.outcome for trial in newest(tmp_path, "diverging").trials()}
    failed, finished = outcomes[1e30], outcomes[0.01]
    assert failed is not None
    assert finished is not None
    assert (failed.outcome, finished.outcome) == ("diverged", "finished")
    assert failed.error is not None
    assert "DivergenceError" in failed.error
    _, children, client = runs(tmp_path, "diverging")
    (run,) = [run for run in children if run.info.status == "FAILED"]
    assert "error.txt" in [file.path for file in client.list_artifacts(run.info.run_id)]
    assert "1 diverged" in " ".join(done.stdout.split())
