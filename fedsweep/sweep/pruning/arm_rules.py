"""Which arms of a sweep fall, and where: arms climb rungs with all their common seeds. No ray, no torch.

Everything here is a function of the recorded metrics alone: who ran first, how many workers there were, and what was
recorded beyond a rung that an arm did not pass, change nothing. Values are better when larger.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedsweep.results.arms import is_accuracy

Arm = TypeVar("Arm", bound=Hashable)
History = Mapping[int, float]
"""A trial's objective by round."""

SEEDS_PER_WIN = 4
"""An arm below the line is spared if it is not behind with one in so many of the seeds, rounded up."""


@dataclass(frozen=True)
class Fall:
    """Where an arm fell, and why."""

    round: int
    seeds: int
    behind: float = math.nan
    """How far its mean lies below that of the last arm that went on by its mean."""
    behind_with: int = 0
    """Seeds with which it is behind that arm."""
    spared: int = 0
    """Arms that were spared in its stead, where it is behind with too few seeds to fall but these are closer."""
    failed: tuple[int, ...] = ()
    """Seeds that will have no value at the rung: they diverged, or their trials failed."""

    def sentence(self, metric: str) -> str:
        """For people; differences of accuracies in points.

        >>> Fall(3, 5, behind=0.041, behind_with=5).sentence("accuracy/mean")
        'fell at round 3: 4.1 points below the last that went on (behind with 5 of 5 seeds)'
        >>> Fall(3, 5, failed=(2,)).sentence("accuracy/mean")
        'fell at round 3: no value of seed 2'
        """
        if self.failed:
            several = "s" * (len(self.failed) > 1)
            return f"fell at round {self.round}: no value of seed{several} {', '.join(map(str, self.failed))}"
        gap = f"{100 * self.behind:.1f} points" if is_accuracy(metric) else f"{self.behind:.4g}"
        closer = f"; {self.spared} closer {'was' if self.spared == 1 else 'were'} spared" if self.spared else ""
        return (
            f"fell at round {self.round}: {gap} below the last that went on "
            f"(behind with {self.behind_with} of {self.seeds} seeds{closer})"
        )


@dataclass(frozen=True)
class Standing(Generic[Arm]):
    """Where the arms stand, as far as the recorded metrics decide it. Each arm is in one of the three."""

    climbing: dict[Arm, int] = field(default_factory=dict)
    """Up to which round an arm is played whatever the others record; those that others wait for come first."""
    waiting: dict[Arm, int] = field(default_factory=dict)
    """Arms at a rung that is not decided, the most promising first, and the round up to which they climb if they go
    on. Workers with nothing else to do may play these: what is lost if the arm falls is the way to the next rung."""
    fallen: dict[Arm, Fall] = field(default_factory=dict)


def rungs(grace_rounds: int, reduction_factor: float, rounds: int) -> list[int]:
    """The rounds after which arms are judged: grace, grace eta, grace eta^2, ... below the last.

    >>> rungs(1, 3, 20), rungs(30, 3, 20)
    ([1, 3, 9], [])
    """
    found: dict[int, None] = {}
    milestone = float(grace_rounds)
    while milestone < rounds:
        found[int(milestone)] = None
        milestone *= reduction_factor
    return list(found)


def places(arms: int, reduction_factor: float, rung: int) -> int:
    """How many of so many arms go on by their mean at rung 0, 1, ...; as many again may be spared.

    >>> [places(24, 3, rung) for rung in range(4)]
    [8, 3, 1, 1]
    """
    return math.ceil(arms / reduction_factor ** (rung + 1))


