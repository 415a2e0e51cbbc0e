"""The number of trials that share a GPU, computed from their measured memory. No ray, no torch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from fedsweep.results import Attempt, Attempts, SweepStore, TrialPlan
from fedsweep.results.arms import identity

MARGIN = 0.15
"""The fraction of a GPU that stays free for CUDA's own memory and for later rounds, which may take more."""

PARTS = 10_000
"""Ray rounds shares of a GPU to the nearest ten-thousandth: six sixths, each rounded up, would not fit."""

TOLD = 8
"""Number of arms up to which each measurement is printed; of more arms, the smallest and the largest are."""

PEAK, BESIDE, TOTAL = "memory/peak", "memory/beside", "memory/total"
"""Keys of a worker's report, in bytes: its peak, the device's used memory besides, and the device's total."""


@dataclass(frozen=True)
class Offer:
    """A trial to start, the round that it has to reach, and its share of a GPU."""

    plan: TrialPlan
    until: int
    gpus: float


def side_by_side(peak: int, total: int, most: int) -> int:
    """Return how many trials of `peak` bytes fit on a GPU of `total` bytes less a margin, from 1 to `most`.

    >>> side_by_side(2_000, 10_000, most=16), side_by_side(2_000, 10_000, most=3), side_by_side(20_000, 10_000, most=3)
    (4, 3, 1)
    """
    return max(min(int((1 - MARGIN) * total / max(peak, 1)), most, PARTS), 1)


def share(trials: int) -> float:
    """Return the share of each of `trials` trials on one GPU, rounded down to Ray's unit.

    >>> share(1), share(4), share(6)
    (1.0, 0.25, 0.1666)
    """
    return PARTS // trials / PARTS


def larger(gpus: float) -> float | None:
    """Return the share to try after the share `gpus` was too small: double, at most 1, or None after a whole GPU."""
    return min(2 * gpus, 1.0) if gpus < 1 else None


def needed(attempts: Sequence[Attempt], most: int, otherwise: float | None = None) -> float | None:
    """Return the share of a GPU that a trial needs, larger after it ran out of memory; None if not yet measured."""
    fraction = otherwise
    if fraction is None:
        peak, total = _most_of(attempts)
        if not total:
            return None
        fraction = share(side_by_side(peak, total, most))
    return max([fraction, *(larger(one.gpus) or fraction for one in attempts if one.out_of_memory)])


