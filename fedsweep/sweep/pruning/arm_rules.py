"""Successive halving of whole arms: decisions are functions of the recorded metrics alone. No ray, no torch.

The order of the trials and the metrics after an arm's last rung have no influence. Values are better when larger.
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
"""An arm below the line is tied with it if it is not worse with at least one in this many seeds, rounded up."""


@dataclass(frozen=True)
class Pruned:
    """The round at which an arm was pruned, and the reason."""

    round: int
    seeds: int
    behind: float = math.nan
    """Difference between the mean of the last arm that was promoted by its mean and the mean of this arm."""
    behind_with: int = 0
    """Number of seeds with which the arm is worse than that arm."""
    closer: int = 0
    """Number of tied arms that were promoted instead of this one, which is tied too; 0 if it is not tied."""
    failed: tuple[int, ...] = ()
    """Seeds that will have no value at the rung: they diverged, or their trials failed."""

    def sentence(self, metric: str) -> str:
        """Return the reason as a sentence, which the outcome stores; differences of accuracies are in points.

        >>> Pruned(3, 5, behind=0.041, behind_with=5).sentence("accuracy/mean")
        'pruned at round 3: 4.1 points below the last promoted arm (worse with 5 of 5 seeds)'
        >>> Pruned(3, 5, failed=(2,)).sentence("accuracy/mean")
        'pruned at round 3: no value of seed 2'
        """
        if self.failed:
            several = "s" * (len(self.failed) > 1)
            return f"pruned at round {self.round}: no value of seed{several} {', '.join(map(str, self.failed))}"
        gap = f"{100 * self.behind:.1f} points" if is_accuracy(metric) else f"{self.behind:.4g}"
        closer = (
            f"; {self.closer} closer {'arm was' if self.closer == 1 else 'arms were'} promoted as tied"
            if self.closer
            else ""
        )
        return (
            f"pruned at round {self.round}: {gap} below the last promoted arm "
            f"(worse with {self.behind_with} of {self.seeds} seeds{closer})"
        )


@dataclass(frozen=True)
class Verdicts(Generic[Arm]):
    """The decisions that follow from the recorded metrics so far. Each arm is in exactly one of the mappings."""

    promoted: dict[Arm, int] = field(default_factory=dict)
    """The round that an arm reaches whatever the others record; arms that others wait for come first."""
    undecided: dict[Arm, int] = field(default_factory=dict)
    """The round that an arm at an undecided rung reaches if promoted, the best arms first; idle workers may run it."""
    pruned: dict[Arm, Pruned] = field(default_factory=dict)


def rungs(grace_rounds: int, reduction_factor: float, rounds: int) -> list[int]:
    """Return the rounds after which arms are judged: grace, grace * eta, grace * eta^2, ... below `rounds`.

    >>> rungs(1, 3, 20), rungs(30, 3, 20)
    ([1, 3, 9], [])
    """
    found, milestone = list[int](), float(grace_rounds)
    while milestone < rounds:
        found.append(int(milestone))
        milestone *= reduction_factor
    return list(dict.fromkeys(found))


def places(arms: int, reduction_factor: float, rung: int) -> int:
    """Return how many of `arms` arms are promoted by their mean at a rung.

    At most the same number of tied arms is added.

    >>> [places(24, 3, rung) for rung in range(4)]
    [8, 3, 1, 1]
    """
    return math.ceil(arms / reduction_factor ** (rung + 1))


def judge(values: Mapping[Arm, Mapping[int, float]], places: int, round: int) -> dict[Arm, Pruned]:
    """Return the arms that are pruned at a rung, given the value of every seed of every arm that reached it.

    The `places` arms with the best means over the seeds are promoted. An arm below this line is tied with the last of
    them if it is not worse with at least a quarter of the seeds, rounded up. The best `places` tied arms are promoted
    too, and the others pruned. Arms with equal means have the same outcome. With one seed this is successive halving.

    Raises:
        ValueError: The arms have different seeds.
    """
    if len({frozenset(of_seeds) for of_seeds in values.values()}) > 1:
        raise ValueError(f"arms are judged over common seeds, but have {[sorted(seeds) for seeds in values.values()]}")
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
    """Decide every rung for which the recorded metrics suffice; an arm with a failed trial is pruned at its next rung.

    Args:
        histories: The objective by round, for every arm of the sweep and each of its seeds.
        milestones: The rungs, ascending, each below `rounds`.
        rounds: Rounds of a trial that is never stopped.
        reduction_factor: eta; ceil(n / eta^i) of n arms have a place after the i-th rung.
        strata: The stratum of each arm, within which it is judged; None judges all arms together.
        keep: Arms that are never pruned and take no place.
        failed: Trials, by arm and seed, that will record nothing more.
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
                if place + len(late) >= on:  # others may yet take its place
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
    """Return the value of each seed at a round: NaN if its trial failed earlier.

    Seeds without a value yet are left out.
    """
    reached = {seed: history[round] for seed, history in trials.items() if round in history}
    return {seed: math.nan for seed in trials if (arm, seed) in failed} | reached


def _means(values: Mapping[Arm, Mapping[int, float]]) -> dict[Arm, float]:
    """Return the means over the seeds, bit-identical for every order of the seeds."""
    return {arm: math.fsum(of_seeds.values()) / len(of_seeds) for arm, of_seeds in values.items()}


def _behind(one: Mapping[int, float], other: Mapping[int, float]) -> int:
    return sum(value < other[seed] for seed, value in one.items())
