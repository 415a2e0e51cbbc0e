"""MLflow runs of sweeps and trials. Each parameter, round and outcome is written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.common.config import flat
from fedsweep.common.paths import summary
from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepManifest, TrialPlan, TrialRecord
from fedsweep.tracking import trial_description
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.experiment import DESCRIBED, KEY, PARENT, Experiment, sweep_tags, trial_tags
from fedsweep.tracking.sweep_description import NOTE, TrialsSummary, description_tags, environment, origin, sweep_note
from fedsweep.tracking.trial_description import OUTCOME, dataset_inputs, state
from fedsweep.tracking.ui import save_views

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run


METRICS, PARAMETERS = 800, 100
"""Items per request; MLflow accepts at most 1,000 items, and at most 100 parameters among them."""
NO_PARAMETERS: Mapping[str, Any] = {
    "id": True,
    "name": True,
    "digests": True,
    "titles": True,
    "reference": {"arms": True},
}
"""Entries of the manifest that are not logged as parameters: they are tags, or may exceed MLflow's length limit."""


@dataclass(frozen=True)
class _Written:
    """The part of a trial's run that is known to be in MLflow."""

    run_id: str
    start: int
    tags: Mapping[str, str]
    step: int | None
    """The last recorded round: -1 if there is none, None if it is unknown."""


