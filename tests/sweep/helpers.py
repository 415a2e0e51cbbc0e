"""Functions that run small sweeps like a user, with the command line, Ray and MLflow."""

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from fedsweep import cli
from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.report import write_report
from fedsweep.results import Outcome, Store, SweepStore
from fedsweep.sweep.cluster.cluster import available_cpus
from fedsweep.sweep.cluster.ray_session import prepare_environment
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.tracking.destination import tracking_uri

ROUNDS = 3
SMALL: dict[str, Any] = {
    "federation.rounds": ROUNDS,
    "federation.evaluate_every": 1,
    "federation.depths": [12, 3],
    "data.domains": ["plain", "rotated"],
    "local.steps": 1,
    "local.batch_size": 8,
}
GRID: dict[str, Any] = {
    "experiment": "fedra_digits",
    "fixed": SMALL,
    "space": {"lora.rank": {"grid": [1, 4]}},
    "seeds": [0, 1],
    "baseline": {"lora.rank": 4},
    "objective": {"metric": "accuracy/mean", "mode": "max"},
    "search": {"name": "grid"},
    "scheduler": {"name": "none"},
    "resources": {"cpus_per_trial": 1, "gpus_per_trial": 0},
}
TUNED: dict[str, Any] = {
    **GRID,
    "fixed": {**SMALL, "federation.rounds": 2, "data.validation_fraction": 0.2, "evaluation.test_rounds": "last"},
    "tune_each": {"space": {"optimizer.lr": {"loguniform": [0.01, 0.5]}}, "samples": 3},
}
SAMPLED: dict[str, Any] = {
    **GRID,
    "space": {"optimizer.lr": {"loguniform": [0.001, 0.3]}, "lora.position": {"choice": ["l0", "both"]}},
    "seeds": [0],
    "baseline": None,
    "search": {"name": "tpe", "samples": 6, "startup": 2, "seed": 0},
    "scheduler": {"name": "asha", "grace_rounds": 1, "reduction_factor": 2},
}
POPULATION: dict[str, Any] = {
    **GRID,
    "fixed": {**SMALL, "federation.rounds": 6, "local.steps": 2},
    "space": {"optimizer.lr": {"loguniform": [0.001, 0.5]}, "optimizer.momentum": {"uniform": [0.0, 0.95]}},
    "seeds": [0],
    "baseline": None,
    "search": {"name": "random", "samples": 4, "seed": 0},
    "scheduler": {"name": "pbt", "interval": 2, "quantile": 0.5},
}


def write_space(folder: Path, name: str, space: dict[str, Any]) -> None:
    """Write a search space file below the working directory `folder`, where it takes precedence over shipped files."""
    path = folder / "search_spaces" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# a test\n" + yaml.safe_dump(space, sort_keys=False))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedsweep", *words]


def environment() -> dict[str, str]:
    return {"RAY_AUTH_MODE": "disabled", **os.environ, "COLUMNS": "120"}


