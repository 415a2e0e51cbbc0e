"""The state of a sweep with successive halving of its trials, read from the records on disk.

This module imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.arms import identity
from fedsweep.sweep.pruning.arm_state import RecordedTrials
from fedsweep.sweep.pruning.trial_halving import Recorded, TrialVerdicts, halve_in_order
from fedsweep.sweep.space.settings import ASHAScheduler, rungs

if TYPE_CHECKING:
    from fedsweep.sweep.plan.plan import Plan


class TrialState(RecordedTrials):
    """The trials of a grid or of a sampled search, their recorded metrics, and the pruning decisions that follow.

    A trial whose decision at a rung is pending does not run. Rounds that it has recorded after the rung, for example in
    an earlier sweep, stay hidden until the trial is promoted.
    """

    def __init__(self, plan: Plan, scheduler: ASHAScheduler, sweep: SweepStore, plans: Sequence[TrialPlan]) -> None:
        super().__init__(plan, sweep)
        self.milestones = rungs(scheduler.grace_rounds, scheduler.reduction_factor, self.rounds)
        self._eta, self._per = scheduler.reduction_factor, scheduler.per
        self._recorded: dict[int, Recorded] = {}
        self._verdicts: TrialVerdicts | None = None
        self._told: dict[str, tuple[Outcome | None, int]] = {}
        for one in plans:
            self.add(one)

    def add(self, plan: TrialPlan) -> None:
        """Add a trial, or read the recorded rounds and the error of a known trial."""
        self._read(plan)
        self._recorded[plan.number] = Recorded(
            self._values[plan.key],
            self._last[plan.key],
            identity([plan.arm.get(one) for one in self._per]),
            plan.key in self._errors,
        )
        self._verdicts = None

    def refresh(self, key: str) -> None:
        """Read a trial's recorded rounds and its error, if any."""
        self.add(self.plans[key])

    def record_error(self, key: str, error: Outcome) -> None:
        """Record that a trial diverged or failed."""
        self._errors[key] = error
        self.refresh(key)

    @property
    def verdicts(self) -> TrialVerdicts:
        """The promoted, undecided and pruned trials, by their numbers."""
        if self._verdicts is None:
            self._verdicts = halve_in_order(self._recorded, self.milestones, self.rounds, self._eta)
        return self._verdicts

    def wanted(self) -> list[tuple[str, int]]:
        """Return the key of each trial that may train now, and the last round, ordered by the numbers of the trials.

        A trial with a low number comes first, because trials with higher numbers may wait for its values.
        """
        keys = {plan.number: key for key, plan in self.plans.items()}
        ready = [keys[number] for number in self.verdicts.promoted]
        return [(key, self.rounds) for key in ready if self._last[key] < self.rounds and key not in self._errors]

    def may_continue(self, key: str) -> bool:
        """Return whether a trial has been promoted at all rungs that it has reached."""
        return self.plans[key].number in self.verdicts.promoted

    def stops(self, key: str, round: int) -> bool:
        """Return whether a trial that has run a round must stop, because it was pruned or has to wait at a rung."""
        return not self.may_continue(key) and round >= self.visible(key)

    def visible(self, key: str) -> int:
        """Return the last round of a trial that is shown to the user.

        Rounds after a rung at which the trial was pruned, or whose decision is pending, are hidden.
        """
        number, verdicts = self.plans[key].number, self.verdicts
        if number in verdicts.pruned:
            return verdicts.pruned[number].round
        return verdicts.undecided.get(number, self.rounds)

    def outcome(self, key: str) -> Outcome | None:
        """Return a trial's outcome, or None while the trial runs or the decision about it is pending."""
        number = self.plans[key].number
        if (behind := self.verdicts.pruned.get(number)) is not None:
            return Outcome(outcome="pruned", round=behind.round, reason=behind.sentence())
        if number in self.verdicts.undecided:
            return None
        finished = Outcome(outcome="finished", round=self.rounds) if self._last[key] >= self.rounds else None
        return self._errors.get(key) or finished

    def changed(self) -> list[str]:
        """Return the keys of the trials whose outcome or visible rounds have changed since the last call."""
        found = {key: (self.outcome(key), self.visible(key)) for key in self.plans}
        keys = [key for key, one in found.items() if self._told.get(key) != one]
        self._told = found
        return keys
