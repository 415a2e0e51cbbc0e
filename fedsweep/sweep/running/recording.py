"""Callbacks that Ray calls in the driver to record outcomes, log rounds to MLflow and update the live table."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial

from fedsweep.common.errors import UserError, disk_is_full
from fedsweep.results import Outcome, OutcomeName, SweepStore, TrialPlan, TrialRecord
from fedsweep.results.remote import LOST
from fedsweep.results.remote.objects import UnreachableError
from fedsweep.results.steering import parallel_trials
from fedsweep.sweep.cluster.packing import Packing, larger
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.pruning.population_replacement import Generations
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.pruning.trial_state import TrialState
from fedsweep.sweep.running.display import LiveTable
from fedsweep.sweep.running.lost_workers import cause_of, reason_of
from fedsweep.sweep.running.shared_sweep import Following, OtherTrials
from fedsweep.sweep.running.steering import Steering
from fedsweep.sweep.running.watched import Stop
from fedsweep.sweep.search.ray_searchers import FolderSearcher
from fedsweep.tracking import Recorder

LOST_WORKERS = 3
"""Number of workers that a trial may lose in one session before it counts as failed."""


@dataclass
class WriteGuard:
    """The write errors that end a session, such as a full disk.

    They are collected instead of raised, because an exception in a callback would break Ray's event loop.
    """

    disk_full: bool = False
    remote_error: str = ""

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Record that the disk is full or that the remote store does not answer, instead of raising the error."""
        try:
            yield
        except UnreachableError as error:
            self.remote_error = str(error)
        except OSError as error:
            if not disk_is_full(error):
                raise
            self.disk_full = True


