"""Ray's events in the driver: outcomes to the store, rounds to MLflow, rows to the live table."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial

from fedsweep.common.errors import disk_is_full
from fedsweep.results import (
    Attempts,
    Outcome,
    OutcomeName,
    SweepStore,
    TrialPlan,
    TrialRecord,
)
from fedsweep.results.remote import LOST
from fedsweep.results.remote.objects import UnreachableError
from fedsweep.sweep.cluster.packing import Packing, retried
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.pruning.population_state import Generations
from fedsweep.sweep.running.display import LiveTable
from fedsweep.tracking import Recorder

ENDS: dict[str, OutcomeName] = {"diverged": "diverged", "failed": "failed", "memory": "failed"}
"""Outcomes of what a worker tells as an error."""

LOST_WORKERS = 3
"""How often a trial may lose its worker in one session and be handed out again, before it counts as failed."""


class Recording(Callback):
    """One writer for everything. `full` says that no more can be written, `away` why not, and the session ends."""

    def __init__(self, sweep: SweepStore, recorder: Recorder, display: LiveTable, rounds: int, reuse: Reuse) -> None:
        """`joint` is given later, where arms are halved together or members are a population; `packing` always."""
        self.sweep, self.recorder, self.display, self.rounds = sweep, recorder, display, rounds
        self.reuse = reuse
        self.full, self.away = False, ""
        self.joint: ArmState | Generations | None = None
        self.packing: Packing | None = None
        self._shown: dict[str, int] = {}
        self._lost: Counter[str] = Counter()

    def announce(self, plan: TrialPlan) -> None:
        """A trial is about to be handed to Ray: put its plan on disk first."""
        with self.until_full():
            plan, trial = self.reuse.give(plan), self.sweep.trial(plan.key)
            if plan.start is not None and not trial.planned:  # a plan on disk says that the start is there
                trial.begin_from(self.sweep.trial(plan.start.key), plan.start.round)
            trial.plan(plan)
        self.display.started(plan)
        self.sync(plan.key)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """A round is on disk."""
        self.full = self.full or result.get("kind") == "full"
        self.sync(trial.config["trial"])

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The trial reached its round, reported an error, or was stopped by the scheduler."""
        key, result = trial.config["trial"], trial.last_result
        last = result.get("round", 0)
        if (kind := result.get("kind")) is not None:
            if retried(kind, trial.config["gpus"]):
                self.sync(key)
            elif kind in ENDS:  # where the disk was full, it goes on once there is room
                self._met(key, Outcome(outcome=ENDS[kind], round=last, error=result["error"]))
        elif self.joint is not None:
            self.joint.refresh(key)
            self.decide()
        elif last < self.rounds and last >= trial.config["until"]:
            self.sync(key)  # what it takes was measured, and it goes on
        else:
            self.end(key, Outcome(outcome="finished" if last >= self.rounds else "pruned", round=last))

    def keep(self, plan: TrialPlan, attempts: Attempts) -> None:
        """Put down what a trial was given of a GPU, and what it took."""
        with self.until_full():
            self.sweep.trial(plan.key).keep_attempts(attempts)
        if self.packing is not None and (sentence := self.packing.sentence(plan)) is not None:
            self.display.console.print(sentence)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The trial's worker was lost. What has no outcome is handed out again.

        Ray itself would do so only with a trial that was running, not with one that a lost worker had not begun yet.
        """
        key = trial.config["trial"]
        self.arrived(key)
        history = self.sweep.trial(key).history()
        last = history[-1].round if history else 0
        self._lost[key] += 1
        if last >= self.rounds:  # only its end went wrong
            self.end(key, Outcome(outcome="finished", round=last))
        elif self._lost[key] > LOST_WORKERS:
            self._met(key, Outcome(outcome="failed", round=last, error=_traceback_of(trial)))
        else:
            label = self.sweep.trial(key).read().plan.label
            self.display.console.print(f"{label}: its worker was lost; it goes on after round {last}.")
            self.decide()

    def _met(self, key: str, error: Outcome) -> None:
        if self.joint is None:
            self.end(key, error)
        else:
            self.joint.record_error(key, error)
            self.decide()

    def decide(self) -> None:
        """Put down what now follows from the records for all arms, and show what may be shown."""
        if self.joint is None:
            return
        for key, trial in {key: self.sweep.trial(key) for key in self.joint.plans}.items():
            outcome, before = self.joint.outcome(key), trial.outcome() if trial.planned else None
            if outcome is not None and outcome != before:
                self.announce(self.joint.plans[key]) if not trial.planned else None
                self.end(key, outcome)
            elif outcome is None and before is not None:  # a failure that is tried again had made its arm fall
                trial.reopen()
                self.sync(key)
            elif trial.planned and self._shown.get(key) != self.joint.visible(key):
                self.sync(key)

    def end(self, key: str, outcome: Outcome) -> None:
        """Put down how a trial ended."""
        with self.until_full():
            self.sweep.trial(key).end(outcome)
        self.sync(key)

    def arrived(self, key: str) -> None:
        """Something is told of a trial: bring here what its worker wrote, if the store is elsewhere."""
        with self.until_full():
            self.sweep.trial(key).remote.pull()

    @property
    def over(self) -> bool:
        """Whether no more can be written, here or in a store elsewhere; or another process writes there by now."""
        if self.sweep.remote.is_lost():
            self.away = LOST
        return self.full or bool(self.away)

    @contextlib.contextmanager
    def until_full(self) -> Iterator[None]:
        """An exception in a callback would end Ray's loop in the middle of things."""
        try:
            yield
        except UnreachableError as error:
            self.away = str(error)
        except OSError as error:
            if not disk_is_full(error):
                raise
            self.full = True

    def sync_all(self) -> None:
        """Bring MLflow up to the store once more, for what an earlier session or a locked database left out."""
        for trial in self.sweep.trials():
            self.sync(trial.plan.key)

    def sync(self, key: str) -> None:
        """Show what the store holds of a trial."""
        if self.sweep.trial(key).planned:  # else there was no space for its plan
            record = self.shown(key)
            self.display.update(record)
            self.recorder.sync(record)

    def shown(self, key: str) -> TrialRecord:
        """A trial as far as it may be shown, with what it has of a GPU among its marks."""
        record = self.sweep.trial(key).read()
        if self.joint is not None:
            last = self._shown[key] = self.joint.visible(key)
            record = replace(record, history=[one for one in record.history if one.round <= last])
        if self.packing is not None and (marks := self.packing.marks(record.plan)):
            marked = record.plan.model_copy(update={"marks": {**record.plan.marks, **marks}})
            record = replace(record, plan=marked)
        return record

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles its callbacks; ours has nothing to restore."""
        return {}


class WhenFull(Stopper):
    """Is told of each round first, and brings it here; ends the session when no more can be written."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Single trials are not stopped here."""
        if (key := result.get("config", {}).get("trial")) is not None:
            self.recording.arrived(key)
        return False

    def stop_all(self) -> bool:
        """Whether a write found no space."""
        return self.recording.over

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles its stoppers too."""
        return {}


def _traceback_of(trial: Trial) -> str:
    """The traceback inside the trial, from the file that Ray writes before it calls back; its storage gets it later."""
    path = trial.error_file
    if path is None or not Path(path).exists():
        return f"trial {trial.trial_id} ended with an error that Ray did not keep"
    lines = Path(path).read_text().strip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("Failure # "))
