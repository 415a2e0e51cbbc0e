"""Functions and classes that compute how many trials can share a GPU, based on the trials' measured memory.

This module imports neither ray nor torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from fedsweep.results import Attempt, Attempts, SweepStore, TrialPlan
from fedsweep.results.arms import identity

MARGIN = 0.15
"""The fraction of a GPU's memory that stays free, for CUDA itself and for later rounds that may need more."""

PARTS = 10_000
"""Number of units into which Ray divides a GPU.

Shares are rounded down to whole units. If Ray rounded shares of 1/6 up, six of them would not fit on a GPU.
"""

TOLD = 8
"""Number of arms up to which all measurements are printed. For more arms, only the extremes are printed."""

PEAK, BESIDE, TOTAL = "memory/peak", "memory/beside", "memory/total"
"""Keys of a worker's report, in bytes: its peak memory, other memory in use on the GPU, and the GPU's total memory."""


@dataclass(frozen=True)
class Offer:
    """A trial to run next, the round that it must reach, and its share of a GPU."""

    plan: TrialPlan
    until: int
    gpus: float


def side_by_side(peak: int, total: int, most: int) -> int:
    """Return how many trials fit on a GPU if 15 % of the GPU's memory stays free.

    The result is at least 1 and at most `most`.

    Args:
        peak: Memory of one trial in bytes.
        total: Memory of the GPU in bytes.
        most: Upper limit of the result.

    >>> side_by_side(2_000, 10_000, most=16), side_by_side(2_000, 10_000, most=3), side_by_side(20_000, 10_000, most=3)
    (4, 3, 1)
    """
    return max(min(int((1 - MARGIN) * total / max(peak, 1)), most, PARTS), 1)


def share(trials: int) -> float:
    """Return the share of a GPU that each of `trials` trials gets.

    The share is rounded down to four decimals, because Ray supports no finer shares.

    >>> share(1), share(4), share(6)
    (1.0, 0.25, 0.1666)
    """
    return PARTS // trials / PARTS


def larger(gpus: float) -> float | None:
    """Return the share of a GPU for the next attempt of a trial that ran out of memory with the share `gpus`.

    The new share is twice `gpus`, but at most a whole GPU. If `gpus` is already a whole GPU, the result is None.
    """
    return min(2 * gpus, 1.0) if gpus < 1 else None


def needed(attempts: Sequence[Attempt], most: int, otherwise: float | None = None) -> float | None:
    """Return the share of a GPU that a trial needs, or None if the memory of the trial must be measured first.

    Args:
        attempts: Earlier attempts with their measured memory. If an attempt ran out of memory, the returned share is at
            least twice the share of that attempt, up to a whole GPU.
        most: Largest number of trials per GPU.
        otherwise: The share that the user requested, or None to compute it from the measured memory.
    """
    fraction = otherwise
    if fraction is None:
        peak, total = _most_of(attempts)
        if not total:
            return None
        fraction = share(side_by_side(peak, total, most))
    return max([fraction, *(larger(one.gpus) or fraction for one in attempts if one.out_of_memory)])


