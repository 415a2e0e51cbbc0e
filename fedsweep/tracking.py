"""The only module that imports mlflow: runs as a view of what the store holds, written by one process, the driver.

Everything is found by tags and every round is written once, so a sync may be repeated at any time: after a crash, after
a resume, or to rebuild a lost database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sqlite3
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedsweep.config import Json
from fedsweep.errors import UserError
from fedsweep.history import mean_of_last, total_megabytes
from fedsweep.store import Store, SweepManifest, TrialPlan, TrialRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

PACKAGES = ("fedsweep", "torch", "timm", "peft", "ray", "optuna", "mlflow", "numpy", "scikit-learn", "pyarrow")
BATCH = 900  # MLflow takes at most 1,000 items in one request
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "failed": "FAILED", None: "RUNNING"}


def tracking_uri(root: Path) -> str:
    """The SQLite database of a store."""
    return f"sqlite:///{root / 'mlflow.db'}"


def check_writable(root: Path) -> None:
    """Find out before anything starts whether the store and its database can be written.

    Raises:
        UserError: they cannot.
    """
    probe = root / f".write-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if (root / "mlflow.db").exists():  # connecting would make an empty one
            with contextlib.closing(sqlite3.connect(root / "mlflow.db", timeout=30)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
    except OSError as error:
        raise UserError(f"the tracking store {root} cannot be written: {error.strerror or error}.") from None
    except sqlite3.Error as error:
        raise UserError(f"the tracking store {root} cannot be written: {error} (mlflow.db).") from None


class Recorder:
    """Writes trials of one MLflow experiment, below a parent run where they belong to a sweep."""

    def __init__(self, store: Store, experiment: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow import MlflowClient

        for noisy in ("alembic", "mlflow"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        uri = tracking_uri(store.root)
        # The first use creates the tables, which is not safe in two processes at once.
        with FileLock(store.root / ".mlflow.lock"):
            self.client: MlflowClient = MlflowClient(tracking_uri=uri)
            found = self.client.get_experiment_by_name(experiment)
            if found is not None:
                self.experiment_id = found.experiment_id
            else:
                artifacts = (store.root / "artifacts" / experiment).as_uri()
                self.experiment_id = self.client.create_experiment(experiment, artifact_location=artifacts)
        self.parent: str | None = None
        self._synced: dict[str, tuple[str, int, str | None]] = {}

    def open_sweep(self, manifest: SweepManifest, folder: Path) -> None:
        """Find or make the parent run of a sweep, with its YAMLs, package versions and commit."""
        tags = {"fedsweep.kind": "sweep", "fedsweep.sweep": manifest.id}
        self.parent = self._find(tags)
        if self.parent is None:
            run = self.client.create_run(
                self.experiment_id,
                run_name=f"{manifest.name} {manifest.id}",
                tags={**tags, **_origin(), "fedsweep.varied": ", ".join(manifest.varied)},
            )
            self.parent = run.info.run_id
            shown = manifest.model_dump(mode="json", exclude={"digests", "id", "name"})
            self._params(self.parent, shown)
            for name in ("search_space.yaml", "experiment.yaml", "sweep.json"):
                self.client.log_artifact(self.parent, str(folder / name))
            self.client.log_dict(self.parent, environment(), "environment.json")
        self.client.set_terminated(self.parent, "RUNNING")

    def close_sweep(self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None) -> None:
        """End the parent run with its summary and the report."""
        if self.parent is None:
            raise RuntimeError("no sweep is open")
        for name, value in metrics.items():
            self.client.log_metric(self.parent, name, value)
        if artifacts is not None:
            self.client.log_artifacts(self.parent, str(artifacts), "report")
        self.client.set_terminated(self.parent, status)

    def sync(self, trial: TrialRecord) -> None:
        """Bring MLflow up to what the store holds of one trial: its parameters, missing rounds and outcome."""
        from mlflow.entities import Metric

        plan, outcome = trial.plan, trial.outcome
        run_id, step, shown = self._synced.get(plan.key) or self._open(plan)
        now = int(time.time() * 1000)
        fresh = [
            Metric(name, value, now, record.round)
            for record in trial.history
            if record.round > step
            for name, value in {**record.metrics, "seconds/round": record.seconds}.items()
        ]
        for start in range(0, len(fresh), BATCH):
            self.client.log_batch(run_id, metrics=fresh[start : start + BATCH])
        name = outcome.outcome if outcome else None
        if name != shown and outcome is not None:
            self._end(run_id, trial)
        self._synced[plan.key] = (run_id, trial.last_round, name)

    def interrupt(self, trial: TrialRecord) -> None:
        """Show a trial that was stopped before its end; a resumed sweep goes on with the same run."""
        run_id, step, _ = self._synced.get(trial.plan.key) or self._open(trial.plan)
        self.client.set_tag(run_id, "fedsweep.outcome", "interrupted")
        self.client.set_terminated(run_id, "KILLED")
        self._synced[trial.plan.key] = (run_id, step, None)

    def _open(self, plan: TrialPlan) -> tuple[str, int, str | None]:
        """The trial's run, the last round it holds and the outcome it shows."""
        tags = {"fedsweep.key": plan.key, "fedsweep.kind": "trial"}
        if self.parent is not None:
            tags["mlflow.parentRunId"] = self.parent
        run_id = self._find(tags)
        if run_id is None:
            shown = {"fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), "fedsweep.outcome": "running"}
            run = self.client.create_run(
                self.experiment_id, run_name=run_name(plan), tags={**tags, **shown, **_origin()}
            )
            self._params(run.info.run_id, plan.config)
            return run.info.run_id, -1, None
        run = self.client.get_run(run_id)
        # The metric that every round has tells what was written; a batch is written whole or not at all.
        written = self.client.get_metric_history(run_id, "seconds/round")
        outcome: str | None = run.data.tags["fedsweep.outcome"]
        if outcome in ("running", "interrupted"):
            self.client.set_tag(run_id, "fedsweep.outcome", "running")
            self.client.set_terminated(run_id, "RUNNING")
            outcome = None
        return run_id, max((one.step for one in written), default=-1), outcome

    def _end(self, run_id: str, trial: TrialRecord) -> None:
        outcome = trial.outcome
        if outcome is None:
            return
        if outcome.error:
            self.client.log_text(run_id, outcome.error, "error.txt")
            self.client.set_tag(run_id, "fedsweep.error", outcome.error.strip().splitlines()[-1][:500])
        if trial.last_round > 0:
            self.client.log_metric(run_id, "accuracy/mean_of_last_4", mean_of_last(trial.history, "accuracy/mean"))
            self.client.log_metric(run_id, "megabytes/sent", total_megabytes(trial.history))
        self.client.set_tag(run_id, "fedsweep.round", str(outcome.round))
        self.client.set_tag(run_id, "fedsweep.outcome", outcome.outcome)
        self.client.set_terminated(run_id, STATUS[outcome.outcome])

    def _find(self, tags: Mapping[str, str]) -> str | None:
        conditions = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = self.client.search_runs([self.experiment_id], conditions, max_results=1)
        return runs[0].info.run_id if runs else None

    def _params(self, run_id: str, nested: Mapping[str, Json]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value if isinstance(value, str) else json.dumps(value)) for name, value in _flat(nested)]
        self.client.log_batch(run_id, params=params)