@dataclass(eq=False)
class Recording(Callback, Stopper):
    """The Ray callback and stopper that records outcomes and updates MLflow and the live table.

    No other object records outcomes. Ray calls stoppers before callbacks, so the stopper downloads each reported round
    from the remote store before the callback shows it.
    """

    sweep: SweepStore
    recorder: Recorder | None
    """None if another process is the driver of the sweep, which writes to MLflow."""
    display: LiveTable
    rounds: int
    reuse: Reuse
    writes: WriteGuard
    packing: Packing
    state: ArmState | TrialState | Generations | SeedState | None = None
    """The arms or trials that are halved, or the population; None for trials whose outcomes are independent."""
    retried: bool = True
    """True if a later session runs failed trials again."""
    steering: Steering | Following = field(kw_only=True)
    """The requests of other processes to change or stop the sweep."""
    others: OtherTrials = field(kw_only=True)
    """The trials that other processes run."""
    searcher: FolderSearcher | None = field(default=None, init=False)
    """The searcher that chooses the next trial, once Ray Tune runs."""
    stop: Stop = field(default_factory=Stop)
    _shown: dict[str, int] = field(default_factory=dict, init=False)
    _lost: Counter[str] = field(default_factory=Counter, init=False)
    _plans: dict[str, TrialPlan] = field(default_factory=dict, init=False)
    """The plans that this session has written."""

    def announce(self, plan: TrialPlan) -> None:
        """Write the plan of a trial before Ray starts the trial."""
        trial = self.sweep.trial(plan.key)
        with self.writes.catching(), self.steering.planning() as is_current:
            if not is_current or (self.others.present and trial.planned):
                return  # without a plan, its worker leaves the trial alone
            plan = self.reuse.give(plan, together=self.state is not None)
            if plan.start is not None and not trial.checkpoint.exists():
                trial.begin_from(self.sweep.trial(plan.start.key), plan.start.round)
            trial.plan(plan)
            self._plans[plan.key] = plan
        self.sync(plan.key)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Download the reported round if the store is remote, and return whether the trial must stop for a change."""
        if (key := result.get("config", {}).get("trial")) is not None:
            self.fetch(key)
        return self.steering.paused

    def stop_all(self) -> bool:
        """Return whether the session must stop.

        It must stop if a write error has occurred, or if another process is now running the sweep.
        """
        if self.sweep.remote.is_lost():
            self.writes.remote_error = LOST
        return self.writes.disk_full or bool(self.writes.remote_error)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """End Ray Tune's loop if the sweep was interrupted."""
        self.stop.check()
        self.look()

    def look(self) -> None:
        """Read what other processes have recorded since the last look."""
        news: list[str] = []
        if self.searcher is not None:
            with contextlib.suppress(OSError):  # of a network file system
                news = self.others.news(self.searcher.running)
        for key in news:
            with contextlib.suppress(UserError, OSError):  # the driver has just dropped its arm
                trial = self.sweep.trial(key)
                if trial.planned and self.searcher is not None and self.searcher.notice(trial.read().plan):
                    self.sync(key)
        if news:
            self.decide()
            self.display.parallel = parallel_trials(self.sweep) or self.display.parallel

    def look_again(self) -> None:
        """Read all trials of a sweep that other processes take part in."""
        if self.others.present and self.state is not None:
            for key in self.state.plans:
                self.state.refresh(key)

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Start MLflow's writes. Creating its database earlier would slow down the imports of the first worker."""
        if self.recorder is not None:
            self.recorder.begin()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Show a reported round, which is already on disk, in the live table and in MLflow."""
        self.stop.check_abandoned()
        self.writes.disk_full |= result.get("kind") == "full"
        if self.state is not None or result.get("round", 0) < self.rounds:  # the end of the trial shows its last round
            self.sync(trial.config["trial"])
        if isinstance(self.state, TrialState) and result.get("round") in self.state.milestones:
            self.decide()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Record the end of a trial that reached its last round, reported an error or was stopped by the scheduler."""
        self.stop.check_abandoned()
        key, result = trial.config["trial"], trial.last_result
        last = result.get("round", 0)
        if (kind := result.get("kind")) is not None:
            if kind == "taken":
                self.others.keep_away(key)
            elif kind == "memory" and larger(trial.config["gpus"]) is not None:
                self.sync(key)  # the trial is retried with a larger share
            elif kind != "full":  # after a full disk, the trial can continue in a later session
                outcome: OutcomeName = "diverged" if kind == "diverged" else "failed"
                self._failed(key, Outcome(outcome=outcome, round=last, error=result["error"]))
        elif self.state is not None:
            self.state.refresh(key)
            self.decide()
        elif last < self.rounds and (last >= trial.config["until"] or self.steering.paused):
            self.sync(key)  # the trial continues after a change, or as a probe that has measured the memory
        else:
            self.end(key, Outcome(outcome="finished" if last >= self.rounds else "pruned", round=last))

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Record that the worker of a trial was lost.

        The trial is started again, unless all its rounds are recorded or it has lost too many workers.
        """
        self.stop.check_abandoned()
        key = trial.config["trial"]
        self.fetch(key)
        history = self.sweep.trial(key).history()
        last = history[-1].round if history else 0
        self._lost[key] += 1  # Ray itself would retry only trials that the worker had started
        error = _traceback_of(trial)
        if last >= self.rounds:  # the worker was lost after the last round
            self.end(key, Outcome(outcome="finished", round=last))
        elif self._lost[key] > LOST_WORKERS:
            reason = reason_of(self._lost[key], error, self.retried)
            self._failed(key, Outcome(outcome="failed", round=last, reason=reason, error=error))
        else:
            label = self.sweep.trial(key).read().plan.label
            lost = f"{label}: the worker was lost{cause_of(error)}, and the trial continues after round {last}."
            self.display.console.print(lost, soft_wrap=True)
            self.decide()

    def _failed(self, key: str, error: Outcome) -> None:
        if self.state is None:
            self.end(key, error)
        else:
            with self.writes.catching():
                self.sweep.trial(key).keep_error(error)
            self.state.record_error(key, error)
            self.decide()

    def decide(self) -> None:
        """Record outcomes that depend on several trials, for example that a trial's arm is pruned.

        An outcome is recorded once enough trials have reported their metrics. Idle workers may run rounds of a trial
        before its arm is promoted. These rounds are hidden at first. Once the arm is promoted, this method shows them.
        """
        if self.state is None:
            return
        for news in self.state.news() if isinstance(self.state, SeedState) else ():
            self.display.console.print(news, soft_wrap=True)
        for key, trial in {key: self.sweep.trial(key) for key in self.state.changed()}.items():
            outcome, before = self.state.outcome(key), trial.outcome() if trial.planned else None
            if outcome is not None and outcome != before:
                self.announce(self.state.plans[key]) if not trial.planned else None
                self.end(key, outcome)
            elif outcome is None and before is not None:  # its arm was pruned because of a failure that is retried
                self._reopen(key)
            elif trial.planned and self._shown.get(key) != self.state.visible(key):
                self.sync(key)

    def _reopen(self, key: str) -> None:
        """Remove the outcome of a trial, unless another process has recorded it and knows more than this one."""
        if self.others.present and self.state is not None:
            self.look_again()
            if self.recorder is None or self.state.outcome(key) is not None:
                return
        self.sweep.trial(key).reopen()
        self.sync(key)

    def end(self, key: str, outcome: Outcome) -> None:
        """Record the outcome of a trial."""
        with self.writes.catching():
            self.sweep.trial(key).end(outcome)
        self.sync(key)

    def fetch(self, key: str) -> None:
        """Download the files that a trial's worker wrote to the remote store."""
        with self.writes.catching():
            self.sweep.trial(key).remote.pull()

    def sync_all(self) -> None:
        """Update all trials in the live table and in MLflow.

        MLflow may lack rounds of an earlier session, or rounds that were recorded while its database was locked.
        """
        for trial in self.sweep.trials():
            self.sync(trial.plan.key)

    def sync(self, key: str) -> None:
        """Update a trial in the live table and in MLflow."""
        known = self.state is None or key in self.state.plans  # the driver may have dropped its arm
        if known and self.sweep.trial(key).planned:  # a plan is missing if the disk was full
            record = self.shown(key)
            self.display.update(record)
            if self.recorder is not None:
                self.recorder.sync(record)

    def shown(self, key: str) -> TrialRecord:
        """Return a trial's record as the live table and MLflow show it.

        Tags that describe the trial's share of a GPU are added. If the trial runs beyond a rung (a round after which
        arms are compared), its later rounds are left out until its arm is promoted at this rung.
        """
        record = self.sweep.trial(key).read(self._plans.get(key))
        if self.state is not None:
            last = self._shown[key] = self.state.visible(key)
            record = replace(record, history=[one for one in record.history if one.round <= last])
        if marks := self.packing.marks(record.plan):
            record = replace(record, plan=record.plan.model_copy(update={"marks": {**record.plan.marks, **marks}}))
        return record

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles its callbacks and stoppers, but this one has nothing to restore


def _traceback_of(trial: Trial) -> str:
    """Return the trial's traceback from the local file that Ray writes before it calls the callbacks."""
    path = trial.error_file
    if path is None or not Path(path).exists():
        return f"trial {trial.trial_id} ended with an error that Ray did not record"
    lines = Path(path).read_text().strip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("Failure # "))
