"""The state of a sweep that gives arms further seeds until they are decided, read from the records on disk.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsweep.results import Outcome, SweepStore, TrialPlan, TrialRecord
from fedsweep.results.arms import Arm, identity, is_accuracy, setting, short_names
from fedsweep.results.declared_comparisons import Pair, baselines, family_of
from fedsweep.results.records import NOT_NEEDED
from fedsweep.results.seeds import UntilDecided
from fedsweep.sweep.pruning.arm_state import RecordedTrials

if TYPE_CHECKING:
    from fedsweep.report.sequential_tests import Verdict
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.plan.reuse import ReusedTrials

DECIDED = ("higher", "lower", "within")
LINES = 8  # largest number of comparisons in the live table
AHEAD = 1
"""Number of seeds that idle workers may run before it is known that they are needed."""


class SeedState(RecordedTrials):
    """The trials of a grid, and the comparisons of its arms that are decided or open.

    The comparisons are those with the baseline and the declared ones. An arm runs as long as one of its comparisons is
    open.

    The decisions depend only on the recorded metrics. Idle workers run the next seed in advance. If it turns out not to
    be needed, its running trials end as pruned. Neither tables nor decisions count its trials, and their outcomes have
    the reason `NOT_NEEDED`.
    """

    milestones: Sequence[int] = ()
    """Rounds at which running trials are compared: none."""

    def __init__(
        self, plan: Plan, until: UntilDecided, sweep: SweepStore | ReusedTrials, plans: Sequence[TrialPlan]
    ) -> None:
        super().__init__(plan, sweep)
        self._until = until
        self.arms: dict[str, Arm] = {identity(one.arm): one.arm for one in plans}
        self._family, self._with_baseline = _comparisons(plan, plans)
        self._arm_of = {one.key: identity(one.arm) for one in plans}
        self._keys: dict[str, dict[int, str]] = defaultdict(dict)
        self._judgement: tuple[dict[Pair, Verdict], dict[str, int]] | None = None
        self._told: set[Pair] = set()
        self._names = short_names(dict.fromkeys(name for arm in self.arms.values() for name in arm))
        for one in plans:
            self._keys[self._arm_of[one.key]][one.seed] = one.key
            self._read(one)
        self.news()  # what earlier sessions have told

    def refresh(self, key: str) -> None:
        """Read a trial's recorded rounds and its error, if any."""
        self._read(self.plans[key])
        self._judgement = None

    def record_error(self, key: str, error: Outcome) -> None:
        """Record that a trial diverged or failed. Its seed then counts as a seed without a difference."""
        self._errors[key] = error
        self.refresh(key)

    @property
    def verdicts(self) -> dict[Pair, Verdict]:
        """The verdict of each comparison."""
        return self._judged()[0]

    def _judged(self) -> tuple[dict[Pair, Verdict], dict[str, int]]:
        """Return the verdicts, and the number of seeds of each arm that count.

        The thread of the live table also calls this method, so another thread may discard the judgement at any moment.
        """
        # Imports the report, which other sweeps load only after their last trial.
        from fedsweep.report.seeds_until_decided import seeds_that_count, sequential_verdicts

        if (found := self._judgement) is None:
            values = {
                arm: {seed: self._value(key) for seed, key in keys.items() if self._settled(key)}
                for arm, keys in self._keys.items()
            }
            verdicts = sequential_verdicts(self._until, self._metric, values, self._family)
            found = self._judgement = verdicts, seeds_that_count(self._until, verdicts)
        return found

    def wanted(self) -> list[tuple[str, int]]:
        """Return the key of each trial to run, seed by seed, with its last round.

        Seeds that are certainly needed come first. They are followed by the next seed, which may not be needed.
        """
        going = {pair: one.seeds for pair, one in self.verdicts.items() if one.verdict == "open"}
        if not going:
            return []
        look, compared = max(self._until.at_least, 1 + min(going.values())), {arm for pair in going for arm in pair[:2]}
        arms = [arm for arm in self._keys if arm in compared]
        keys = [self._keys[arm][seed] for seed in self._until.seeds[: look + AHEAD] for arm in arms]
        return [(key, self.rounds) for key in keys if not self._settled(key)]

    @property
    def planned(self) -> int:
        """The number of trials up to the look that decides next, which is the final number if no comparison is open."""
        running = {key for key, _ in self.wanted()}
        return sum(self._last[key] >= 0 or key in running for key in self.plans)

    def news(self) -> list[str]:
        """Return a sentence for each comparison that has ended since the last call."""
        found = {pair: one for pair, one in self.verdicts.items() if one.verdict != "open" and pair not in self._told}
        self._told |= {*found}
        return [
            f"{'Decided' if one.verdict in DECIDED else 'Undecided'} after {one.seeds} seeds: "
            f"{self._described(pair, one)}."
            for pair, one in found.items()
        ]

    def open_comparisons(self) -> list[str]:
        """Return a line about each of the first open comparisons, and the number of further ones."""
        going = [(pair, one) for pair, one in self.verdicts.items() if one.verdict == "open"]
        lines = [
            f"Open after {one.seeds} seed{'s' * (one.seeds != 1)}: {self._described(pair, one)}"
            for pair, one in going[:LINES]
        ]
        return lines + [f"Open: {len(going) - LINES} further comparisons"] * (len(going) > LINES)

    def _described(self, pair: Pair, one: Verdict) -> str:
        """Return the compared arms with the verdict and the difference. A baseline is not named."""
        percent, alone = is_accuracy(self._metric), pair in self._with_baseline
        named = self._label(self.arms[pair.arm]) if alone else self._pair_label(pair)
        if one.difference is None:
            return named
        gap = f"difference {100 * one.difference:+.2f} points" if percent else f"difference {one.difference:+.4g}"
        effect = f" \u00b1{self._until.smallest_effect:g}" if one.verdict == "within" else ""
        conclusion = f"{' is' if alone else ':'} {one.verdict}{effect}" if one.verdict != "open" else ""
        always = f" on each of {one.pairs} seeds, so no test is possible" if one.constant else ""
        return f"{named}{conclusion} ({gap}{always})"

    def _label(self, arm: Arm) -> str:
        return ", ".join(setting(self._names.get(name, name), value) for name, value in arm.items())

    def _pair_label(self, pair: Pair) -> str:
        from fedsweep.report.sentences import pair_label

        return pair_label(self.arms[pair.arm], self.arms[pair.against], [*self._names])

    def stops(self, key: str, round: int) -> bool:
        """Return whether a running trial is no longer needed, because all comparisons of its arm are decided."""
        return self.plans[key].seed not in self._until.seeds[: self._judged()[1].get(self._arm_of[key], 0)]

    def visible(self, key: str) -> int:
        """Return the last round of a trial that is shown to the user. No round is hidden."""
        return self.rounds

    def outcome(self, key: str) -> Outcome | None:
        """Return a trial's outcome, or None while the trial runs or has not started."""
        if key in self._errors:
            return self._errors[key]
        if self._last[key] >= self.rounds:
            needed = not self.stops(key, self.rounds)
            return Outcome(outcome="finished", round=self.rounds, reason=None if needed else NOT_NEEDED)
        if self._last[key] < 0 or not self.stops(key, self._last[key]):
            return None
        return Outcome(outcome="pruned", round=self._last[key], reason=NOT_NEEDED)

    def _settled(self, key: str) -> bool:
        return key in self._errors or self._last[key] >= self.rounds

    def _value(self, key: str) -> float:
        """Return the objective of an ended trial, or NaN if the trial has failed or diverged."""
        return math.nan if key in self._errors else self._sign * self._values[key].get(self.rounds, math.nan)


def _comparisons(plan: Plan, plans: Sequence[TrialPlan]) -> tuple[list[Pair], set[Pair]]:
    """Return the comparisons of a sweep in the order of its report, and those of them that are with the baseline."""
    from fedsweep.report.arm_statistics import group_by_arm

    arms = [one.values for one in group_by_arm(TrialRecord(one, None, []) for one in plans)]
    space, against = plan.space, baselines(arms, plan.space.baseline)
    family = family_of(space.comparisons, arms, space.goal.metric, against)
    return family, {pair for pair in family if against.get(pair.arm) == pair.against}