class Runs:
    """The runs of one MLflow experiment. The runs of a sweep's trials are children of a parent run.

    Methods do not catch MLflow's exceptions. After an exception, the next call reads the run's state from MLflow again.
    The class is not thread-safe.
    """

    def __init__(self, destination: Destination, experiment: str) -> None:
        self.experiment = Experiment(destination, experiment)
        self.client = self.experiment.client
        self.sweep: SweepManifest | None = None
        self.parent: str | None = None
        self._question = ""  # the first comment of the search space
        self._summary = TrialsSummary()
        self._written: dict[str, _Written] = {}
        self._children: dict[str, Run] | None = None  # found with the parent; None: search for each run separately
        self._opened: set[str] = set()  # trials that this session found or created

    def open_sweep(self, sweep: SweepManifest, folder: Path) -> None:
        """Find or create the parent run of a sweep, and mark it as running.

        The sweep's YAML files and the package versions are logged in a new parent run. All trials that are synced
        afterwards are assigned to this sweep.
        """
        if sweep != self.sweep:
            self.sweep, self.parent, self._children, self._summary = sweep, None, None, TrialsSummary()
            self._written.clear()
            self._opened.clear()
        run = self.client.get_run(self._open_parent())
        run_id = run.info.run_id
        described = description_tags(sweep)
        if DESCRIBED in run.data.tags and any(run.data.tags.get(name) != value for name, value in described.items()):
            self.client.log_artifact(run_id, str(folder / "sweep.json"))  # the sweep was changed after it had started
            self._send(run_id, [], {}, described)
        space = folder / "search_space.yaml"
        self._question = summary(space) if space.exists() else ""
        if DESCRIBED not in run.data.tags:
            for file in ("search_space.yaml", "experiment.yaml", "sweep.json"):
                self.client.log_artifact(run_id, str(folder / file))
            self.client.log_dict(run_id, environment(), "environment.json")
            values = self._manifest.model_dump(mode="json", exclude=NO_PARAMETERS)
            if self._question:
                self.client.set_experiment_tag(self.experiment.id, NOTE, self._question)
            self._send(run_id, [], values, {NOTE: sweep_note(self._manifest, self._question), DESCRIBED: "yes"})
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        save_views(self.client, self.experiment.id, self._manifest, run_id, self._summary.extent)

    def close_sweep(self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None) -> None:
        """Write `metrics`, a description and the report to the parent run, and end the run with `status`.

        `artifacts` is the folder of the report, or None if there is no report.
        """
        run_id = self._open_parent()
        if artifacts is not None:
            self.client.log_artifacts(run_id, str(artifacts), "report")
        written = self.client.get_run(run_id).data.metrics
        for name, value in metrics.items():
            if written.get(name) != value:
                self.client.log_metric(run_id, name, value)
        if self._summary.images:
            self.client.log_inputs(run_id, list(self._summary.images.values()))
        self._send(run_id, [], {}, {**self._summary.tags, NOTE: sweep_note(self._manifest, self._question, artifacts)})
        self.client.set_terminated(run_id, status)
        self.experiment.delete_late(self._manifest.id, sweep_tags(self._manifest.id), run_id)
        save_views(self.client, self.experiment.id, self._manifest, run_id, self._summary.extent)

    def sync(self, trial: TrialRecord) -> None:
        """Update the MLflow run of a trial.

        The parameters, the rounds and the outcome that the MLflow run does not contain yet are written.
        """
        self._summary.add(trial)
        key, outcome = trial.plan.key, trial_description.outcome_tags(trial)
        written = self._written.pop(key, None) or self._open(trial.plan)
        run_id, step, described = written.run_id, written.step, DESCRIBED in written.tags
        changed = state(written.tags) != state(outcome)
        if step is None and (changed or trial.outcome is None):
            # Every round has this metric, and all metrics of a round are written in one request.
            step = max((one.step for one in self.client.get_metric_history(run_id, "seconds/round")), default=-1)
        if changed:
            self._change(run_id, trial)
        if not described and (images := dataset_inputs(trial.plan)):
            self.client.log_inputs(run_id, images)
        after = trial.last_round if step is None else step
        rounds = trial_description.metrics(trial, written.start, after, ended=changed and trial.outcome is not None)
        tags = {} if described else {DESCRIBED: "yes"}
        marks = trial_description.provenance_tags(trial.plan) | trial_description.group_tags(trial)
        tags |= {name: mark for name, mark in marks.items() if written.tags.get(name) != mark}
        tags |= outcome if changed else {}  # last: these tags show that the rest has been written
        self._send(run_id, rounds, {} if described else trial.plan.config, tags)
        if trial.outcome is not None:
            self.experiment.delete_late(key, self._tags(key), run_id)
        step = None if step is None else max(step, trial.last_round)
        self._written[key] = replace(written, tags={**written.tags, **tags}, step=step)

    def interrupt(self, trial: TrialRecord) -> None:
        """Sync a trial, and mark its run as interrupted. A resumed sweep continues the run."""
        self.sync(trial)
        written = self._written.pop(trial.plan.key)
        self.client.set_terminated(written.run_id, "KILLED")
        self.client.set_tag(written.run_id, OUTCOME, "interrupted")
        self._written[trial.plan.key] = replace(written, tags={**written.tags, OUTCOME: "interrupted"})

    @property
    def _manifest(self) -> SweepManifest:
        if self.sweep is None:
            raise RuntimeError("the runs do not belong to a sweep")
        return self.sweep

    def _open_parent(self) -> str:
        """Return the id of the parent run.

        The first call finds or creates the parent run, and finds the runs of the sweep's trials.
        """
        if self.parent is not None:
            return self.parent
        sweep, tags = self._manifest, sweep_tags(self._manifest.id)
        self._children = {}
        if found := self.experiment.keep_one(self.experiment.search(tags)):
            children: dict[str, list[Run]] = {}
            for run in self.experiment.search({PARENT: found.info.run_id}):
                children.setdefault(run.data.tags.get(KEY, ""), []).append(run)
            self._children = {key: one for key, same in children.items() if (one := self.experiment.keep_one(same))}
        else:
            shown = {**tags, **origin(), **description_tags(sweep)}
            found = self.experiment.create(sweep.id, f"{sweep.name} {sweep.id}", shown)
        self.parent = found.info.run_id
        return self.parent

    def _tags(self, key: str) -> dict[str, str]:
        return trial_tags(key, None if self.sweep is None else self._open_parent())

    def _open(self, plan: TrialPlan) -> _Written:
        """Find or create the run of a trial, and return the part of the run that is already in MLflow."""
        tags = self._tags(plan.key)
        if self._children is not None and plan.key not in self._opened:
            found = self._children.pop(plan.key, None)
        else:
            found = self.experiment.keep_one(self.experiment.search(tags))
        self._opened.add(plan.key)
        step = None
        if found is None:
            varied = () if self.sweep is None else self.sweep.varied
            shown = {**tags, **trial_description.start_tags(plan, varied), **origin()}
            found, step = self.experiment.create(plan.key, trial_description.run_name(plan), shown), -1
        return _Written(found.info.run_id, found.info.start_time, found.data.tags, step)

    def _change(self, run_id: str, trial: TrialRecord) -> None:
        """Update the status of a trial's run. If the trial has ended, also write its artifacts."""
        if trial.outcome is None:
            self.client.update_run(run_id, status="RUNNING")
            return
        if trial.outcome.error:
            self.client.log_text(run_id, trial.outcome.error, "error.txt")
        for path in trial.artifacts.values():
            self.client.log_artifact(run_id, str(path))
        self.client.set_terminated(run_id, trial_description.STATUS[trial.outcome.outcome])

    def _send(
        self, run_id: str, rounds: Sequence[list[Metric]], parameters: Mapping[str, Json], tags: Mapping[str, str]
    ) -> None:
        """Write metrics, parameters and tags in as few requests as possible.

        The metrics of a round are always in one request, and all tags are in the last request.
        """
        from mlflow.entities import Param, RunTag

        values = flat(parameters).items()
        params = [Param(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values]
        while len(params) > PARAMETERS:
            self.client.log_batch(run_id, params=params[:PARAMETERS])
            params = params[PARAMETERS:]
        batch: list[Metric] = []
        for metrics in rounds:
            if len(batch) + len(metrics) > METRICS:
                self.client.log_batch(run_id, metrics=batch)
                batch = []
            batch += metrics
        if batch or params or tags:
            self.client.log_batch(run_id, batch, params, [RunTag(name, value) for name, value in tags.items()])