def _most_of(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Return the largest number of bytes that an attempt took, and the bytes of the smallest GPU; 0 if not measured."""
    measured = [one for one in attempts if one.peak is not None and one.total]
    if not measured:
        return 0, 0
    peak = max(one.peak or 0 for one in measured) + max(one.beside for one in measured)
    return peak, min(one.total or 0 for one in measured)


def _measured(attempts: Sequence[Attempt], most: int) -> str:
    peak, total = _most_of(attempts)
    seconds = max(one.seconds or 0.0 for one in attempts)
    fit = side_by_side(peak, total, most)
    return f"{peak / 1e9:.1f} GB of {total / 1e9:.3g} GB, {fit} side by side, {seconds:.1f} s a round alone"


class Packing:
    """The share of a GPU that each arm needs, from the first round of its first trial and from memory that ran out.

    That round, the probe, runs on a GPU alone, and the trial continues from it. Without `apart`, as for samples, one
    measurement counts for all trials. Attempts are written within `writing`, and `tell` prints measurements.
    """

    def __init__(
        self,
        asked: float | Literal["auto"],
        most: int,
        sweep: SweepStore,
        plans: Iterable[TrialPlan] = (),
        apart: bool = True,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        self._asked = None if asked == "auto" else asked
        self._most, self._sweep, self._apart = most, sweep, apart
        self._attempts: dict[str, dict[str, Attempts]] = defaultdict(lambda: defaultdict(Attempts))
        self._probes: dict[str, str] = {}
        self._writing, self._tell = writing, tell
        for plan in plans:
            if (found := sweep.trial(plan.key).attempts()).attempts:
                self._attempts[self._name(plan)][plan.key] = found

    @property
    def probing(self) -> bool:
        """True while a probe runs."""
        return bool(self._probes)

    def fraction(self, plan: TrialPlan) -> float | None:
        """Return the share of a GPU that a trial needs, or None before it is measured."""
        return needed(self._of_arm(plan), self._most, self._asked)

    def choose(self, wanted: Sequence[tuple[TrialPlan, int]]) -> Offer | None:
        """Return an offer for one of the wanted trials, or None for now.

        Probes come first, because they need a whole GPU.
        """
        for plan, until in wanted:
            if self._name(plan) not in self._probes and self.fraction(plan) is None:
                recorded = self._sweep.trial(plan.key).recorded()
                # A probe runs one round more than are recorded.
                first = min(until, max(recorded[-1].round + 1 if recorded else 0, 1))
                self._probes[self._name(plan)] = plan.key
                return self._offer(plan, first, 1.0)
        if self.probing or not wanted:
            return None
        plan, until = wanted[0]
        return self._offer(plan, until, self.fraction(plan) or 0.0)

    def _offer(self, plan: TrialPlan, until: int, gpus: float) -> Offer:
        if gpus > 0:
            self._put(plan, (*self._of(plan).attempts, Attempt(gpus=gpus)))
        return Offer(plan, until, gpus)

    def ended(self, plan: TrialPlan, result: Mapping[str, Any] | None) -> None:
        """Record the memory in a trial's last report, None if its worker was lost; print the first one of an arm."""
        if self._probes.get(self._name(plan)) == plan.key:
            del self._probes[self._name(plan)]
        attempts = self._of(plan).attempts
        if result is None or not attempts:
            return
        told = {
            "round": result.get("round"),
            "peak": result.get(PEAK),
            "beside": result.get(BESIDE, 0),
            "total": result.get(TOTAL),
            "seconds": result.get("seconds"),
            "out_of_memory": result.get("kind") == "memory",
        }
        self._put(plan, (*attempts[:-1], attempts[-1].model_copy(update=told)))
        known = self._of_arm(plan)
        first = self._asked is None and len(known) == 1 and known[0].peak is not None
        if first and self._tell is not None and len(self._attempts) <= TOLD:
            self._tell(f"{plan.label + ': ' if self._apart else ''}{_measured(known, self._most)}.")

    def marks(self, plan: TrialPlan) -> dict[str, str]:
        """Return a trial's MLflow tags about its GPU."""
        return self._of(plan).marks()

    def summary(self) -> str | None:
        """Return the smallest and the largest measurement as text, if there are more than TOLD arms."""
        known = [arm for arm in map(_flat, self._attempts.values()) if any(one.peak for one in arm)]
        if self._asked is not None or len(known) <= TOLD:
            return None
        known.sort(key=lambda arm: _most_of(arm)[0])
        return f"{len(known)} arms, from {_measured(known[0], self._most)}, to {_measured(known[-1], self._most)}."

    def _put(self, plan: TrialPlan, attempts: tuple[Attempt, ...]) -> None:
        known = self._attempts[self._name(plan)][plan.key] = Attempts(attempts=attempts)
        with self._writing():
            self._sweep.trial(plan.key).keep_attempts(known)

    def _of_arm(self, plan: TrialPlan) -> list[Attempt]:
        return _flat(self._attempts[self._name(plan)])

    def _of(self, plan: TrialPlan) -> Attempts:
        return self._attempts[self._name(plan)][plan.key]

    def _name(self, plan: TrialPlan) -> str:
        return identity(plan.arm) if self._apart else ""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles its searchers, which hold this, and restores neither


def _flat(trials: Mapping[str, Attempts]) -> list[Attempt]:
    return [one for trial in trials.values() for one in trial.attempts]
