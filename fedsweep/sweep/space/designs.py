"""Experimental designs: combinations of several factors, and ablation arms.

This module imports neither ray nor torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Literal

from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import ABLATED, IN_WORDS, NAMED, Arm, agrees, arm_label, shown_mapping

Design = Literal["full", "one_factor"]
Subsets = Literal["one", "all"]
MOST_ARMS = 10_000
"""Largest number of arms of a grid, whose arms are all listed and validated before the first trial."""
SWITCH = {"on": True, "off": False}
"""Words that stand for true and false. YAML 1.1 reads them as booleans; YAML 1.2 and fedsweep read them as text."""
Picked = dict[str, int]
"""The index of the chosen level of each factor."""


@dataclass(frozen=True)
class Factorial:
    """Several factors with their levels. A factor may be active only for certain levels of other factors."""

    factors: Mapping[str, Sequence[Arm]]
    """The levels of each factor. A level is a part of an arm, such as `{"lora.rank": 4}`."""
    order: Sequence[str]
    """The names of the factors, each after the factors that it depends on."""
    active: Callable[[str, Arm], bool]
    """A function that returns whether a factor is active, given the levels of the factors before it in `order`."""

    def every(self) -> Iterator[Picked]:
        """Yield all arms of the full factorial design. Each arm is given as the chosen level of each active factor."""

        def below(place: int, picked: Picked, arm: Arm) -> Iterator[Picked]:
            if place == len(self.order):
                yield picked
            elif not self.active(key := self.order[place], arm):
                yield from below(place + 1, picked, arm)
            else:
                for number, level in enumerate(self.factors[key]):
                    yield from below(place + 1, {**picked, key: number}, {**arm, **level})

        return below(0, {}, {})

    def arm(self, picked: Picked) -> Arm:
        """Return the arm with the chosen levels. Its entries are in the order of the factors."""
        levels = (levels[picked[key]] for key, levels in self.factors.items() if key in picked)
        return {name: value for level in levels for name, value in level.items()}

    def full(self) -> list[Arm]:
        """Return all arms of the full factorial design. The last factor changes fastest."""
        found = sorted(self.every(), key=lambda picked: [picked.get(key, 0) for key in self.factors])
        return [self.arm(picked) for picked in found]

    def one_factor(self, baseline: Arm) -> list[Arm]:
        """Return the baseline, followed by all arms that change the level of one factor.

        All other factors keep the level of the baseline. If the new level makes a factor inactive, the arm has no value
        for the inactive factor.

        Raises:
            ValueError: The baseline lacks a factor or is not one of the arms.
        """
        start: dict[str, Arm] = {}
        for key in self.order:
            if not self.active(key, {name: value for level in start.values() for name, value in level.items()}):
                needs = "needs a `baseline` in which every axis is active"
                raise ValueError(f"`design` one_factor {needs}, but `space.{key}` is inactive in it")
            if absent := [name for name in self.factors[key][0] if name not in baseline]:
                needs = "needs a `baseline` with a value for every axis"
                raise ValueError(f"`design` one_factor {needs}, but `{absent[0]}` is missing in {arm_label(baseline)}")
            levels = [level for level in self.factors[key] if agrees(level, baseline)]
            if not levels:
                first = shown_mapping({**baseline, **self.factors[key][0]})
                raise ValueError(
                    f"`baseline` must be one of the arms, but {baseline} is not; write `baseline: {first}`"
                )
            start[key] = levels[0]
        others = [{**start, key: one} for key in self.factors for one in self.factors[key] if one is not start[key]]
        fixed = ({key: [chosen[key]] for key in self.factors} for chosen in (start, *others))
        return [arm for factors in fixed for arm in replace(self, factors=factors).full()]

    def pairs(self, deciding: set[str], most: int) -> list[Picked]:
        """Return arms that together contain every possible level of each factor, and every possible pair of levels.

        Each arm is built around a target: a level or a pair of levels that no earlier arm contains. Every other factor
        gets the level that adds the most missing pairs. If these levels make a factor of the target inactive, other
        levels of the factors in `deciding` are tried.

        Args:
            deciding: The factors that decide whether other factors are active.
            most: Largest number of arms to return. If it is too small, some pairs are left out before any single level.
        """
        levels = [(key, number) for key in self.order for number in range(len(self.factors[key]))]
        couples = [pair for pair in combinations(levels, 2) if pair[0][0] != pair[1][0]]
        missing = dict.fromkeys(map(frozenset, [*combinations(levels, 1), *couples]))

        def completed(place: int, picked: Picked, arm: Arm, target: Picked) -> Picked | None:
            if place == len(self.order):
                return picked
            key = self.order[place]
            if not self.active(key, arm):
                return None if key in target else completed(place + 1, picked, arm, target)

            def worth(number: int) -> int:
                return sum(frozenset([(key, number), one]) in missing for one in picked.items())

            numbers = [target[key]] if key in target else sorted(range(len(self.factors[key])), key=worth, reverse=True)
            for number in numbers if key in deciding else numbers[:1]:
                level = self.factors[key][number]
                if found := completed(place + 1, {**picked, key: number}, {**arm, **level}, target):
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
    """Return the arm of the full method, followed by arms that leave out components.

    If `subsets` is `one`, each of these arms leaves out one component. If it is `all`, there is an arm for each
    non-empty set of components.

    >>> ablation_arms(["method.cross", "method.quality"], "one")
    [{'without': []}, {'without': ['method.cross']}, {'without': ['method.quality']}]
    >>> ablation_arms(["method.cross", "method.quality"], "all")[3:]
    [{'without': ['method.cross', 'method.quality']}]
    """
    sizes = range(len(components) + 1 if subsets == "all" else 2)
    return [{ABLATED: list(chosen)} for size in sizes for chosen in combinations(components, size)]


def grid_size(levels: Iterable[int], components: int, subsets: Subsets) -> int:
    """Return the number of arms of a full factorial design, if no factor depends on another.

    Args:
        levels: The number of levels of each factor.
        components: The number of components that arms can leave out.
        subsets: Which sets of components arms leave out, as for `ablation_arms`.
    """
    return prod(levels) * (2**components if subsets == "all" else components + 1)


def too_many_arms(count: int) -> Iterator[str]:
    """Yield an error message if a full factorial design of `count` arms is too large to be listed."""
    if count > MOST_ARMS:
        yield (
            f"a grid can have at most {MOST_ARMS:,} arms, but this one has {count:,}; give fewer values, or sample "
            "arms with `search: {name: random, samples: 100}` and a `choice` for each axis"
        )


def left_out_values(ablate: Mapping[str, Json], known: Mapping[str, Json]) -> dict[str, Json]:
    """Return the value that switches off each component of `ablate`, by dotted name.

    `known` contains the values of the experiment. If a hyperparameter is a boolean in the experiment, `on` and `off`
    become true and false.

    >>> left_out_values({"method.cross": "off", "method.gate": "off"}, {"method.cross": True, "method.gate": "softmax"})
    {'method.cross': False, 'method.gate': 'off'}
    """
    return {
        name: SWITCH[value] if isinstance(known.get(name), bool) and value in ("on", "off") else value
        for name, value in ablate.items()
    }


def changes(
    arm: Mapping[str, Json], values: Mapping[str, Json], named: Mapping[str, Arm] | None = None
) -> dict[str, Json]:
    """Return the changes that an arm makes to the experiment, by dotted name.

    Args:
        arm: The arm. Hyperparameters that are not in the arm are not changed.
        values: The value that switches off each component, by dotted name.
        named: The changes of each named arm, by the arm's name.

    >>> changes({"lora.rank": 4, "without": ["method.cross"]}, {"method.cross": False, "method.quality": False})
    {'lora.rank': 4, 'method.cross': False}
    >>> changes({"arm": "FedAvg"}, {}, {"FedAvg": {"method": "ft", "optimizer.lr": 0.1}})
    {'method': 'ft', 'optimizer.lr': 0.1}
    """
    left_out, name = arm.get(ABLATED), arm.get(NAMED)
    own = dict((named or {})[name]) if isinstance(name, str) else {}
    axes = {name: value for name, value in arm.items() if name not in IN_WORDS}
    return own | axes | {name: values[name] for name in (left_out if isinstance(left_out, list) else [])}
