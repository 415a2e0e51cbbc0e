"""Population based training (Jaderberg et al., 2017): who takes over from whom, with which values. No ray, no torch.

Generations are synchronous: all members have come to the same round. What follows is a function of the values recorded
there and of streams of the search's seed, so neither the number of workers nor the order of arrival is part of it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from numpy.random import Generator

from fedsweep.common.randomness import stream
from fedsweep.results.arms import identity
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.settings import PopulationScheduler

Values = Mapping[str, float]

TRIES = 8
"""Perturbations that are tried before all values are drawn anew."""


@dataclass(frozen=True)
class Member:
    """A member at the end of a generation: its values, and the objective, better when larger; None if it broke."""

    values: Values
    score: float | None


@dataclass(frozen=True)
class Successor:
    """What a member goes on as: the state of another one, its `parent`, and values of its own."""

    parent: int
    values: dict[str, float]


def boundaries(interval: int, rounds: int) -> list[int]:
    """The rounds after which members are replaced: multiples of the interval below the last round.

    >>> boundaries(3, 12), boundaries(5, 4)
    ([3, 6, 9], [])
    """
    return list(range(interval, rounds, interval))


def first_generation(axes: Mapping[str, Axis], size: int, seed: int) -> list[dict[str, float]]:
    """Values of each member, drawn from the ranges; those of a name depend on no other name and no other member."""
    return [
        {name: _drawn(axis, stream(seed, "population", 0, member, name)) for name, axis in axes.items()}
        for member in range(size)
    ]


def successors(
    members: Mapping[int, Member],
    generation: int,
    axes: Mapping[str, Axis],
    scheduler: PopulationScheduler,
    seed: int,
    used: Collection[str] = (),
) -> dict[int, Successor]:
    """Who is replaced before a generation (the first after the start is 1), and by what.

    All that broke are, and of the others so many that `quantile` of all members (rounded down) are replaced, the worst
    first. Each takes over from one of the best `quantile` that is better than it: among equals nobody does, and where
    all broke nobody is left to take over from. `used` are the `identity` of values that trials have had; none is given
    twice, since the same values and the same state are the same run.
    """
    scores = {place: one.score for place, one in members.items() if one.score is not None}
    ranked = sorted(scores, key=lambda place: (-scores[place], place))
    broken = sorted(set(members) - set(scores))
    count = math.floor(scheduler.quantile * len(members))
    best, worst = ranked[: max(1, count)], ranked[len(ranked) - max(0, count - len(broken)) :]
    taken, found = set(used), dict[int, Successor]()
    for place in sorted([*broken, *worst]):
        better = [one for one in best if place not in scores or scores[one] > scores[place]]
        if not better:
            continue
        parent = better[int(stream(seed, "population", generation, place).integers(len(better)))]
        values = _explored(members[parent].values, axes, scheduler, (seed, generation, place), taken)
        taken.add(identity(values))
        found[place] = Successor(parent, values)
    return found


def _explored(
    values: Values,
    axes: Mapping[str, Axis],
    scheduler: PopulationScheduler,
    child: tuple[int, int, int],
    taken: Collection[str],
) -> dict[str, float]:
    """A parent's values, each times a factor or drawn anew, such as no trial has had.

    `child` is the search's seed, the generation and the member.
    """
    seed, *key = child
    chances = {name: stream(seed, "population", *key, name) for name in axes}
    found = {name: _perturbed(values[name], axis, scheduler, chances[name]) for name, axis in axes.items()}
    for _ in range(TRIES):
        if identity(found) not in taken:
            return found
        found = {name: _perturbed(values[name], axis, scheduler, chances[name]) for name, axis in axes.items()}
    while identity(found) in taken:
        found = {name: _drawn(axis, chances[name]) for name, axis in axes.items()}
    return found


def _perturbed(value: float, axis: Axis, scheduler: PopulationScheduler, chance: Generator) -> float:
    """The value times one of the factors within the range, or a new draw."""
    if chance.random() < scheduler.resample:
        return _drawn(axis, chance)
    return _within(value * scheduler.factors[int(chance.integers(len(scheduler.factors)))], axis)


def _drawn(axis: Axis, chance: Generator) -> float:
    if axis.loguniform is not None:
        low, high = map(math.log, axis.loguniform)
        return _within(math.exp(low + (high - low) * chance.random()), axis)
    low, high = _range(axis)
    return _within(low + (high - low) * chance.random(), axis)


def _within(value: float, axis: Axis) -> float:
    low, high = _range(axis)
    return min(max(value, low), high)


def _range(axis: Axis) -> tuple[float, float]:
    bounds = axis.uniform or axis.loguniform
    if bounds is None:
        raise ValueError("population based training moves within ranges")
    return bounds
