"""MLflow experiments and runs: finding or creating each one once, and writing parameters, rounds and outcomes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedsweep.common.paths import inside
from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepManifest, TrialPlan, TrialRecord
from fedsweep.tracking import (
    sweep_description as note,
)
from fedsweep.tracking import (
    sweep_description as parent,
)
from fedsweep.tracking import (
    trial_description as picture,
)
from fedsweep.tracking import (
    ui as view,
)
from fedsweep.tracking.code_origin import environment, origin
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.trial_description import images_of, inputs

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run


DESCRIBED = "fedsweep.described"
"""The tag of a run that has its parameters."""


class Experiment:
    """One MLflow experiment. Raises what MLflow raises."""

    def __init__(self, destination: Destination, name: str) -> None:
        self.destination, self.name = destination, name
        self.client = destination.client()
        self._id: str | None = None
        self._doubtful: set[str] = set()  # whose making had no answer

    @property
    def id(self) -> str:
        """Its number, made on first use."""
        if self._id is None:
            self._id = self._open()
        return self._id

    def _open(self) -> str:
        found = self.client.get_experiment_by_name(self.name)
        if found is None:
            folder = self.destination.artifacts
            location = None if folder is None else inside(folder, self.name).as_uri()
            try:
                return str(self.client.create_experiment(self.name, artifact_location=location))
            except Exception:  # another process made it just now, or it was made and the answer lost
                found = self.client.get_experiment_by_name(self.name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":  # on MLflow's page; whoever runs it again wants to see it again
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def make(self, key: str, name: str, tags: dict[str, str]) -> Run:
        """A new run."""
        now = int(time.time() * 1000)
        try:
            return self.client.create_run(self.id, start_time=now, run_name=name, tags=tags)
        except Exception:
            self._doubtful.add(key)
            raise

    def search(self, tags: Mapping[str, str]) -> list[Run]:
        """All runs with these tags, oldest first."""
        where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[Run] = []
        page = None
        while page is None or page.token:
            page = self.client.search_runs(
                [self.id],
                where,
                max_results=1000,
                order_by=["attributes.start_time ASC"],
                page_token=page.token if page else None,
            )
            found += page
        return found

    def one(self, same: Iterable[Run], keep: str | None = None) -> Run | None:
        """The run to go on with among those with the same tags.

        Others are deleted: a server made them, but its answer was lost, or it was made only after we had asked again.
        """
        runs = sorted(same, key=lambda run: (run.info.run_id != keep, DESCRIBED not in run.data.tags))
        for late in runs[1:]:
            self.client.delete_run(late.info.run_id)
        return runs[0] if runs else None

    def delete_late(self, key: str, tags: Mapping[str, str], keep: str) -> None:
        """Once more, where a run's making had no answer: a slow server may have made another one since."""
        if key in self._doubtful:
            self.one(self.search(tags), keep)
            self._doubtful.discard(key)


NO_PARAMETERS: Mapping[str, bool | Mapping[str, bool]] = {
    **dict.fromkeys(("id", "name", "digests"), True),
    "reference": {"arms": True},
}
"""Of a sweep's manifest: what tags say, and what may be longer than a parameter of MLflow; sweep.json has all."""


@dataclass(frozen=True)
class _Written:
    """What MLflow holds of a trial."""

    run_id: str
    start: int
    described: bool
    state: picture.State
    marks: Mapping[str, str]
    step: int | None
    """The last round, -1 before the first, None where MLflow was not asked."""


