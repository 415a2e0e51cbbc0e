"""The state of a sweep with successive halving of its arms, read from the records on disk.

This module imports neither ray nor torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.arms import agrees, identity
from fedsweep.sweep.pruning.arm_rules import Verdicts, halve
from fedsweep.sweep.space.settings import ArmsScheduler, rungs

if TYPE_CHECKING:
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.plan.reuse import ReusedTrials


class RecordedTrials:
    """The recorded objective values, last rounds and errors of trials that are compared with each other.

    If the objective is minimised, its values are negated, so that larger values are better.
    """

    def __init__(self, plan: Plan, sweep: SweepStore | ReusedTrials) -> None:
        objective = plan.space.goal
        self.sweep, self.rounds = sweep, plan.base.federation.rounds
        self.plans: dict[str, TrialPlan] = {}
        self._metric, self._sign = objective.metric, 1 if objective.mode == "max" else -1
        self._values: dict[str, dict[int, float]] = {}
        self._last: dict[str, int] = {}
        self._errors: dict[str, Outcome] = {}

    def unplanned(self) -> list[TrialPlan]:
        """Return the trials that start from another trial's checkpoint and whose plans have not been written yet.

        The checkpoint is copied when the plan is written. This must happen before the other trial continues and
        overwrites the checkpoint.
        """
        return [one for key, one in self.plans.items() if one.start and not self.sweep.trial(key).planned]

    def changed(self) -> list[str]:
        """Return the keys of the trials whose outcome or visible rounds may have changed since the last call."""
        return [*self.plans]

    def _read(self, plan: TrialPlan) -> None:
        """Add a trial, or update a known one, from its records on disk."""
        self.plans[plan.key] = plan
        trial = self.sweep.trial(plan.key)
        history, outcome = trial.recorded() if trial.planned else [], trial.outcome()
        values = {one.round: self._sign * one.metrics[self._metric] for one in history if self._metric in one.metrics}
        self._values[plan.key], self._last[plan.key] = values, history[-1].round if history else -1
        if outcome is not None and outcome.outcome in ("diverged", "failed"):
            self._errors[plan.key] = outcome
        elif outcome is None and trial.planned and (error := trial.error()) is not None:
            self._errors[plan.key] = error


class ArmState(RecordedTrials):
    """The trials of a grid, their recorded metrics, and the pruning decisions that follow from these metrics.

    Idle workers run trials beyond a rung whose decision is still pending. The additional rounds stay hidden until
    the arm is promoted, so that neither tables nor decisions depend on which workers were idle.
    """

    def __init__(self, plan: Plan, scheduler: ArmsScheduler, sweep: SweepStore, plans: Sequence[TrialPlan]) -> None:
        super().__init__(plan, sweep)
        self.milestones = rungs(scheduler.grace_rounds, scheduler.reduction_factor, self.rounds)
        self._eta, self._arms = scheduler.reduction_factor, {one.key: identity(one.arm) for one in plans}
        arms, baseline = {identity(one.arm): one.arm for one in plans}, plan.space.baseline
        self._strata = {name: identity([arm.get(one) for one in scheduler.per]) for name, arm in arms.items()}
        self._kept = [name for name, arm in arms.items() if baseline is not None and agrees(baseline, arm)]
        self._keys: dict[str, dict[int, str]] = defaultdict(dict)
        self._verdicts: Verdicts[str] | None = None
        for one in plans:
            self._keys[self._arms[one.key]][one.seed] = one.key
            self._read(one)

    def refresh(self, key: str) -> None:
        """Read a trial's recorded rounds and its error, if any."""
        self._read(self.plans[key])
        self._verdicts = None

    @property
    def verdicts(self) -> Verdicts[str]:
        """The promoted, undecided and pruned arms. Each arm is given as JSON text (see `identity`)."""
        if self._verdicts is None:
            self._verdicts = halve(
                {arm: {seed: self._values[key] for seed, key in keys.items()} for arm, keys in self._keys.items()},
                self.milestones,
                self.rounds,
                self._eta,
                strata=self._strata,
                keep=self._kept,
                failed=[(self._arms[key], self.plans[key].seed) for key in self._errors],
            )
        return self._verdicts

    def record_error(self, key: str, error: Outcome) -> None:
        """Record that a trial diverged or failed.

        The error counts only if the trial's arm is promoted at all rungs before the round of the error.
        """
        self._errors[key] = error
        self.refresh(key)

    def wanted(self) -> list[tuple[str, int]]:
        """Return the key of each trial that must still train, and the round that its arm must reach.

        The most urgent trial comes first.
        """
        verdicts, ends = self.verdicts, {arm: end for arm in self._keys if (end := self._end(arm)) is not None}
        found: list[tuple[str, int]] = []
        for goals in (ends, verdicts.promoted):
            for until in dict.fromkeys(goals.values()):
                arms = [arm for arm, goal in goals.items() if goal == until]
                found += [(key, until) for key in self._behind(arms, until)]
        # Arms past an undecided rung come last: the best arm first, with all its seeds.
        return found + [(key, goal) for arm, goal in verdicts.undecided.items() for key in self._behind([arm], goal)]

    def _behind(self, arms: Sequence[str], until: int) -> list[str]:
        """Return the keys of the trials of `arms` that have not reached round `until`.

        They are sorted by seed, so that partial results stay balanced over the arms.
        """
        seeds = sorted({seed for arm in arms for seed in self._keys[arm]})
        keys = [self._keys[arm][seed] for seed in seeds for arm in arms if seed in self._keys[arm]]
        return [key for key in keys if self._last[key] < until and key not in self._errors]

    def _end(self, arm: str) -> int | None:
        """Return the round after which a trial of the arm had an error, if the arm was pruned for this reason.

        Otherwise, return None.
        """
        pruned = self.verdicts.pruned.get(arm)
        if pruned is None or not pruned.failed:
            return None
        return min(one.round for key, one in self._errors.items() if self._arms[key] == arm)

    def is_pruned(self, key: str) -> bool:
        """Return whether the trial's arm was pruned."""
        return self._arms[key] in self.verdicts.pruned

    def stops(self, key: str, round: int) -> bool:
        """Return whether a trial that has run a round must stop, because its arm ended after an earlier round."""
        return self.is_pruned(key) and round >= self.visible(key)

    def visible(self, key: str) -> int:
        """Return the last round of a trial that is shown to the user.

        Rounds after a rung whose decision is still pending are hidden.
        """
        arm, verdicts = self._arms[key], self.verdicts
        if (end := self._end(arm)) is not None:
            return end
        if arm in verdicts.pruned:
            return verdicts.pruned[arm].round
        if arm in verdicts.promoted:
            return verdicts.promoted[arm]
        return max((one for one in self.milestones if one < verdicts.undecided[arm]), default=0)

    def outcome(self, key: str) -> Outcome | None:
        """Return a trial's outcome, or None while the trial runs or the decision about its arm is pending."""
        arm = self._arms[key]
        error, pruned, end = self._errors.get(key), self.verdicts.pruned.get(arm), self._end(arm)
        if pruned is None:
            if self.verdicts.promoted.get(arm) != self.rounds:
                return None  # an error would be after the decided rungs
            finished = Outcome(outcome="finished", round=self.rounds) if self._last[key] >= self.rounds else None
            return error or finished
        if error is not None and end is not None and error.round <= end:
            return error
        last = pruned.round if end is None else end
        ended = Outcome(outcome="pruned", round=last, reason=pruned.sentence(self._metric))
        return ended if self._last[key] >= last else None
