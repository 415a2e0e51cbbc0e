"""Which arms there are of several factors, some of them there only where others allow it. No ray, no torch.

A factor has levels, each a part of an arm: `{"lora.rank": 4}`. What is picked of them is their number, by factor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal

from fedsweep.results.arms import Arm, arm_label, identity

Design = Literal["full", "one_factor"]
Factors = Mapping[str, Sequence[Arm]]
Picked = dict[str, int]
Active = Callable[[str, Arm], bool]
"""Whether a factor is there, given the values of those that come before it in the order of asking."""


def every(factors: Factors, order: Sequence[str], active: Active) -> Iterator[Picked]:
    """All arms of a full factorial, each once; of a factor that is not there nothing is picked."""

    def below(place: int, picked: Picked, arm: Arm) -> Iterator[Picked]:
        if place == len(order):
            yield picked
        elif not active(key := order[place], arm):
            yield from below(place + 1, picked, arm)
        else:
            for number, level in enumerate(factors[key]):
                yield from below(place + 1, {**picked, key: number}, {**arm, **level})

    return below(0, {}, {})


def arm_of(factors: Factors, picked: Picked) -> Arm:
    """The arm with these levels, its names in the order of the factors."""
    return {name: value for key in factors if key in picked for name, value in factors[key][picked[key]].items()}


def full_factorial(factors: Factors, order: Sequence[str], active: Active) -> list[Arm]:
    """All arms, in the order of the factors and their levels, the last factor the fastest."""
    found = sorted(every(factors, order, active), key=lambda picked: [picked.get(key, 0) for key in factors])
    return [arm_of(factors, picked) for picked in found]


def one_factor(factors: Factors, order: Sequence[str], active: Active, baseline: Arm) -> list[Arm]:
    """The baseline, and for each factor every other level with all else as in the baseline.

    Where that level leaves no place for another factor, its arm is without that one.

    Raises:
        ValueError: the baseline lacks a factor, or a factor is not there in it.
    """
    start: Picked = {}
    for key in order:
        if not active(key, arm_of(factors, start)):
            raise ValueError(f"`design` one_factor varies what the baseline has, and `space.{key}` is not there in it")
        given = {name: baseline.get(name) for name in factors[key][0]}
        if absent := [name for name in given if name not in baseline]:
            raise ValueError(
                f"`design` one_factor needs a `baseline` with a value of everything that varies, "
                f"but `{absent[0]}` is not in {arm_label(baseline)}"
            )
        numbers = [number for number, level in enumerate(factors[key]) if identity(level) == identity(given)]
        if not numbers:
            raise ValueError(f"`baseline` must be one of the arms, but {baseline} is not")
        start[key] = numbers[0]
    changed = [{**start, key: number} for key in factors for number in range(len(factors[key])) if number != start[key]]
    return [arm_of(factors, start), *(arm_of(factors, _kept(factors, order, active, one)) for one in changed)]


def _kept(factors: Factors, order: Sequence[str], active: Active, picked: Picked) -> Picked:
    """Without the factors that are not there."""
    kept: Picked = {}
    for key in order:
        if active(key, arm_of(factors, kept)):
            kept[key] = picked[key]
    return kept


def pairs(factors: Factors, order: Sequence[str], active: Active, deciding: set[str], most: int) -> list[Picked]:
    """Arms among which are all pairs of levels that some arm has, and before them every level; at most so many.

    Each is made for one pair that is missing yet and takes, factor by factor, the level that adds most of the others.
    `deciding` are the factors on which it depends whether others are there: only these are tried again.
    """
    levels = [(key, number) for key in order for number in range(len(factors[key]))]
    couples = [frozenset(pair) for pair in combinations(levels, 2) if pair[0][0] != pair[1][0]]
    missing = dict.fromkeys([*(frozenset([one]) for one in levels), *couples])

    def completed(place: int, picked: Picked, arm: Arm, target: Picked) -> Picked | None:
        if place == len(order):
            return picked
        key = order[place]
        if not active(key, arm):
            return None if key in target else completed(place + 1, picked, arm, target)
        for number in _by_worth(key, picked, target):
            level = factors[key][number]
            if (found := completed(place + 1, {**picked, key: number}, {**arm, **level}, target)) is not None:
                return found
            if key not in deciding:
                return None
        return None

    def _by_worth(key: str, picked: Picked, target: Picked) -> list[int]:
        if key in target:
            return [target[key]]
        worth = [
            sum(frozenset([(key, number), one]) in missing for one in picked.items())
            for number in range(len(factors[key]))
        ]
        return sorted(range(len(worth)), key=lambda number: -worth[number])

    found: list[Picked] = []
    while missing and len(found) < most:
        target = next(iter(missing))
        arm = completed(0, {}, {}, dict(target))
        missing.pop(target)
        if arm is not None:
            found.append(arm)
            for one in arm.items():
                missing.pop(frozenset([one]), None)
            for pair in combinations(arm.items(), 2):
                missing.pop(frozenset(pair), None)
    return found
