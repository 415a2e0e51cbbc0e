"""Conditional axes, which are active in some arms only. No ray, no torch."""

from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import IN_WORDS, Arm, identity
from fedsweep.sweep.space.axes import Axis, names_of, same

Resolve = Callable[[Arm], Mapping[str, Json]]
"""A function from an arm, or a part of one that need not be valid, to all values of its run by dotted name."""


def holds(name: str, values: Iterable[Json], run: Mapping[str, Json]) -> bool:
    """Return whether a run has one of the values under a dotted name."""
    return name in run and any(same(run[name], value) for value in values)


def asking_order(axes: Mapping[str, Axis]) -> list[str]:
    """Return the keys of the axes, each after those that it depends on; raise ValueError for circular conditions."""
    depends = {key: [one for one in axes if concerns(axis, one)] for key, axis in axes.items()}
    if circular := next((key for key in axes if key in depends[key]), None):
        raise ValueError(f"`when` of `space.{circular}` asks for what the axis itself gives")
    try:
        return list(TopologicalSorter(depends).static_order())
    except CycleError as error:
        first, *others = (f"`space.{key}`" for key in reversed(error.args[1]))
        circle = f"{first} depends on {', that on '.join(others)}"
        raise ValueError(f"conditions of `space` must not go in a circle, but {circle}") from None


def concerns(axis: Axis, other: str) -> bool:
    """Return whether a condition of the axis depends on `other`, as one on `method.name` depends on `method`."""
    return any(name == given or name.startswith(f"{given}.") for name in axis.when or () for given in names_of(other))


class Conditions:
    """The conditions of a search space's axes, decided for arms and parts of arms."""

    def __init__(self, axes: Mapping[str, Axis], resolve: Resolve) -> None:
        self._axes, self._resolve = axes, resolve
        self._decisive = {
            key: {name for one in axes if concerns(axis, one) for name in names_of(one)} | {*IN_WORDS}
            for key, axis in axes.items()
        }
        self._known: dict[tuple[str, str], Mapping[str, Json]] = {}

    def active(self, key: str, arm: Arm) -> bool:
        """Return whether an axis is active in an arm, which must contain all active axes that it depends on."""
        if key not in self._axes or not self._axes[key].when:
            return True
        run = self.run(key, arm)
        return all(holds(name, values, run) for name, values in self._axes[key].conditions.items())

    def run(self, key: str, arm: Arm) -> Mapping[str, Json]:
        """Return the values of an arm's run that the conditions of the axis depend on, among others."""
        part = {name: value for name, value in arm.items() if name in self._decisive[key]}
        place = key, identity(part)
        if place not in self._known:
            self._known[place] = self._resolve(part)
        return self._known[place]
