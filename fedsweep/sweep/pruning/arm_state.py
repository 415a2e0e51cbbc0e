"""Arms that climb rungs together: who falls is judged from the records on disk alone. No ray, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.arms import Arm, agrees, identity
from fedsweep.sweep.pruning.arm_rules import Standing, climb, rungs
from fedsweep.sweep.space.settings import ArmsScheduler

ERRORS = ("diverged", "failed")


class Climb:
    """All trials of a grid, what they have recorded, and what follows from it.

    Workers with nothing else to do play arms beyond a rung that is not decided. What such an arm recorded there is
    shown to nobody before the arm has passed the rung; so neither tables nor decisions depend on who had time.
    """

    def __init__(
        self,
        plans: Sequence[TrialPlan],
        sweep: SweepStore,
        scheduler: ArmsScheduler,
        metric: str,
        mode: Literal["max", "min"],
        rounds: int,
        baseline: Arm | None,
    ) -> None:
        self.sweep, self.rounds = sweep, rounds
        self.plans = {plan.key: plan for plan in plans}
        self.milestones = rungs(scheduler.grace_rounds, scheduler.reduction_factor, rounds)
        self._eta, self._metric, self._sign = scheduler.reduction_factor, metric, 1 if mode == "max" else -1
        arms = {identity(plan.arm): plan.arm for plan in plans}
        self._strata = {name: identity([arm.get(one) for one in scheduler.per]) for name, arm in arms.items()}
        self._kept = [name for name, arm in arms.items() if baseline is not None and agrees(baseline, arm)]
        self._keys = {(identity(plan.arm), plan.seed): plan.key for plan in plans}
        self._histories: dict[str, dict[int, dict[int, float]]] = {name: {} for name in arms}
        self._last: dict[str, int] = {}
        self._errors: dict[str, Outcome] = {}
        self._standing: Standing[str] | None = None
        for plan in plans:
            self.refresh(plan.key)

    def refresh(self, key: str) -> None:
        """Read what a trial has recorded by now, and whether it met an error."""
        trial, plan = self.sweep.trial(key), self.plans[key]
        history = trial.recorded()
        values = {one.round: self._sign * one.metrics[self._metric] for one in history if self._metric in one.metrics}
        outcome = trial.outcome()
        self._histories[identity(plan.arm)][plan.seed] = values
        self._last[key] = history[-1].round if history else -1
        if outcome is not None and outcome.outcome in ERRORS:
            self._errors[key] = outcome
        self._standing = None

    @property
    def standing(self) -> Standing[str]:
        """Who climbs, waits and has fallen, by the identity of the arm."""
        if self._standing is None:
            failed = [(identity(self.plans[key].arm), self.plans[key].seed) for key in self._errors]
            self._standing = climb(
                self._histories,
                self.milestones,
                self.rounds,
                self._eta,
                strata=self._strata,
                keep=self._kept,
                failed=failed,
            )
        return self._standing

    def met(self, key: str, error: Outcome) -> None:
        """A trial diverged or failed; whether that counts depends on how far its arm climbs."""
        self._errors[key] = error
        self.refresh(key)

    def wanted(self) -> list[tuple[str, int]]:
        """Trials that have not come as far as their arm climbs, with that round, the most urgent first."""
        standing, ends = self.standing, {arm: end for arm in self._histories if (end := self._end(arm)) is not None}
        found: list[tuple[str, int]] = []
        for goals in (ends, standing.climbing):
            for until in dict.fromkeys(goals.values()):
                arms = [arm for arm, goal in goals.items() if goal == until]
                found += [(key, until) for key in self._behind(arms, until)]
        # Beyond what is decided, the most promising arm first, with all its seeds.
        return found + [(key, goal) for arm, goal in standing.waiting.items() for key in self._behind([arm], goal)]

    def _behind(self, arms: Sequence[str], until: int) -> list[str]:
        """Seed by seed, so that what is there at any moment is balanced."""
        seeds = sorted({seed for arm in arms for seed in self._histories[arm]})
        keys = [self._keys[arm, seed] for seed in seeds for arm in arms if (arm, seed) in self._keys]
        return [key for key in keys if self._last[key] < until and key not in self._errors]

    def _end(self, arm: str) -> int | None:
        """Of an arm that fell because of errors, the last round before the first of them.

        All its trials end there, whichever of them was first to find out.
        """
        fall = self.standing.fallen.get(arm)
        if fall is None or not fall.failed:
            return None
        return min(one.round for key, one in self._errors.items() if identity(self.plans[key].arm) == arm)

    def fallen(self, key: str) -> bool:
        """Whether its arm has fallen."""
        return identity(self.plans[key].arm) in self.standing.fallen

    def visible(self, key: str) -> int:
        """The last round of a trial that may be shown by now."""
        arm, standing = identity(self.plans[key].arm), self.standing
        if (end := self._end(arm)) is not None:
            return end
        if arm in standing.fallen:
            return standing.fallen[arm].round
        if arm in standing.climbing:
            return standing.climbing[arm]
        return max((one for one in self.milestones if one < standing.waiting[arm]), default=0)

    def outcome(self, key: str) -> Outcome | None:
        """How a trial ended, as far as that is decided."""
        arm, standing = identity(self.plans[key].arm), self.standing
        error, fall, end = self._errors.get(key), standing.fallen.get(arm), self._end(arm)
        if fall is None:
            if standing.climbing.get(arm) != self.rounds:
                return None  # an error would lie beyond what is decided
            return error or self._whole(key)
        if error is not None and end is not None and error.round <= end:
            return error
        last = fall.round if end is None else end
        ended = Outcome(outcome="pruned", round=last, reason=fall.sentence(self._metric))
        return ended if self._last[key] >= last else None

    def _whole(self, key: str) -> Outcome | None:
        return Outcome(outcome="finished", round=self.rounds) if self._last[key] >= self.rounds else None
