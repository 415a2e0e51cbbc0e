"""Population based training (Jaderberg et al., 2017) in synchronous generations. No ray, no torch.

A generation is a function of the recorded metrics and of the search's seed, whatever the workers and their order.
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
"""Perturbations to try before all values are drawn anew."""


@dataclass(frozen=True)
class Member:
    """A member at the end of a generation."""

    values: Values
    score: float | None
    """The objective, better when larger; None after an error."""


@dataclass(frozen=True)
class Successor:
    """The next trial of a member: it continues the state of the member `parent` with values of its own."""

    parent: int
    values: dict[str, float]


def boundaries(interval: int, rounds: int) -> list[int]:
    """Return the rounds after which members are replaced: multiples of `interval` below `rounds`.

    >>> boundaries(3, 12), boundaries(5, 4)
    ([3, 6, 9], [])
    """
    return list(range(interval, rounds, interval))


def first_generation(axes: Mapping[str, Axis], size: int, seed: int) -> list[dict[str, float]]:
    """Draw the values of each member, each value from a random stream of its member and name."""
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
    """Return the successors of replaced members before a generation; the first one after the start is 1.

    All members with an error are replaced, then the worst, until `quantile` of all members (rounded down) are. The
    parent is drawn from those of the best `quantile` that are better than the member, which stays if there is none.
    `used` holds the `identity` of earlier values, which are not given again: equal values and states are one run.
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
    """Perturb a parent's values until no trial has had them; `child` is the search's seed, generation and member."""
    seed, *key = child
    chances = {name: stream(seed, "population", *key, name) for name in axes}
    for _ in range(TRIES + 1):
        found = {name: _perturbed(values[name], axis, scheduler, chances[name]) for name, axis in axes.items()}
        if identity(found) not in taken:
            return found
    while identity(found) in taken:
        found = {name: _drawn(axis, chances[name]) for name, axis in axes.items()}
    return found


def _perturbed(value: float, axis: Axis, scheduler: PopulationScheduler, chance: Generator) -> float:
    if chance.random() < scheduler.resample:
        return _drawn(axis, chance)
    return _within(value * scheduler.factors[int(chance.integers(len(scheduler.factors)))], axis)


def _drawn(axis: Axis, chance: Generator) -> float:
    low, high = map(math.log, axis.loguniform) if axis.loguniform else _range(axis)
    value = low + (high - low) * chance.random()
    return _within(math.exp(value) if axis.loguniform else value, axis)


def _within(value: float, axis: Axis) -> float:
    low, high = _range(axis)
    return min(max(value, low), high)


def _range(axis: Axis) -> tuple[float, float]:
    bounds = axis.uniform or axis.loguniform
    if bounds is None:
        raise ValueError("population based training moves within ranges")
    return bounds
