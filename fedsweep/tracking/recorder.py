"""Runs in MLflow, found by tags, every round written once.

A sync may be repeated at any time: after a crash, after a resume, or to rebuild a lost database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedsweep.arms import setting
from fedsweep.config import flat
from fedsweep.errors import UserError
from fedsweep.history import mean_of_last, total_megabytes
from fedsweep.plain import Json
from fedsweep.store import Store, SweepManifest, TrialPlan, TrialRecord
from fedsweep.tracking.database import tracking_uri
from fedsweep.tracking.origin import environment, origin

if TYPE_CHECKING:
    from mlflow import MlflowClient

BATCH = 900  # MLflow takes at most 1,000 items in one request
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
OUTCOME = "fedsweep.outcome"
DESCRIBED = "fedsweep.described"
NO_PARAMETERS: Mapping[str, bool | Mapping[str, bool]] = {
    **dict.fromkeys(("id", "name", "digests"), True),
    "reference": {"arms": True},
}
"""Of a sweep's manifest: what tags say, and what may be longer than a parameter of MLflow; sweep.json has all."""


class Recorder:
    """Writes trials of one MLflow experiment, below a parent run where they belong to a sweep.

    What MLflow refuses is kept in `unsynced` by run and does not raise: the store has everything, and the next sync
    of the same trial asks MLflow what it holds and goes on from there.
    """

    def __init__(self, store: Store, experiment: str) -> None:
        """Open the database, which the first use creates.

        Raises:
            UserError: it cannot be opened.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for noisy in ("alembic", "mlflow"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.parent: str | None = None
        self.unsynced: dict[str, str] = {}
        self._written: dict[str, _Written] = {}
        try:
            with FileLock(store.root / ".mlflow.lock"):  # creating the tables is not safe in two processes at once
                self.client: MlflowClient = MlflowClient(tracking_uri=tracking_uri(store.root))
                self.experiment_id = self._experiment(store, experiment)
        except MlflowException as error:
            first = " ".join(str(error).split())[:300]
            raise UserError(f"MLflow cannot open {store.root / 'mlflow.db'}: {first.rstrip('.')}.") from None

    def open_sweep(self, manifest: SweepManifest, folder: Path) -> None:
        """Find or make the parent run of a sweep, with its YAMLs, package versions and commit."""
        with self._tolerant("the parent run"):
            tags = {"fedsweep.kind": "sweep", "fedsweep.sweep": manifest.id}
            found = self._find(tags)
            if found is None:
                shown = {**tags, **origin(), "fedsweep.varied": ", ".join(manifest.varied)}
                name = f"{manifest.name} {manifest.id}"
                found = self.client.create_run(self.experiment_id, run_name=name, tags=shown).info.run_id
            self.parent = found
            if not self._is_described(found):
                self._describe(found, manifest.model_dump(mode="json", exclude=NO_PARAMETERS))
                for file in ("search_space.yaml", "experiment.yaml", "sweep.json"):
                    self.client.log_artifact(found, str(folder / file))
                self.client.log_dict(found, environment(), "environment.json")
                self.client.set_tag(found, DESCRIBED, "yes")
            self.client.update_run(found, status="RUNNING")

    def close_sweep(self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None) -> None:
        """End the parent run with its summary and the report."""
        with self._tolerant("the parent run"):
            if self.parent is None:
                raise RuntimeError("the parent run could not be opened")
            for name, value in metrics.items():
                self.client.log_metric(self.parent, name, value)
            if artifacts is not None:
                self.client.log_artifacts(self.parent, str(artifacts), "report")
            self.client.set_terminated(self.parent, status)

    def sync(self, trial: TrialRecord) -> None:
        """Bring MLflow up to what the store holds of one trial: its parameters, missing rounds and outcome."""
        key = trial.plan.key
        with self._tolerant(key):
            written = self._written.pop(key, None) or self._open(trial.plan)  # what fails half-way is asked for anew
            written = self._rounds(written, trial)
            name = trial.outcome.outcome if trial.outcome else "running"
            if name != written.outcome:
                written = self._outcome(written, trial, name)
            self._written[key] = written

    def interrupt(self, trial: TrialRecord) -> None:
        """Show a trial that was stopped before its end; a resumed sweep goes on with the same run."""
        with self._tolerant(trial.plan.key):
            written = self._written.pop(trial.plan.key, None) or self._open(trial.plan)
            self.client.set_terminated(written.run_id, "KILLED")
            self.client.set_tag(written.run_id, OUTCOME, "interrupted")

    @contextlib.contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """MLflow is a view: its trouble must not end a run."""
        try:
            yield
            self.unsynced.pop(what, None)
        except Exception:
            self.unsynced[what] = traceback.format_exc()

    def _experiment(self, store: Store, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            location = (store.root / "artifacts" / name).as_uri()
            return str(self.client.create_experiment(name, artifact_location=location))
        if found.lifecycle_stage == "deleted":  # on MLflow's page; whoever runs it again wants to see it again
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _open(self, plan: TrialPlan) -> _Written:
        """The trial's run, made on first use, and what it holds."""
        tags = {"fedsweep.key": plan.key, "fedsweep.kind": "trial"}
        if self.parent is not None:
            tags["mlflow.parentRunId"] = self.parent
        run_id = self._find(tags)
        if run_id is None:
            shown = {"fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), OUTCOME: "running"}
            shown |= {f"fedsweep.{name}_digest": digest for name, digest in plan.digests.items()}
            shown |= {f"fedsweep.{name}": mark for name, mark in plan.marks.items()}
            created = self.client.create_run(
                self.experiment_id, run_name=run_name(plan), tags={**tags, **shown, **origin()}
            )
            run_id = created.info.run_id
        if not self._is_described(run_id):
            self._describe(run_id, plan.config)
            self.client.set_tag(run_id, DESCRIBED, "yes")
        # Every round has this metric, and rounds are written whole or not at all.
        steps = [one.step for one in self.client.get_metric_history(run_id, "seconds/round")]
        return _Written(run_id, max(steps, default=-1), self.client.get_run(run_id).data.tags[OUTCOME])

    def _rounds(self, written: _Written, trial: TrialRecord) -> _Written:
        """Write the rounds that MLflow lacks, many in one request, none of them cut in two."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        now = int(time.time() * 1000)
        for record in trial.history:
            if record.round <= written.step:
                continue
            values = {**record.metrics, "seconds/round": record.seconds}
            if len(batch) + len(values) > BATCH:
                self.client.log_batch(written.run_id, metrics=batch)
                batch = []
            batch += [Metric(name, value, now, record.round) for name, value in values.items()]
        if batch:
            self.client.log_batch(written.run_id, metrics=batch)
        return replace(written, step=max(written.step, trial.last_round))

    def _outcome(self, written: _Written, trial: TrialRecord, name: str) -> _Written:
        """Show how the trial ended, or that it goes on; the outcome's tag comes last: all else is there then."""
        run_id, outcome = written.run_id, trial.outcome
        if outcome is None:
            self.client.update_run(run_id, status="RUNNING")
        else:
            if outcome.error:
                self.client.log_text(run_id, outcome.error, "error.txt")
                self.client.set_tag(run_id, "fedsweep.error", outcome.error.strip().splitlines()[-1][:500])
            for path in trial.artifacts.values():
                self.client.log_artifact(run_id, str(path))
            there = self.client.get_run(run_id).data.metrics
            for metric, value in _summary(trial).items():
                if there.get(metric) != value:
                    self.client.log_metric(run_id, metric, value)
            self.client.set_tag(run_id, "fedsweep.round", str(outcome.round))
            self.client.set_terminated(run_id, STATUS[outcome.outcome])
        self.client.set_tag(run_id, OUTCOME, name)
        return replace(written, outcome=name)

    def _find(self, tags: Mapping[str, str]) -> str | None:
        conditions = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = self.client.search_runs([self.experiment_id], conditions, max_results=1)
        return runs[0].info.run_id if runs else None

    def _is_described(self, run_id: str) -> bool:
        return DESCRIBED in self.client.get_run(run_id).data.tags

    def _describe(self, run_id: str, nested: Mapping[str, Json]) -> None:
        """All values under their dotted names; writing the same again is allowed."""
        from mlflow.entities import Param

        values = flat(nested).items()
        params = [Param(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values]
        self.client.log_batch(run_id, params=params)


@dataclass(frozen=True)
class _Written:
    """What MLflow holds of a trial."""

    run_id: str
    step: int
    outcome: str


def _summary(trial: TrialRecord) -> dict[str, float]:
    if trial.last_round <= 0:
        return {}
    last = mean_of_last(trial.history, "accuracy/mean")
    return {"accuracy/mean_of_last_4": last, "megabytes/sent": total_megabytes(trial.history)}


def run_name(plan: TrialPlan) -> str:
    """For people: `rank 4 · seed 0`, `without momentum · seed 0`."""
    values = [setting(name.rsplit(".", 1)[-1], value) for name, value in plan.arm.items()]
    return " · ".join([*values, f"seed {plan.seed}"])