def _most_of(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Return the GPU memory that a trial needs, and the total memory of the smallest GPU, both in bytes.

    The needed memory is the sum of two maxima over all measured attempts: the peak memory of the trial, and other
    memory in use on the GPU. Both results are 0 if no attempt was measured.
    """
    measured = [one for one in attempts if one.peak is not None and one.total]
    if not measured:
        return 0, 0
    peak = max(one.peak or 0 for one in measured) + max(one.beside for one in measured)
    return peak, min(one.total or 0 for one in measured)


def _measured(attempts: Sequence[Attempt], most: int) -> str:
    peak, total = _most_of(attempts)
    seconds = max(one.seconds or 0.0 for one in attempts)
    speed = f"{side_by_side(peak, total, most)} trials per GPU; one round takes {seconds:.1f} s with the GPU to itself"
    return f"{peak / 1e9:.1f} GB of {total / 1e9:.3g} GB of GPU memory per trial ({speed})"


class Packing:
    """The share of a GPU that each trial of a sweep gets, as requested by the user or computed from measured memory.

    In a grid, each arm has its own share. To measure the memory of an arm, the first trial of the arm runs one round
    alone on a GPU. This round is called a probe. The trial stops after the probe and continues later. If a trial runs
    out of memory, the share of its arm grows.

    Args:
        asked: The share that the user requested, or `auto` to measure it.
        most: Largest number of trials per GPU.
        sweep: Sweep in which the attempts to run each trial are recorded.
        plans: Trials of earlier sessions of the sweep. Their recorded attempts are read.
        apart: Whether each arm has its own share. If false, as in a sampled search, all trials have the same share.
        writing: Function that returns a context manager. Attempts are written within this context, which can handle
            errors such as a full disk.
        tell: Function that prints a measurement.
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
        """True while a probe runs: a trial trains one round alone on a GPU to measure the memory that it needs."""
        return bool(self._probes)

    def fraction(self, plan: TrialPlan) -> float | None:
        """Return the share of a GPU that a trial needs, or None if the share has not been measured yet."""
        return needed(self._of_arm(plan), self._most, self._asked)

    def choose(self, wanted: Sequence[tuple[TrialPlan, int]]) -> Offer | None:
        """Return the next trial to run, or None if no trial can start now.

        A trial whose share is unknown starts first. It runs one round alone on a GPU to measure its memory. Trials with
        a known share wait until all such measurements have ended.

        Args:
            wanted: The trials to run, most urgent first, each with the round that it must reach.
        """
        for plan, until in wanted if self._asked is None else ():
            if self._name(plan) not in self._probes and self.fraction(plan) is None:
                recorded = self._sweep.trial(plan.key).recorded()
                # A probe runs one new round, because recorded rounds are not run again.
                first = min(until, max(recorded[-1].round + 1 if recorded else 0, 1))
                self._probes[self._name(plan)] = plan.key
                return self._offer(plan, first, 1.0)
        if self.probing or not wanted:
            return None
        plan, until = wanted[0]
        return self._offer(plan, until, self.fraction(plan) or 0.0)

    def _offer(self, plan: TrialPlan, until: int, gpus: float) -> Offer:
        if gpus > 0:
            self._read(plan)
            self._put(plan, (*self._of(plan).attempts, Attempt(gpus=gpus)))
        return Offer(plan, until, gpus)

    def ended(self, plan: TrialPlan, result: Mapping[str, Any] | None) -> None:
        """Record the memory that a trial reported. If this is the first measurement for the trial's arm, print it.

        `result` is the last report of the trial, or None if the worker of the trial was lost.
        """
        if self._probes.get(self._name(plan)) == plan.key:
            del self._probes[self._name(plan)]
        attempts = self._of(plan).attempts
        if result is None or not attempts:
            return
        if result.get("kind") == "taken":
            self._read(plan)
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
        """Return the MLflow tags that describe a trial's share of a GPU."""
        return self._of(plan).marks()

    def summary(self) -> str | None:
        """Return a sentence about the arms that use the least and the most memory.

        The result is None if the user requested the share, or if there are so few arms that each measurement was
        printed.
        """
        known = [arm for arm in map(_flat, self._attempts.values()) if any(one.peak for one in arm)]
        if self._asked is not None or len(known) <= TOLD:
            return None
        known.sort(key=lambda arm: _most_of(arm)[0])
        return f"{len(known)} arms, from {_measured(known[0], self._most)} to {_measured(known[-1], self._most)}."

    def _read(self, plan: TrialPlan) -> None:
        """Read the attempts of a trial, which another process of the sweep may have run."""
        self._attempts[self._name(plan)][plan.key] = self._sweep.trial(plan.key).attempts()

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
        return {}  # Ray pickles this object with its searcher, but never restores them


def _flat(trials: Mapping[str, Attempts]) -> list[Attempt]:
    return [one for trial in trials.values() for one in trial.attempts]
