"""Axes that are there in some arms only: which are, and in which order that is known. No ray, no torch."""

from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import IN_WORDS, Arm, identity
from fedsweep.sweep.space.axes import Axis, names_of, same

Resolve = Callable[[Arm], Mapping[str, Json]]
"""All values of a run by dotted name, given the values of an arm, or of a part of one that need not be valid yet."""


def holds(name: str, values: Iterable[Json], run: Mapping[str, Json]) -> bool:
    """Whether a run has one of the values under a dotted name; without the name it has none."""
    return name in run and any(same(run[name], value) for value in values)


def asking_order(axes: Mapping[str, Axis]) -> list[str]:
    """The keys of the axes, each after those that its conditions depend on, otherwise as they stand.

    Raises:
        ValueError: they depend on one another in a circle.
    """
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
    """Whether the values on another axis can decide a condition of this one.

    `method` decides `method.name`, and every other name within it.
    """
    return any(name == given or name.startswith(f"{given}.") for name in axis.when or () for given in names_of(other))


class Conditions:
    """Whether the axes of a search space are there, given what their conditions depend on."""

    def __init__(self, axes: Mapping[str, Axis], resolve: Resolve) -> None:
        self._axes, self._resolve = axes, resolve
        self._decisive = {
            key: {name for one in axes if concerns(axis, one) for name in names_of(one)} | {*IN_WORDS}
            for key, axis in axes.items()
        }
        self._known: dict[tuple[str, str], Mapping[str, Json]] = {}

    def active(self, key: str, arm: Arm) -> bool:
        """Whether an axis is there; the arm holds the values of those that decide it, where they are there."""
        axis = self._axes.get(key)
        if axis is None or not axis.when:
            return True
        run = self.run(key, arm)
        return all(holds(name, values, run) for name, values in axis.conditions.items())

    def run(self, key: str, arm: Arm) -> Mapping[str, Json]:
        """Values of a run, right where conditions of the axis look at them."""
        part = {name: value for name, value in arm.items() if name in self._decisive[key]}
        place = key, identity(part)
        if place not in self._known:
            self._known[place] = self._resolve(part)
        return self._known[place]
