"""Successive halving of whole arms.

A rung is a round after which arms are compared by a metric: some are promoted, and the others are pruned. Larger values
of the metric are better.

Decisions depend only on the recorded metrics, not on the order in which trials ran. Metrics that an arm recorded after
the rung at which it was pruned have no effect.

This module imports neither ray nor torch.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedsweep.results.arms import is_accuracy

Arm = TypeVar("Arm", bound=Hashable)
Trials = Mapping[int, Mapping[int, float]]
"""The objective of an arm's trials, by seed and round."""

SEEDS_PER_WIN = 4
"""An arm with n seeds is tied with a better one if it is not worse with at least n / SEEDS_PER_WIN seeds."""


@dataclass(frozen=True)
class Pruned:
    """The round at which an arm was pruned, and the reason."""

    round: int
    seeds: int
    behind: float = math.nan
    """Mean of the worst arm that was promoted by its mean, minus the mean of this arm."""
    behind_with: int = 0
    """Number of seeds with which this arm is worse than that promoted arm."""
    closer: int = 0
    """Number of tied arms that were promoted instead of this tied arm; 0 if this arm is not tied."""
    failed: tuple[int, ...] = ()
    """Seeds that have no value at the rung, because their trials diverged or failed."""

    def sentence(self, metric: str) -> str:
        """Return the reason as text for the user. Differences between accuracies are in percentage points.

        >>> Pruned(3, 5, behind=0.041, behind_with=5).sentence("accuracy/mean")
        '4.1 points below the last promoted arm after round 3 (worse with 5 of 5 seeds)'
        >>> Pruned(3, 5, failed=(2,)).sentence("accuracy/mean")
        'no value for seed 2 after round 3'
        """
        if self.failed:
            several = "s" * (len(self.failed) > 1)
            return f"no value for seed{several} {', '.join(map(str, self.failed))} after round {self.round}"
        gap = f"{100 * self.behind:.1f} points" if is_accuracy(metric) else f"{self.behind:.4g}"
        were = "arm was" if self.closer == 1 else "arms were"
        closer = f"; {self.closer} other tied {were} promoted" if self.closer else ""
        return (
            f"{gap} below the last promoted arm after round {self.round} "
            f"(worse with {self.behind_with} of {self.seeds} seeds{closer})"
        )


@dataclass(frozen=True)
class Verdicts(Generic[Arm]):
    """The decisions that follow from the metrics recorded so far.

    Each arm is a key in exactly one of the dicts `promoted`, `undecided` and `pruned`.
    """

    promoted: dict[Arm, int] = field(default_factory=dict)
    """The round that each arm will reach, whatever the other arms record. Arms for which others wait come first."""
    undecided: dict[Arm, int] = field(default_factory=dict)
    """The round that each arm at an undecided rung reaches if it is promoted, best arms first.

    Idle workers may run these arms in advance.
    """
    pruned: dict[Arm, Pruned] = field(default_factory=dict)


def places(arms: int, reduction_factor: float, rung: int) -> int:
    """Return how many arms are promoted at a rung because of their means: `arms` / eta^(`rung` + 1), rounded up.

    The first rung has the number 0, and eta is `reduction_factor`. Tied arms may be promoted in addition.

    >>> [places(24, 3, rung) for rung in range(4)]
    [8, 3, 1, 1]
    """
    return math.ceil(arms / reduction_factor ** (rung + 1))


def judge(values: Mapping[Arm, Mapping[int, float]], places: int, round: int) -> dict[Arm, Pruned]:
    """Return the arms that are pruned at a rung, each with the reason.

    The `places` arms with the best means over the seeds are promoted. The worst of these arms is called the last arm.
    Another arm is tied with the last arm if, for at least a quarter of the seeds (rounded up), it is at least as good
    as the last arm. Of the tied arms, up to `places` arms (those with the best means) are promoted, too. All other
    arms are pruned.

    More arms are promoted if their means equal the lowest mean that is promoted. With one seed, no arm is tied, so the
    rule is ordinary successive halving.

    Args:
        values: The value for each seed of each arm that reached the rung.
        places: Number of arms to promote because of their mean.
        round: Round of the rung.

    Raises:
        ValueError: The arms have different seeds.
    """
    if len({frozenset(of_seeds) for of_seeds in values.values()}) > 1:
        raise ValueError(f"arms must have common seeds, but their seeds are {[sorted(one) for one in values.values()]}")
    if len(values) <= places:
        return {}
    means = _means(values)
    line = sorted(means.values(), reverse=True)[places - 1]
    last = [values[arm] for arm, mean in means.items() if mean == line]
    below = {arm: min(_behind(values[arm], one) for one in last) for arm, mean in means.items() if mean < line}
    seeds = len(next(iter(values.values())))
    tied = [arm for arm, behind in below.items() if seeds - behind >= math.ceil(seeds / SEEDS_PER_WIN)]
    best = sorted((means[arm] for arm in tied), reverse=True)[:places]
    promoted = {arm for arm in tied if means[arm] >= best[-1]}
    return {
        arm: Pruned(round, seeds, line - means[arm], behind, len(promoted) if arm in tied else 0)
        for arm, behind in below.items()
        if arm not in promoted
    }