def judge(values: Mapping[Arm, Mapping[int, float]], places: int, round: int) -> dict[Arm, Fall]:
    """Who falls at a rung, from the value of every seed of every arm that reached it.

    The arms with the best means over the seeds go on, as many as there are places. Below this line an arm falls if it
    is behind the last of these with every seed, from five seeds on with all but a quarter. The others cannot be told
    apart from it and are spared, the best of them, as many as there are places. Equal means share a fate, so that no
    order of the arms decides. With one seed this is successive halving.

    Raises:
        ValueError: arms have different seeds.
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
    close = [arm for arm, behind in below.items() if seeds - behind >= math.ceil(seeds / SEEDS_PER_WIN)]
    enough = sorted((means[arm] for arm in close), reverse=True)[:places]
    spared = {arm for arm in close if means[arm] >= enough[-1]}
    return {
        arm: Fall(round, seeds, line - means[arm], behind, len(spared) if arm in close else 0)
        for arm, behind in below.items()
        if arm not in spared
    }


def climb(
    histories: Mapping[Arm, Mapping[int, History]],
    milestones: Sequence[int],
    rounds: int,
    reduction_factor: float,
    *,
    strata: Mapping[Arm, Hashable] | None = None,
    keep: Collection[Arm] = (),
    failed: Collection[tuple[Arm, int]] = (),
) -> Standing[Arm]:
    """Replay the rungs from what is recorded so far. An arm one of whose trials failed falls at its next rung.

    Args:
        histories: of every arm of the sweep and each of its seeds the objective by round, empty before it has any.
        milestones: the rungs, ascending, each below `rounds`.
        rounds: of a trial that is never stopped.
        reduction_factor: eta; of n arms ceil(n / eta^i) have a place beyond the i-th rung.
        strata: of each arm, among which arms it is judged; without it all are judged together.
        keep: arms that are not judged: they never fall, and take nobody's place.
        failed: trials, by arm and seed, that will record nothing more.
    """
    together: dict[Hashable, dict[Arm, Mapping[int, History]]] = defaultdict(dict)
    for arm, trials in histories.items():
        if arm not in keep:
            together[strata[arm] if strata else None][arm] = trials
    parts = [
        _climb_together(trials, milestones, rounds, reduction_factor, frozenset(failed)) for trials in together.values()
    ]
    climbing = sorted((item for part in parts for item in part.climbing.items()), key=lambda item: item[1])
    waiting = [(place, item) for part in parts for place, item in enumerate(part.waiting.items())]
    return Standing(
        {**dict(climbing), **{arm: rounds for arm in histories if arm in keep}},
        dict(item for _, item in sorted(waiting, key=lambda one: one[0])),
        {arm: fall for part in parts for arm, fall in part.fallen.items()},
    )


def _climb_together(
    histories: Mapping[Arm, Mapping[int, History]],
    milestones: Sequence[int],
    rounds: int,
    reduction_factor: float,
    failed: frozenset[tuple[Arm, int]],
) -> Standing[Arm]:
    """The arms of one stratum, of which none is kept."""
    fallen: dict[Arm, Fall] = {}
    standing = list(histories)
    stops = [*milestones, rounds, rounds]
    for rung, milestone in enumerate(milestones):
        values = {arm: _values_at(milestone, arm, histories[arm], failed) for arm in standing}
        for arm, found in values.items():
            if lost := tuple(sorted(seed for seed, value in found.items() if not math.isfinite(value))):
                fallen[arm] = Fall(milestone, len(histories[arm]), failed=lost)
        standing = [arm for arm in standing if arm not in fallen]
        arrived = {arm: values[arm] for arm in standing if len(values[arm]) == len(histories[arm])}
        on = places(len(histories), reduction_factor, rung)
        if len(arrived) < len(standing):
            late = [arm for arm in standing if arm not in arrived]
            climbing = dict.fromkeys(late, milestone)
            waiting: dict[Arm, int] = {}
            means = _means(arrived)
            for arm in sorted(arrived, key=lambda arm: -means[arm]):
                place = sum(mean > means[arm] for mean in means.values())
                next_values = _values_at(stops[rung + 1], arm, histories[arm], failed)
                if place + len(late) >= on:  # others may yet take its place
                    waiting[arm] = stops[rung + 1]
                elif len(next_values) < len(histories[arm]) or stops[rung + 1] == rounds:
                    climbing[arm] = stops[rung + 1]
                else:
                    waiting[arm] = stops[rung + 2]
            return Standing(climbing, waiting, fallen)
        fell = judge(arrived, on, milestone)
        fallen |= fell
        standing = [arm for arm in standing if arm not in fell]
    return Standing(dict.fromkeys(standing, rounds), {}, fallen)


def _values_at(
    round: int, arm: Arm, trials: Mapping[int, History], failed: frozenset[tuple[Arm, int]]
) -> dict[int, float]:
    """By seed the value at a round: of failed trials that never came there NaN, of those on their way none."""
    reached = {seed: history[round] for seed, history in trials.items() if round in history}
    return {seed: math.nan for seed in trials if (arm, seed) in failed} | reached


def _means(values: Mapping[Arm, Mapping[int, float]]) -> dict[Arm, float]:
    """Over the seeds, in whatever order these stand."""
    return {arm: math.fsum(of_seeds.values()) / len(of_seeds) for arm, of_seeds in values.items()}


def _behind(one: Mapping[int, float], other: Mapping[int, float]) -> int:
    """With how many seeds the one is behind the other."""
    return sum(value < other[seed] for seed, value in one.items())