def run_name(plan: TrialPlan) -> str:
    """For people: `rank 4 · seed 0`."""
    values = []
    for name, value in plan.arm.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        values.append(f"{name.rsplit('.', 1)[-1]} {shown}")
    return " · ".join([*values, f"seed {plan.seed}"])


def environment() -> dict[str, str]:
    """Package versions, Python and platform."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}


def git_commit() -> str | None:
    """The commit of the checkout that the package is run from, with `+` where it has uncommitted changes."""
    where = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = git("ls-files", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "") if tracked else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _origin() -> dict[str, str]:
    commit = git_commit()
    return {
        "fedsweep.version": metadata.version("fedsweep"),
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }


def _flat(nested: Mapping[str, Json], prefix: str = "") -> list[tuple[str, Json]]:
    pairs: list[tuple[str, Json]] = []
    for name, value in nested.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(f"{prefix}{name}", value)]
    return pairs


def server_command(root: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of MLflow's server over a store, bound to loopback, and the environment that keeps it small."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri(root)]
    command += ["--default-artifact-root", (root / "artifacts").as_uri(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    return command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def page_links(store: Store, url: str) -> dict[str, str]:
    """Addresses within MLflow's page: the runs of the newest sweep, their curves, its trials side by side."""
    from mlflow import MlflowClient

    sweeps = store.sweeps()
    if not sweeps:
        return {}
    manifest = sweeps[-1].manifest()
    client = MlflowClient(tracking_uri=tracking_uri(store.root))
    experiment = client.get_experiment_by_name(manifest.name)
    if experiment is None:
        return {}
    number = experiment.experiment_id
    parents = client.search_runs([number], f"tags.`fedsweep.sweep` = '{manifest.id}'", max_results=1)
    below = f"tags.`mlflow.parentRunId` = '{parents[0].info.run_id}'" if parents else "tags.`fedsweep.kind` = 'trial'"
    ids = ",".join(f'"{run.info.run_id}"' for run in client.search_runs([number], below))
    runs = f"{url}/#/experiments/{number}/runs?workflowType=machine_learning"
    # Ordered by a metric, MLflow shows children beside their parent; otherwise it folds them below it.
    metric = urllib.parse.quote(f"metrics.`{manifest.metric}`", safe="")
    charts = (
        f"{runs}&compareRunsMode=CHART&orderByKey={metric}&orderByAsc={'false' if manifest.mode == 'max' else 'true'}"
    )
    compare = urllib.parse.quote(f'?runs=[{ids}]&experiments=["{number}"]', safe="?=&")
    return {"sweeps and their trials": runs, "curves": charts, "trials side by side": f"{url}/#/compare-runs{compare}"}
