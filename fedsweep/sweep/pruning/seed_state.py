"""The state of a sweep that gives arms further seeds until they are decided, read from the records on disk.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.arms import Arm, counterparts, identity, is_accuracy, setting, short_names
from fedsweep.results.until_decided import UntilDecided
from fedsweep.sweep.pruning.arm_state import RecordedTrials

if TYPE_CHECKING:
    from fedsweep.report.sequential_tests import Verdict
    from fedsweep.sweep.plan.plan import Plan

DECIDED = ("higher", "lower", "within")
LINES = 8  # largest number of comparisons in the live table
AHEAD = 1
"""Number of seeds that idle workers may run before it is known that they are needed."""


class SeedState(RecordedTrials):
    """The trials of a grid, and the comparisons with the baseline that are decided or open.

    The decisions depend only on the recorded metrics. Idle workers run the next seed in advance. If it turns out not to
    be needed, its trials end as pruned, and neither tables nor decisions count them.
    """

    milestones: Sequence[int] = ()
    """Rounds at which running trials are compared: none."""

    def __init__(self, plan: Plan, until: UntilDecided, sweep: SweepStore, plans: Sequence[TrialPlan]) -> None:
        super().__init__(plan, sweep)
        self._until = until
        self.arms: dict[str, Arm] = {identity(one.arm): one.arm for one in plans}
        baselines = counterparts([*self.arms.values()], plan.space.baseline or {})
        self._against: Mapping[str, str] = {name: identity(one) for name, one in baselines.items()}
        self._arm_of = {one.key: identity(one.arm) for one in plans}
        self._keys: dict[str, dict[int, str]] = defaultdict(dict)
        self._judgement: tuple[dict[str, Verdict], dict[str, int]] | None = None
        self._told: set[str] = set()
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
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each arm that is compared with a baseline. An arm is given as JSON text (see `identity`)."""
        return self._judged()[0]

    def _judged(self) -> tuple[dict[str, Verdict], dict[str, int]]:
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
            verdicts = sequential_verdicts(self._until, self._metric, values, self._against)
            found = self._judgement = verdicts, seeds_that_count(self._until, verdicts, self._against)
        return found

    def wanted(self) -> list[tuple[str, int]]:
        """Return the key of each trial to run, seed by seed, with its last round.

        Seeds that are certainly needed come first. They are followed by the next seed, which may not be needed.
        """
        going = {arm: one.seeds for arm, one in self.verdicts.items() if one.verdict == "open"}
        if not going:
            return []
        look, baselines = max(self._until.at_least, 1 + min(going.values())), {self._against[one] for one in going}
        arms = [arm for arm in self._keys if arm in going or arm in baselines]
        keys = [self._keys[arm][seed] for seed in self._until.seeds[: look + AHEAD] for arm in arms]
        return [(key, self.rounds) for key in keys if not self._settled(key)]

    @property
    def planned(self) -> int:
        """The number of trials up to the look that decides next, which is the final number if no comparison is open."""
        running = {key for key, _ in self.wanted()}
        return sum(self._last[key] >= 0 or key in running for key in self.plans)

    def news(self) -> list[str]:
        """Return a sentence for each comparison that has ended since the last call."""
        found = {arm: one for arm, one in self.verdicts.items() if one.verdict != "open" and arm not in self._told}
        self._told |= {*found}
        return [
            f"{'Decided' if one.verdict in DECIDED else 'Undecided'} after {one.seeds} seeds: "
            f"{self._described(arm, one)}."
            for arm, one in found.items()
        ]

    def open_comparisons(self) -> list[str]:
        """Return a line about each of the first open comparisons, and the number of further ones."""
        going = [(arm, one) for arm, one in self.verdicts.items() if one.verdict == "open"]
        lines = [f"Open after {one.seeds} seeds: {self._described(arm, one)}" for arm, one in going[:LINES]]
        return lines + [f"Open: {len(going) - LINES} further comparisons"] * (len(going) > LINES)

    def _described(self, arm: str, one: Verdict) -> str:
        """Return the arm with its verdict and its difference from the baseline."""
        percent = is_accuracy(self._metric)
        named = ", ".join(setting(self._names.get(name, name), value) for name, value in self.arms[arm].items())
        if one.difference is None:
            return named
        gap = f"difference {100 * one.difference:+.2f} points" if percent else f"difference {one.difference:+.4g}"
        effect = f" \u00b1{self._until.smallest_effect:g}" if one.verdict == "within" else ""
        return f"{named}{'' if one.verdict == 'open' else f' is {one.verdict}{effect}'} ({gap})"

    def stops(self, key: str, round: int) -> bool:
        """Return whether a running trial is no longer needed, because the comparison of its arm is decided."""
        return self.plans[key].seed >= self._judged()[1].get(self._arm_of[key], 0)

    def visible(self, key: str) -> int:
        """Return the last round of a trial that is shown to the user. No round is hidden."""
        return self.rounds

    def outcome(self, key: str) -> Outcome | None:
        """Return a trial's outcome, or None while the trial runs or has not started."""
        if key in self._errors:
            return self._errors[key]
        if self._last[key] >= self.rounds:
            return Outcome(outcome="finished", round=self.rounds)
        if self._last[key] < 0 or not self.stops(key, self._last[key]):
            return None
        return Outcome(outcome="pruned", round=self._last[key], reason="its comparison was decided without this seed")

    def _settled(self, key: str) -> bool:
        return key in self._errors or self._last[key] >= self.rounds

    def _value(self, key: str) -> float:
        """Return the objective of an ended trial, or NaN if the trial has failed or diverged."""
        return math.nan if key in self._errors else self._sign * self._values[key].get(self.rounds, math.nan)