def halve(
    histories: Mapping[Arm, Trials],
    milestones: Sequence[int],
    rounds: int,
    reduction_factor: float,
    *,
    strata: Mapping[Arm, Hashable] | None = None,
    keep: Collection[Arm] = (),
    failed: Collection[tuple[Arm, int]] = (),
) -> Verdicts[Arm]:
    """Return the decisions at all rungs for which enough metrics are recorded.

    An arm with a failed trial is pruned at its next rung.

    Args:
        histories: The objective values of every arm of the sweep, by seed and round.
        milestones: The rounds of the rungs, ascending, each below `rounds`.
        rounds: Number of rounds of a trial that is never stopped.
        reduction_factor: The reduction factor eta. At rung i = 1, 2, ..., the ceil(n / eta^i) arms with the best means
            are promoted, where n is the number of arms in the stratum.
        strata: The stratum (group) of each arm. Only arms of the same stratum are compared. If None, all arms are
            compared.
        keep: Arms that are never pruned and do not count among the promoted arms.
        failed: The arm and seed of each trial that will record no more rounds.
    """
    together: dict[Hashable, dict[Arm, Trials]] = defaultdict(dict)
    for arm, trials in histories.items():
        if arm not in keep:
            together[strata[arm] if strata else None][arm] = trials
    parts = [
        _halve_stratum(trials, milestones, rounds, reduction_factor, frozenset(failed)) for trials in together.values()
    ]
    promoted = sorted((item for part in parts for item in part.promoted.items()), key=lambda item: item[1])
    undecided = [(place, item) for part in parts for place, item in enumerate(part.undecided.items())]
    return Verdicts(
        {**dict(promoted), **{arm: rounds for arm in histories if arm in keep}},
        dict(item for _, item in sorted(undecided, key=lambda one: one[0])),
        {arm: pruned for part in parts for arm, pruned in part.pruned.items()},
    )


def _halve_stratum(
    histories: Mapping[Arm, Trials],
    milestones: Sequence[int],
    rounds: int,
    eta: float,
    failed: Collection[tuple[Arm, int]],
) -> Verdicts[Arm]:
    pruned: dict[Arm, Pruned] = {}
    left = list(histories)
    stops = [*milestones, rounds, rounds]
    for rung, milestone in enumerate(milestones):
        values = {arm: _values_at(milestone, arm, histories[arm], failed) for arm in left}
        for arm, found in values.items():
            if lost := tuple(sorted(seed for seed, value in found.items() if not math.isfinite(value))):
                pruned[arm] = Pruned(milestone, len(histories[arm]), failed=lost)
        left = [arm for arm in left if arm not in pruned]
        arrived = {arm: values[arm] for arm in left if len(values[arm]) == len(histories[arm])}
        on = places(len(histories), eta, rung)
        if len(arrived) < len(left):
            late = [arm for arm in left if arm not in arrived]
            promoted = dict.fromkeys(late, milestone)
            undecided: dict[Arm, int] = {}
            means = _means(arrived)
            for arm in sorted(arrived, key=lambda arm: -means[arm]):
                place = sum(mean > means[arm] for mean in means.values())
                next_values = _values_at(stops[rung + 1], arm, histories[arm], failed)
                if place + len(late) >= on:  # late arms may still be better
                    undecided[arm] = stops[rung + 1]
                elif len(next_values) < len(histories[arm]) or stops[rung + 1] == rounds:
                    promoted[arm] = stops[rung + 1]
                else:
                    undecided[arm] = stops[rung + 2]
            return Verdicts(promoted, undecided, pruned)
        pruned |= judge(arrived, on, milestone)
        left = [arm for arm in left if arm not in pruned]
    return Verdicts(dict.fromkeys(left, rounds), {}, pruned)


def _values_at(round: int, arm: Arm, trials: Trials, failed: Collection[tuple[Arm, int]]) -> dict[int, float]:
    """Return an arm's values after a round, by seed.

    The value is NaN for a trial that failed before the round. Seeds whose trial has not reached the round are left out.
    """
    reached = {seed: history[round] for seed, history in trials.items() if round in history}
    return {seed: math.nan for seed in trials if (arm, seed) in failed} | reached


def _means(values: Mapping[Arm, Mapping[int, float]]) -> dict[Arm, float]:
    """Return each arm's mean over its seeds. The sum is exact, so the order of the seeds does not matter."""
    return {arm: math.fsum(of_seeds.values()) / len(of_seeds) for arm, of_seeds in values.items()}


def _behind(one: Mapping[int, float], other: Mapping[int, float]) -> int:
    return sum(value < other[seed] for seed, value in one.items())
