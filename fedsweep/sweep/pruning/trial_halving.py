"""Successive halving of single trials, whose decisions do not depend on the order in which trials run.

A rung is a round after which a trial is compared with other trials by a metric. Larger values of the metric are better.

The decisions are those of asynchronous successive halving (ASHA; Li et al., 2020) on a single worker, which runs one
trial after the other in the order of their numbers. They are a function of the recorded metrics, so the number of
workers, the order of results and interruptions have no effect.

This module imports neither ray nor torch.
"""

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recorded:
    """The records of a trial, on which the decisions depend."""

    values: Mapping[int, float]
    """The objective by round."""
    last: int
    """The last recorded round; -1 if no round is recorded."""
    stratum: str = ""
    """The group of the trial. Only trials of the same group are compared."""
    failed: bool = False
    """True if the trial diverged or failed, and therefore records no more rounds."""


@dataclass(frozen=True)
class Behind:
    """The round after which a trial was pruned, and its rank among the earlier trials at this rung."""

    round: int
    better: int
    compared: int

    def sentence(self) -> str:
        """Return the reason as text for the user.

        >>> Behind(3, better=5, compared=8).sentence()
        '5 of 8 earlier trials were better after round 3'
        """
        return f"{self.better} of {self.compared} earlier trials were better after round {self.round}"


@dataclass(frozen=True)
class TrialVerdicts:
    """The decisions that follow from the metrics recorded so far.

    Each trial is in exactly one of the dicts, which have the numbers of the trials as keys.
    """

    promoted: dict[int, int] = field(default_factory=dict)
    """The next rung of each trial that may continue, or the last round if no rung is left."""
    undecided: dict[int, int] = field(default_factory=dict)
    """The rung of each trial that waits for the values of earlier trials."""
    pruned: dict[int, Behind] = field(default_factory=dict)


def halve_in_order(
    trials: Mapping[int, Recorded], milestones: Sequence[int], rounds: int, reduction_factor: float
) -> TrialVerdicts:
    """Return the decisions at all rungs for which enough metrics are recorded.

    A trial is compared with all trials of its stratum that have a lower number and reach the rung. It continues if its
    value is in the best 1/eta of their values, and is pruned otherwise. If no earlier trial reaches the rung, the trial
    continues.

    A decision is pending while it depends on earlier trials that may still reach the rung. If a number is missing
    because the folder of a trial was deleted, that trial counts as one that may reach all rungs.

    Args:
        trials: The records of the trials by number.
        milestones: The rounds of the rungs, ascending, each below `rounds`.
        rounds: Number of rounds of a trial that is never stopped.
        reduction_factor: The reduction factor eta.
    """
    found, missing, share = TrialVerdicts(), 0, 1 - 1 / reduction_factor
    known: dict[tuple[str, int], list[float]] = defaultdict(list)  # the finite values at each rung, ascending
    late: dict[tuple[str, int], int] = defaultdict(int)  # the number of earlier trials that may still reach each rung
    for number in range(max(trials, default=-1) + 1):
        if (trial := trials.get(number)) is None:
            missing += 1
            continue
        for milestone in milestones:
            place = trial.stratum, milestone
            if milestone > trial.last:
                found.promoted[number] = milestone
                break
            if (value := trial.values.get(milestone)) is None:
                continue
            rung = known[place]
            behind = _is_behind(value, rung, late[place] + missing, share)
            better = len(rung) - bisect_right(rung, value) if math.isfinite(value) else len(rung)
            if math.isfinite(value):
                insort(rung, value)
            if behind is None:
                found.undecided[number] = milestone
                break
            if behind:
                found.pruned[number] = Behind(milestone, better, len(rung) - math.isfinite(value))
                break
        else:
            found.promoted[number] = rounds
        if number in found.pruned or (trial.failed and number in found.promoted):
            continue
        decided = found.undecided.get(number, trial.last)
        for milestone in milestones:
            late[trial.stratum, milestone] += milestone > decided
    return found


def _is_behind(value: float, rung: Sequence[float], late: int, share: float) -> bool | None:
    """Return whether a trial is pruned at a rung, or None if the values of late trials may change the decision.

    Args:
        value: The value of the trial.
        rung: The values of the earlier trials that have reached the rung, ascending.
        late: Number of earlier trials that may still reach the rung.
        share: The quantile of the earlier values that the trial must reach.
    """
    if not rung:
        return None if late else False
    place = (len(rung) - 1 + late) * share
    low, high = math.floor(place), math.ceil(place)
    if not late:  # linear interpolation between two values, as in `numpy.quantile`
        part, gap = place - low, rung[high] - rung[low]
        return not value >= (rung[low] + gap * part if part < 0.5 else rung[high] - gap * (1 - part))
    if high < len(rung) and value >= rung[high]:  # also if the late trials are all better
        return False
    if low >= late and not value >= rung[low - late]:  # also if the late trials are all worse
        return True
    return None
