"""How many trials share a GPU: from the memory that they were seen to take. No ray, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsweep.results import Attempt, Attempts, SweepStore, TrialPlan
from fedsweep.results.arms import identity

MARGIN = 0.15
"""The part of a GPU that is left free: later rounds may take more than the first, and CUDA's own memory counts."""

PARTS = 10_000
"""Ray counts in ten-thousandths of a GPU, to the nearest: six sixths, each rounded up, would not fit into one."""

TOLD = 8
"""Arms of which a person is told what each takes; of more, only the least and the most."""

PEAK, BESIDE, TOTAL = "memory/peak", "memory/beside", "memory/total"
"""What a worker reports, in bytes: its most, what the device had taken beside that, and what the device has."""


@dataclass(frozen=True)
class Offer:
    """A trial to be handed out: to which round, and with what of a GPU."""

    plan: TrialPlan
    until: int
    gpus: float


def side_by_side(peak: int, total: int, most: int) -> int:
    """Trials that fit on a GPU of `total` bytes when each takes `peak`, with a margin: from 1 to `most`.

    >>> side_by_side(2_000, 10_000, most=16), side_by_side(2_000, 10_000, most=3), side_by_side(20_000, 10_000, most=3)
    (4, 3, 1)
    """
    return max(min(int((1 - MARGIN) * total / max(peak, 1)), most, PARTS), 1)


def share(trials: int) -> float:
    """The fraction of a GPU that so many trials have each, rounded down as Ray counts.

    >>> share(1), share(4), share(6)
    (1.0, 0.25, 0.1666)
    """
    return PARTS // trials / PARTS


def larger(gpus: float) -> float | None:
    """What to try after so much of a GPU was too little; None where a trial had a whole one.

    >>> larger(0.25), larger(0.6), larger(1.0)
    (0.5, 1.0, None)
    """
    return min(2 * gpus, 1.0) if gpus < 1 else None


def needed(attempts: Iterable[Attempt], most: int, otherwise: float | None = None) -> float | None:
    """The fraction of a GPU that follows from attempts: the most that was taken fits, and what ran out gets more.

    Without a measurement it is `otherwise`, and None where that is None: it has to be measured.
    """
    known = list(attempts)
    fraction = otherwise
    if fraction is None:
        peak, total = _most_of(known)
        if not total:
            return None
        fraction = share(side_by_side(peak, total, most))
    return max([fraction, *(larger(one.gpus) or fraction for one in known if one.out_of_memory)])


def _most_of(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """The most bytes that attempts took, and the fewest that a GPU of theirs had; 0 where nothing was measured."""
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
    """What each arm needs of a GPU, told by the first round of its first trial, and by what ran out of memory.

    That round is the probe: it is played on a GPU alone, lies on disk like any other, and the trial goes on from
    there. Arms that differ are measured apart; the samples of a search are not arms, and count as one.
    """

    def __init__(
        self,
        asked: float | Literal["auto"],
        most: int,
        sweep: SweepStore,
        plans: Iterable[TrialPlan] = (),
        apart: bool = True,
        keep: Callable[[TrialPlan, Attempts], None] | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Read what is known of `plans`; `keep` writes attempts, and `tell` takes a sentence about a measurement."""
        self._asked = None if asked == "auto" else asked
        self._most, self._sweep, self._apart = most, sweep, apart
        self._attempts: dict[str, dict[str, Attempts]] = {}
        self._probes: dict[str, str] = {}
        self._keep = keep or (lambda plan, attempts: sweep.trial(plan.key).keep_attempts(attempts))
        self._tell = tell
        for plan in plans:
            if (found := sweep.trial(plan.key).attempts()).attempts:
                self._of(plan)[plan.key] = found

    @property
    def probing(self) -> bool:
        """Whether anything is being measured."""
        return bool(self._probes)

    def fraction(self, plan: TrialPlan) -> float | None:
        """What a trial is to have of a GPU, or None while that is not known."""
        attempts = [one for trial in self._of(plan).values() for one in trial.attempts]
        return needed(attempts, self._most, self._asked)

    def choose(self, wanted: Sequence[tuple[TrialPlan, int]]) -> Offer | None:
        """Of trials with the round that each is to reach, in order, the one to be handed out; None is to wait.

        Probes come before all others: a GPU of which a part is taken is no whole one.
        """
        for plan, until in wanted:
            if self._name(plan) not in self._probes and self.fraction(plan) is None:
                recorded = self._sweep.trial(plan.key).recorded()
                # One round is played, whatever is there by now.
                first = min(until, max(recorded[-1].round + 1 if recorded else 0, 1))
                self._probes[self._name(plan)] = plan.key
                return self._handed(plan, first, 1.0)
        if self.probing or not wanted:
            return None
        plan, until = wanted[0]
        return self._handed(plan, until, self.fraction(plan) or 0.0)

    def _handed(self, plan: TrialPlan, until: int, gpus: float) -> Offer:
        if gpus > 0:
            before = self._of(plan).get(plan.key, Attempts()).attempts
            self._put(plan, (*before, Attempt(gpus=gpus)))
        return Offer(plan, until, gpus)

    def ended(self, plan: TrialPlan, result: Mapping[str, Any] | None) -> None:
        """Learn from a trial's last report; None where its worker was lost."""
        if self._probes.get(self._name(plan)) == plan.key:
            del self._probes[self._name(plan)]
        attempts = self._of(plan).get(plan.key, Attempts()).attempts
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

    def marks(self, plan: TrialPlan) -> dict[str, str]:
        """Tags in MLflow."""
        return self._of(plan).get(plan.key, Attempts()).marks()

    def sentence(self, plan: TrialPlan) -> str | None:
        """What was just measured of a trial's arm; None for what a person need not be told.

        That is the case where the user gave a fraction, for attempts after the first, and beyond so many arms.
        """
        attempts = [one for trial in self._of(plan).values() for one in trial.attempts]
        if self._asked is not None or len(attempts) > 1 or attempts[0].peak is None or len(self._attempts) > TOLD:
            return None
        return (
            f"{plan.label}: {_measured(attempts, self._most)}."
            if self._apart
            else f"{_measured(attempts, self._most)}."
        )

    def summary(self) -> str | None:
        """The same for all arms in one sentence, where they are too many for one each."""
        arms = [[one for trial in trials.values() for one in trial.attempts] for trials in self._attempts.values()]
        known = sorted((arm for arm in arms if any(one.peak for one in arm)), key=lambda arm: _most_of(arm)[0])
        if self._asked is not None or len(known) <= TOLD:
            return None
        return f"{len(known)} arms, from {_measured(known[0], self._most)}, to {_measured(known[-1], self._most)}."

    def _put(self, plan: TrialPlan, attempts: tuple[Attempt, ...]) -> None:
        self._of(plan)[plan.key] = Attempts(attempts=attempts)
        self._keep(plan, self._of(plan)[plan.key])
        if self._tell is not None and (sentence := self.sentence(plan)) is not None:
            self._tell(sentence)

    def _of(self, plan: TrialPlan) -> dict[str, Attempts]:
        return self._attempts.setdefault(self._name(plan), {})

    def _name(self, plan: TrialPlan) -> str:
        return identity(plan.arm) if self._apart else ""

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Ray pickles its searchers, which hold this, and restores neither."""
        return {}


def retried(kind: str | None, gpus: float) -> bool:
    """Whether a trial that told this kind of end with so much of a GPU is handed out again, with more."""
    return kind == "memory" and larger(gpus) is not None
