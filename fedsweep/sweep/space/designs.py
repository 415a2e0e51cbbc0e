"""Experimental designs: the arms of several factors, named arms and ablation arms. No ray, no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal

from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import ABLATED, IN_WORDS, NAMED, Arm, agrees, arm_label

Design = Literal["full", "one_factor"]
Subsets = Literal["one", "all"]
SWITCH = {"on": True, "off": False}
"""Words for true and false: YAML 1.1 reads them as booleans, YAML 1.2 and fedsweep as text."""
Factors = Mapping[str, Sequence[Arm]]
"""The levels of each factor; a level is a part of an arm, such as `{"lora.rank": 4}`."""
Picked = dict[str, int]
"""The number of the chosen level, by factor."""
Active = Callable[[str, Arm], bool]
"""A predicate: is a factor active, given the levels of the factors before it in `order`?"""


def every(factors: Factors, order: Sequence[str], active: Active) -> Iterator[Picked]:
    """Yield each arm of a full factorial as picked levels, without its inactive factors."""

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
    """Return the arm with the picked levels, its names in the order of the factors."""
    return {name: value for key in factors if key in picked for name, value in factors[key][picked[key]].items()}


def full_factorial(factors: Factors, order: Sequence[str], active: Active) -> list[Arm]:
    """Return all arms in the order of the factors and levels; the last factor changes fastest."""
    found = sorted(every(factors, order, active), key=lambda picked: [picked.get(key, 0) for key in factors])
    return [arm_of(factors, picked) for picked in found]


def one_factor(factors: Factors, order: Sequence[str], active: Active, baseline: Arm) -> list[Arm]:
    """Return the baseline and, for each other level of a factor, the baseline with it, less the factors it deactivates.

    Raise ValueError if the baseline lacks a factor, or is none of the arms.
    """
    start: dict[str, Arm] = {}
    for key in order:
        if not active(key, {name: value for level in start.values() for name, value in level.items()}):
            raise ValueError(f"`design` one_factor varies what the baseline has, and `space.{key}` is not there in it")
        if absent := [name for name in factors[key][0] if name not in baseline]:
            lacks = f"`{absent[0]}` is not in {arm_label(baseline)}"
            raise ValueError(
                f"`design` one_factor needs a `baseline` with a value of everything that varies, but {lacks}"
            )
        levels = [level for level in factors[key] if agrees(level, baseline)]
        if not levels:
            raise ValueError(f"`baseline` must be one of the arms, but {baseline} is not")
        start[key] = levels[0]
    others = [{**start, key: level} for key in factors for level in factors[key] if level is not start[key]]
    fixed = ({key: [chosen[key]] for key in factors} for chosen in (start, *others))
    return [arm for one in fixed for arm in full_factorial(one, order, active)]


def pairs(factors: Factors, order: Sequence[str], active: Active, deciding: set[str], most: int) -> list[Picked]:
    """Return at most `most` arms that cover every reachable level and then every reachable pair of levels.

    Each arm is built for one missing pair and takes, factor by factor, the level that adds most other missing pairs.
    Only factors in `deciding`, on which the presence of others depends, are tried with further levels.
    """
    levels = [(key, number) for key in order for number in range(len(factors[key]))]
    couples = [pair for pair in combinations(levels, 2) if pair[0][0] != pair[1][0]]
    missing = dict.fromkeys(map(frozenset, [*combinations(levels, 1), *couples]))

    def completed(place: int, picked: Picked, arm: Arm, target: Picked) -> Picked | None:
        if place == len(order):
            return picked
        key = order[place]
        if not active(key, arm):
            return None if key in target else completed(place + 1, picked, arm, target)

        def worth(number: int) -> int:
            return sum(frozenset([(key, number), one]) in missing for one in picked.items())

        numbers = [target[key]] if key in target else sorted(range(len(factors[key])), key=worth, reverse=True)
        for number in numbers if key in deciding else numbers[:1]:
            found = completed(place + 1, {**picked, key: number}, {**arm, **factors[key][number]}, target)
            if found is not None:
                return found
        return None

    found: list[Picked] = []
    while missing and len(found) < most:
        target = next(iter(missing))
        arm = completed(0, {}, {}, dict(target))
        missing.pop(target)
        if arm is not None:
            found.append(arm)
            for covered in (*combinations(arm.items(), 1), *combinations(arm.items(), 2)):
                missing.pop(frozenset(covered), None)
    return found


def ablation_arms(components: Sequence[str], subsets: Subsets) -> list[Arm]:
    """Return the full method, then the arms that lack one component each, or with `all` every set of components.

    >>> ablation_arms(["method.cross", "method.quality"], "one")
    [{'without': []}, {'without': ['method.cross']}, {'without': ['method.quality']}]
    >>> ablation_arms(["method.cross", "method.quality"], "all")[3:]
    [{'without': ['method.cross', 'method.quality']}]
    """
    sizes = range(len(components) + 1 if subsets == "all" else 2)
    return [{ABLATED: list(chosen)} for size in sizes for chosen in combinations(components, size)]


def left_out_values(ablate: Mapping[str, Json], known: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values that leave the components out; `on` and `off` set a boolean of the `known` values.

    >>> left_out_values({"method.cross": "off", "method.gate": "off"}, {"method.cross": True, "method.gate": "softmax"})
    {'method.cross': False, 'method.gate': 'off'}
    """
    return {
        name: SWITCH[value] if isinstance(known.get(name), bool) and value in ("on", "off") else value
        for name, value in ablate.items()
    }


def changes(
    arm: Arm, values: Mapping[str, Json], named: Mapping[str, Mapping[str, Json]] | None = None
) -> dict[str, Json]:
    """Return an arm's changes to the experiment, by dotted name.

    `values` leave the components out, and `named` holds the changes of each named arm.

    >>> changes({"lora.rank": 4, "without": ["method.cross"]}, {"method.cross": False, "method.quality": False})
    {'lora.rank': 4, 'method.cross': False}
    >>> changes({"arm": "FedAvg"}, {}, {"FedAvg": {"method": "ft", "optimizer.lr": 0.1}})
    {'method': 'ft', 'optimizer.lr': 0.1}
    """
    left_out, name = arm.get(ABLATED), arm.get(NAMED)
    own = dict((named or {})[name]) if isinstance(name, str) else {}
    axes = {name: value for name, value in arm.items() if name not in IN_WORDS}
    return own | axes | {name: values[name] for name in (left_out if isinstance(left_out, list) else [])}