class Runs:
    """The runs of one MLflow experiment, below a parent run where they belong to a sweep.

    Raises what MLflow raises; what was being written then is asked for anew by the next call. For one thread at a time.
    """

    def __init__(self, destination: Destination, experiment: str) -> None:
        self.experiment = experiment
        self._found = Experiment(destination, experiment)
        self.client = self._found.client
        self.sweep: SweepManifest | None = None
        self.parent: str | None = None
        self._asked = ""  # what the search space says of itself
        self._together = parent.Together()
        self._written: dict[str, _Written] = {}
        self._children: dict[str, Run] | None = None  # of the parent, as MLflow had them; None: ask for each
        self._opened: set[str] = set()  # trials that this session found or made

    def probe(self) -> None:
        """Ask for something small."""
        self.client.search_experiments(max_results=1)

    @property
    def experiment_id(self) -> str:
        """The experiment, made on first use."""
        return self._found.id

    def open_database(self, root: Path) -> None:
        """Open the store's own database, which the first use creates; that is not safe in two processes at once."""
        with FileLock(root / ".mlflow.lock"):
            _ = self.experiment_id

    def belong(self, sweep: SweepManifest) -> None:
        """From now on trials are those of this sweep. Asks MLflow nothing."""
        self.sweep, self.parent, self._children = sweep, None, None
        self._together = parent.Together()
        self._written.clear()
        self._opened.clear()

    def open_sweep(self, folder: Path) -> None:
        """Show the sweep as running, with its YAMLs, package versions and commit."""
        run = self.client.get_run(self._open_parent())
        run_id = run.info.run_id
        self._asked = note.question(folder)
        if DESCRIBED not in run.data.tags:
            for file in ("search_space.yaml", "experiment.yaml", "sweep.json"):
                self.client.log_artifact(run_id, str(folder / file))
            self.client.log_dict(run_id, environment(), "environment.json")
            values = self._manifest.model_dump(mode="json", exclude=NO_PARAMETERS)
            if self._asked:
                self.client.set_experiment_tag(self.experiment_id, note.NOTE, self._asked)
            described = {note.NOTE: note.sweep_note(self._manifest, self._asked), DESCRIBED: "yes"}
            self._send(run_id, (), values, described)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        self._show_view(run_id)

    def close_sweep(self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None) -> None:
        """End the parent run with its summary and the report."""
        run_id = self._open_parent()
        if artifacts is not None:
            self.client.log_artifacts(run_id, str(artifacts), "report")
        there = self.client.get_run(run_id).data.metrics
        for name, value in metrics.items():
            if there.get(name) != value:
                self.client.log_metric(run_id, name, value)
        if self._together.images:
            self.client.log_inputs(run_id, inputs(self._together.images))
        described = note.sweep_note(self._manifest, self._asked, artifacts)
        self._send(run_id, (), {}, {**self._together.tags, note.NOTE: described})
        self.client.set_terminated(run_id, status)
        self._found.delete_late(self._manifest.id, self._parent_tags(), run_id)
        self._show_view(run_id)

    def sync(self, trial: TrialRecord) -> None:
        """Bring MLflow up to what the store holds of one trial: its parameters, missing rounds and outcome."""
        self._together.add(trial)
        key, state = trial.plan.key, picture.state(trial)
        written = self._written.pop(key, None) or self._open(trial.plan)
        changed = written.state != state
        if written.step is None and (changed or trial.outcome is None):
            written = replace(written, step=self._last_step(written.run_id))
        if changed:
            self._change(written.run_id, trial)
        described = {} if written.described else {DESCRIBED: "yes"}
        if described and (images := images_of(trial.plan)):
            self.client.log_inputs(written.run_id, inputs(images))
        rounds = [] if written.step is None else picture.points(trial, written.start, written.step)
        rounds += picture.summary(trial, written.start) if changed else []
        marks = picture.marks(trial.plan)
        news = {name: mark for name, mark in marks.items() if written.marks.get(name) != mark}
        # The outcome last: all else is there then.
        tags = {**described, **news, **(picture.standing(trial) if changed else {})}
        self._send(written.run_id, rounds, trial.plan.config if described else {}, tags)
        if trial.outcome is not None:
            self._found.delete_late(key, self._tags(key), written.run_id)
        step = None if written.step is None else max(written.step, trial.last_round)
        self._written[key] = replace(written, described=True, state=state, marks=marks, step=step)

    def interrupt(self, trial: TrialRecord) -> None:
        """Show a trial that was stopped before its end; a resumed sweep goes on with the same run."""
        self.sync(trial)
        written = self._written.pop(trial.plan.key)
        self.client.set_terminated(written.run_id, "KILLED")
        self.client.set_tag(written.run_id, picture.OUTCOME, "interrupted")
        self._written[trial.plan.key] = replace(written, state=("interrupted", None))

    # Finding and making

    @property
    def _manifest(self) -> SweepManifest:
        if self.sweep is None:
            raise RuntimeError("these runs belong to no sweep")
        return self.sweep

    def _parent_tags(self) -> dict[str, str]:
        return {"fedsweep.kind": "sweep", "fedsweep.sweep": self._manifest.id}

    def _open_parent(self) -> str:
        """The parent run, and with it all its children that MLflow has: none where it is made here."""
        if self.parent is not None:
            return self.parent
        sweep, tags = self._manifest, self._parent_tags()
        if found := self._found.one(self._found.search(tags)):
            children: dict[str, list[Run]] = {}
            for run in self._found.search({"mlflow.parentRunId": found.info.run_id}):
                children.setdefault(run.data.tags.get(picture.KEY, ""), []).append(run)
            self._children = {key: one for key, same in children.items() if (one := self._found.one(same))}
            self.parent = found.info.run_id
        else:
            shown = {**tags, **origin(), **parent.tags(sweep)}
            self.parent = self._found.make(sweep.id, f"{sweep.name} {sweep.id}", shown).info.run_id
            self._children = {}
        return self.parent

    def _tags(self, key: str) -> dict[str, str]:
        """By which a trial's run is found."""
        tags = {picture.KEY: key, "fedsweep.kind": "trial"}
        return tags if self.sweep is None else {**tags, "mlflow.parentRunId": self._open_parent()}

    def _open(self, plan: TrialPlan) -> _Written:
        """The trial's run, made on first use, and what it holds."""
        tags = self._tags(plan.key)
        if self._children is not None and plan.key not in self._opened:
            found = self._children.pop(plan.key, None)
        else:
            found = self._found.one(self._found.search(tags))
        self._opened.add(plan.key)
        if found is None:
            varied = () if self.sweep is None else self.sweep.varied
            shown = {**tags, **picture.starting(plan, varied)}
            made = self._found.make(plan.key, picture.run_name(plan), shown).info
            return _Written(made.run_id, made.start_time, False, picture.RUNNING, picture.marks(plan), -1)
        info, there = found.info, found.data.tags
        return _Written(
            info.run_id, info.start_time, DESCRIBED in there, picture.shown_state(there), marks=there, step=None
        )

    # Writing

    def _last_step(self, run_id: str) -> int:
        """Every round has this metric, and rounds are written whole or not at all."""
        return max((one.step for one in self.client.get_metric_history(run_id, "seconds/round")), default=-1)

    def _change(self, run_id: str, trial: TrialRecord) -> None:
        """Show how the trial ended, or that it goes on, but for the tags."""
        if trial.outcome is None:
            self.client.update_run(run_id, status="RUNNING")
            return
        if trial.outcome.error:
            self.client.log_text(run_id, trial.outcome.error, "error.txt")
        for path in trial.artifacts.values():
            self.client.log_artifact(run_id, str(path))
        self.client.set_terminated(run_id, picture.STATUS[trial.outcome.outcome])

    def _show_view(self, run_id: str) -> None:
        """The saved view of the page. Its form is MLflow's own and undocumented, so that nothing hangs on it."""
        with contextlib.suppress(Exception):
            shown = view.encoded(view.sweep_view(self._manifest, run_id, self._together.extent))
            self.client.set_experiment_tag(self.experiment_id, view.TAG + self._manifest.id, shown)

    def _send(
        self, run_id: str, rounds: Iterable[list[Metric]], parameters: Mapping[str, Json], tags: Mapping[str, str]
    ) -> None:
        for request in picture.requests(rounds, parameters, tags):
            self.client.log_batch(run_id, **request)