def launch(
    folder: Path, *words: str, code: int | None = 0, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process, which starts its own Ray, and check its exit code."""
    whole = [*launcher, *command(*words)]
    done = subprocess.run(whole, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def fedsweep(folder: Path, *words: str, code: int | None = 0, trains: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which loads libraries and starts Ray only once, and check its exit code.

    If `trains` is false, the command runs no trial, so that no Ray is started.
    """
    out, err = io.StringIO(), io.StringIO()
    ended = 0
    with mock.patch.dict(os.environ, environment()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a separate process would only print the warnings of libraries
        if words[0] == "tune" and trains:
            own_ray()
        changed = contextlib.chdir(folder), mock.patch.object(sys, "argv", ["fedsweep", *words])
        with changed[0], changed[1], contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                ended = int(end.code or 0)
    assert code is None or ended == code, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(["fedsweep", *words], ended, out.getvalue(), err.getvalue())


@cache
def own_ray() -> None:
    """Start a Ray instance with one logical GPU, which all sweeps of this process use in turn."""
    prepare_environment()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=available_cpus(), num_gpus=1, _node_ip_address="127.0.0.1", **quiet)


def end_own_ray() -> None:
    """Stop the Ray instance of `own_ray`, so that this process can start clusters with other settings."""
    ray.shutdown()
    own_ray.cache_clear()


def play_alone(folder: Path, name: str) -> None:
    """Run the trials of a grid one after the other in this process, without Ray and MLflow, as a reference."""
    with contextlib.chdir(folder):
        plan = Plan.read(name, {}, {})
        sweep = new_sweep(plan, Store(folder / "mlruns"))
        for trial in plan.grid():
            kept = sweep.trial(trial.key)
            kept.plan(trial)
            *_, last = run_resumably(RunConfig.of(trial.config, "test"), kept.checkpoint, "cpu")
            kept.end(Outcome(outcome="finished", round=last.round))
        write_report(sweep.manifest(), sweep.trials(), sweep.folder / "report")


def planned_sweep(folder: Path, name: str) -> tuple[Plan, Store, SweepStore]:
    """Create a sweep in the working directory `folder`, with the plan of each trial of its grid. No trial has run."""
    plan, store = Plan.read(name, {}, {}), Store(folder / "mlruns")
    sweep = new_sweep(plan, store)
    for trial in plan.grid():
        sweep.trial(trial.key).plan(trial)
    return plan, store, sweep


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command line in the working directory `folder`, in a new process group."""
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_rounds(folder: Path, name: str, rounds: int, process: subprocess.Popen[str]) -> None:
    """Wait until the running sweep has written `rounds` rounds to disk."""
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        started = list((folder / "mlruns" / "sweeps" / name).glob("*/sweep.json"))
        if started and played(folder, name) >= rounds:
            return
        time.sleep(0.05)
    raise AssertionError(f"the sweep did not write {rounds} rounds in time")


def played(folder: Path, name: str) -> int:
    """Return the number of rounds on disk, summed over all trials."""
    return sum(max(trial.last_round, 0) for trial in newest(folder, name).trials())


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the process with SIGKILL, so that it cannot clean up, as in a crash of the machine."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def workers_of(driver: int) -> list[psutil.Process]:
    """Return the processes that run trials of the driver with process id `driver`, found by their names."""
    found = psutil.Process(driver).children(recursive=True)
    return [one for one in found if "".join(_command(one)[:1]).startswith("ray::ImplicitFunc")]


def _command(process: psutil.Process) -> list[str]:
    """Return the command of a process, or an empty list if the process has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def newest(folder: Path, name: str) -> SweepStore:
    return Store(folder / "mlruns").find(name)


def table(folder: Path, name: str) -> str:
    return (newest(folder, name).folder / "report" / "table.csv").read_text()


def histories(sweep: SweepStore) -> dict[str, Any]:
    """Return the reproducible results of a sweep, which are each trial's outcome and its metrics by round."""
    return {
        json.dumps([trial.plan.arm, trial.plan.seed, trial.plan.number]): (
            trial.outcome and (trial.outcome.outcome, trial.outcome.round),
            [(record.round, dict(record.metrics)) for record in trial.history],
        )
        for trial in sweep.trials()
    }


def runs(folder: Path, name: str) -> tuple[list[Run], list[Run], MlflowClient]:
    """Return the parent runs, the child runs and the client of a search space's MLflow experiment."""
    client = MlflowClient(tracking_uri=tracking_uri(folder / "mlruns"))
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    parents = [run for run in found if run.data.tags["fedsweep.kind"] == "sweep"]
    children = [run for run in found if run.data.tags["fedsweep.kind"] == "trial"]
    return parents, children, client


def assert_mlflow_equals_store(folder: Path, name: str) -> None:
    """Assert that MLflow has every run and step exactly once, with the values of the results folder."""
    trials = newest(folder, name).trials()
    _, children, client = runs(folder, name)
    by_key = {run.data.tags["fedsweep.key"]: run for run in children}
    assert len(by_key) == len(children) == len(trials) > 0
    for trial in trials:
        run = by_key[trial.plan.key]
        assert trial.outcome is not None
        assert run.data.tags["fedsweep.outcome"] == trial.outcome.outcome
        assert run.data.tags["fedsweep.round"] == str(trial.outcome.round)
        assert len(trial.history) == trial.outcome.round + 1 or trial.outcome.outcome == "failed"
        for metric in trial.history[0].metrics if trial.history else ():
            written = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, metric)]
            assert sorted(written) == [(record.round, record.metrics[metric]) for record in trial.history]
