"""MLflow runs of sweeps and trials: parameters, rounds and outcomes, each written once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepManifest, TrialPlan, TrialRecord
from fedsweep.tracking import sweep_description, trial_description
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.experiment import DESCRIBED, KEY, PARENT, Experiment, sweep_tags, trial_tags
from fedsweep.tracking.sweep_description import NOTE, TrialsSummary, environment, origin, sweep_note
from fedsweep.tracking.ui import save_view

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run


NO_PARAMETERS: Mapping[str, bool | Mapping[str, bool]] = {
    **dict.fromkeys(("id", "name", "digests"), True),
    "reference": {"arms": True},
}
"""Entries of the manifest that are not parameters: they are tags, or may exceed MLflow's length limit."""


@dataclass(frozen=True)
class _Written:
    """The state of a trial's run in MLflow."""

    run_id: str
    start: int
    described: bool
    state: trial_description.State
    marks: Mapping[str, str]
    step: int | None
    """The last round, -1 before the first, None if unknown."""


class Runs:
    """The runs of one MLflow experiment, below a parent run if they belong to a sweep.

    Methods pass on MLflow's exceptions, after which the next call reads the run again. Not thread-safe.
    """

    def __init__(self, destination: Destination, experiment: str) -> None:
        self.experiment = experiment
        self._found = Experiment(destination, experiment)
        self.client = self._found.client
        self.sweep: SweepManifest | None = None
        self.parent: str | None = None
        self._question = ""  # of the search space
        self._summary = TrialsSummary()
        self._written: dict[str, _Written] = {}
        self._children: dict[str, Run] | None = None  # of the parent when it was opened; None: search for each
        self._opened: set[str] = set()  # trials that this session found or created

    @property
    def experiment_id(self) -> str:
        """The id of the experiment, which is created on first use."""
        return self._found.id

    def open_database(self, root: Path) -> None:
        """Open or create the store's own database, under a lock: two processes must not create it at once."""
        with FileLock(root / ".mlflow.lock"):
            _ = self.experiment_id

    def belong(self, sweep: SweepManifest) -> None:
        """Assign later trials to a sweep, without a request to MLflow."""
        self.sweep, self.parent, self._children = sweep, None, None
        self._summary = TrialsSummary()
        self._written.clear()
        self._opened.clear()

    def open_sweep(self, folder: Path) -> None:
        """Mark the sweep as running, and record its YAML files, package versions and commit."""
        run = self.client.get_run(self._open_parent())
        run_id = run.info.run_id
        self._question = sweep_description.question(folder)
        if DESCRIBED not in run.data.tags:
            for file in ("search_space.yaml", "experiment.yaml", "sweep.json"):
                self.client.log_artifact(run_id, str(folder / file))
            self.client.log_dict(run_id, environment(), "environment.json")
            values = self._manifest.model_dump(mode="json", exclude=NO_PARAMETERS)
            if self._question:
                self.client.set_experiment_tag(self.experiment_id, NOTE, self._question)
            self._send(run_id, (), values, {NOTE: sweep_note(self._manifest, self._question), DESCRIBED: "yes"})
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        self._save_view(run_id)

    def close_sweep(self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None) -> None:
        """End the parent run with its summary and the report."""
        run_id = self._open_parent()
        if artifacts is not None:
            self.client.log_artifacts(run_id, str(artifacts), "report")
        written = self.client.get_run(run_id).data.metrics
        for name, value in metrics.items():
            if written.get(name) != value:
                self.client.log_metric(run_id, name, value)
        if self._summary.images:
            self.client.log_inputs(run_id, trial_description.dataset_inputs(self._summary.images))
        self._send(run_id, (), {}, {**self._summary.tags, NOTE: sweep_note(self._manifest, self._question, artifacts)})
        self.client.set_terminated(run_id, status)
        self._found.delete_late(self._manifest.id, sweep_tags(self._manifest.id), run_id)
        self._save_view(run_id)

    def sync(self, trial: TrialRecord) -> None:
        """Write the missing parameters, rounds and outcome of one trial."""
        self._summary.add(trial)
        key, state = trial.plan.key, trial_description.state(trial)
        written = self._written.pop(key, None) or self._open(trial.plan)
        changed = written.state != state
        if written.step is None and (changed or trial.outcome is None):
            written = replace(written, step=self._last_step(written.run_id))
        if changed:
            self._change(written.run_id, trial)
        described = {} if written.described else {DESCRIBED: "yes"}
        if described and (images := trial_description.images_of(trial.plan)):
            self.client.log_inputs(written.run_id, trial_description.dataset_inputs(images))
        rounds = [] if written.step is None else trial_description.round_metrics(trial, written.start, written.step)
        rounds += trial_description.final_metrics(trial, written.start) if changed else []
        marks = trial_description.provenance_tags(trial.plan)
        news = {name: mark for name, mark in marks.items() if written.marks.get(name) != mark}
        # The outcome comes last, once all else is written.
        tags = {**described, **news, **(trial_description.outcome_tags(trial) if changed else {})}
        self._send(written.run_id, rounds, trial.plan.config if described else {}, tags)
        if trial.outcome is not None:
            self._found.delete_late(key, self._tags(key), written.run_id)
        step = None if written.step is None else max(written.step, trial.last_round)
        self._written[key] = replace(written, described=True, state=state, marks=marks, step=step)

    def interrupt(self, trial: TrialRecord) -> None:
        """Mark a trial as stopped before its end; a resumed sweep continues the same run."""
        self.sync(trial)
        written = self._written.pop(trial.plan.key)
        self.client.set_terminated(written.run_id, "KILLED")
        self.client.set_tag(written.run_id, trial_description.OUTCOME, "interrupted")
        self._written[trial.plan.key] = replace(written, state=("interrupted", None))

    # Finding and creating

    @property
    def _manifest(self) -> SweepManifest:
        if self.sweep is None:
            raise RuntimeError("these runs belong to no sweep")
        return self.sweep

    def _open_parent(self) -> str:
        """Find or create the parent run, and find all its children."""
        if self.parent is not None:
            return self.parent
        sweep, tags = self._manifest, sweep_tags(self._manifest.id)
        if found := self._found.keep_one(self._found.search(tags)):
            children: dict[str, list[Run]] = {}
            for run in self._found.search({PARENT: found.info.run_id}):
                children.setdefault(run.data.tags.get(KEY, ""), []).append(run)
            self._children = {key: one for key, same in children.items() if (one := self._found.keep_one(same))}
            self.parent = found.info.run_id
        else:
            shown = {**tags, **origin(), **sweep_description.description_tags(sweep)}
            self.parent = self._found.create(sweep.id, f"{sweep.name} {sweep.id}", shown).info.run_id
            self._children = {}
        return self.parent

    def _tags(self, key: str) -> dict[str, str]:
        return trial_tags(key, None if self.sweep is None else self._open_parent())

    def _open(self, plan: TrialPlan) -> _Written:
        """Find or create the trial's run."""
        tags = self._tags(plan.key)
        if self._children is not None and plan.key not in self._opened:
            found = self._children.pop(plan.key, None)
        else:
            found = self._found.keep_one(self._found.search(tags))
        self._opened.add(plan.key)
        if found is None:
            varied = () if self.sweep is None else self.sweep.varied
            shown = {**tags, **trial_description.start_tags(plan, varied), **origin()}
            made = self._found.create(plan.key, trial_description.run_name(plan), shown).info
            marks = trial_description.provenance_tags(plan)
            return _Written(made.run_id, made.start_time, False, trial_description.RUNNING, marks, -1)
        info, shown = found.info, found.data.tags
        state = trial_description.recorded_state(shown)
        return _Written(info.run_id, info.start_time, DESCRIBED in shown, state, marks=shown, step=None)

    # Writing

    def _last_step(self, run_id: str) -> int:
        """Return the last recorded round, by a metric that every round has; rounds are written whole or not at all."""
        return max((one.step for one in self.client.get_metric_history(run_id, "seconds/round")), default=-1)

    def _change(self, run_id: str, trial: TrialRecord) -> None:
        """Record the end of the trial, or that it continues, except in tags."""
        if trial.outcome is None:
            self.client.update_run(run_id, status="RUNNING")
            return
        if trial.outcome.error:
            self.client.log_text(run_id, trial.outcome.error, "error.txt")
        for path in trial.artifacts.values():
            self.client.log_artifact(run_id, str(path))
        self.client.set_terminated(run_id, trial_description.STATUS[trial.outcome.outcome])

    def _save_view(self, run_id: str) -> None:
        save_view(self.client, self.experiment_id, self._manifest, run_id, self._summary.extent)

    def _send(
        self, run_id: str, rounds: Iterable[list[Metric]], parameters: Mapping[str, Json], tags: Mapping[str, str]
    ) -> None:
        for request in trial_description.requests(rounds, parameters, tags):
            self.client.log_batch(run_id, **request)
