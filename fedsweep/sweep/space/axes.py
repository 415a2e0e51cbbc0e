"""Axes of a search space: the values or range of one hyperparameter, and the arms in which it is active."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import IN_WORDS, Arm, identity, shown_setting

KINDS = ("grid", "choice", "uniform", "loguniform", "integer", "loginteger")
STEPPED = ("uniform", "integer")
WHOLE = ("integer", "loginteger")
Resolve = Callable[[Arm], Mapping[str, Json]]
"""A function from an arm, or a part of one that need not be valid, to all values of its run by dotted name."""


class Axis(Config):
    """The values of one hyperparameter: exactly one kind of them."""

    grid: tuple[Json, ...] | None = Field(None, min_length=1, description="every value, crossed with other grids")
    choice: tuple[Json, ...] | None = Field(None, min_length=1, description="one of these, sampled")
    uniform: tuple[float, float] | None = Field(None, description="a number between these, sampled")
    loguniform: tuple[float, float] | None = Field(None, description="the same, uniform in its logarithm")
    integer: tuple[int, int] | None = Field(None, description="a whole number from the first to the second, sampled")
    loginteger: tuple[int, int] | None = Field(None, description="the same, uniform in its logarithm")
    step: float | None = Field(
        None, gt=0, description="of `uniform` or `integer`: the first bound and every so much above it, up to the last"
    )
    when: dict[str, Json] | None = Field(
        None,
        min_length=1,
        description="where the axis is there: dotted names, each with the value that it must have, or a list of values",
    )

    def _violations(self) -> Iterator[str]:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"each entry of `space` must have exactly one of {', '.join(KINDS)}, but one has {given or 'none'}"
            return
        kind, bounds, step = self.kind, self.bounds, self.step
        if bounds and not bounds[0] < bounds[1]:
            yield f"the bounds of `{kind}` must ascend, but they are {list(bounds)}"
        if bounds and kind.startswith("log") and bounds[0] <= 0:
            yield f"the bounds of `{kind}` must be positive, but they are {list(bounds)}"
        if len({repr(value) for value in self.values}) < len(self.values):
            yield f"the values of `{kind}` must differ, but they are {list(self.values)}"
        if step is not None:
            if bounds is None or kind not in STEPPED:
                yield f"a `step` is of {' or '.join(f'`{one}`' for one in STEPPED)}, but it stands at `{kind}`"
            elif kind == "integer" and not step.is_integer():
                yield f"the `step` of `integer` must be a whole number, but it is {step:g}"
            elif (Decimal(str(bounds[1])) - Decimal(str(bounds[0]))) % Decimal(str(step)):
                yield f"the `step` of `{kind}` must divide {bounds[1]:g} - {bounds[0]:g}, but it is {step:g}"
        for name, wanted in (self.when or {}).items():
            if wanted == []:
                yield f"`when` must give `{name}` a value or a list of values, but the list is empty"

    @property
    def kind(self) -> str:
        """The member of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def values(self) -> tuple[Json, ...]:
        """The values of a grid or a choice; empty for a range."""
        return self.grid or self.choice or ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest value of a range; None for a grid or a choice."""
        return self.uniform or self.loguniform or self.integer or self.loginteger

    @property
    def conditions(self) -> dict[str, tuple[Json, ...]]:
        """The accepted values by dotted name: the axis is active in an arm that has one of them for every name.

        >>> Axis(choice=(4, 8), when={"method.name": "fedbrick", "lora.rank": [1, 2]}).conditions
        {'method.name': ('fedbrick',), 'lora.rank': (1, 2)}
        """
        return {one: tuple(value) if isinstance(value, list) else (value,) for one, value in (self.when or {}).items()}

    def exact(self, drawn: Json) -> Json:
        """Return a drawn value without its rounding error.

        >>> Axis(uniform=(0.0, 0.5), step=0.05).exact(0.15000000000000002)
        0.15
        """
        if self.uniform is None or self.step is None or not isinstance(drawn, float):
            return drawn
        low, step = Decimal(str(self.uniform[0])), Decimal(str(self.step))
        return float(low + round((Decimal(str(drawn)) - low) / step) * step)

    def has(self, value: Json) -> bool:
        """Return whether the axis contains the value.

        >>> axis = Axis(integer=(2, 8), step=2)
        >>> axis.has(4), axis.has(5), axis.has(10), axis.has(4.0), Axis(choice=("a", [1])).has([1])
        (True, False, False, False, True)
        """
        if self.bounds is None:
            return identity(value) in map(identity, self.values)
        if isinstance(value, bool) or not isinstance(value, int if self.kind in WHOLE else (int, float)):
            return False
        low, high = self.bounds
        steps = 0.0 if self.step is None else (value - low) / self.step  # with or without its rounding error
        return low <= value <= high and abs(steps - round(steps)) < 1e-9

    def probes(self, asked: tuple[Json, ...] = ()) -> list[Json]:
        """Return the values to validate: all, or the ends of a range and the values that conditions ask for."""
        ends = self.values or self.bounds or ()
        return [*ends, *(one for one in asked if self.has(one) and not any(same(one, end) for end in ends))]

    def shown(self) -> str:
        """Return the kind and the values as text for people.

        >>> Axis(uniform=(0.0, 0.5), step=0.05).shown(), Axis(choice=("l0", None)).shown()
        ('uniform [0, 0.5], step 0.05', 'choice [l0, null]')
        """
        values = shown_setting(list(self.values or self.bounds or ()))
        return f"{self.kind} {values}{f', step {self.step:g}' if self.step is not None else ''}"

    def wanted(self) -> str:
        """Return the values of a sampled axis as a phrase of an error message."""
        if self.bounds is None:
            return f"one of {', '.join(map(str, self.values))}"
        steps = f" in steps of {self.step}" if self.step is not None else ""
        whole = " whole" if self.kind in WHOLE else ""
        return f"a{whole} number from {self.bounds[0]} to {self.bounds[1]}{steps}"

    def shown_conditions(self) -> str:
        """Return the conditions as text for people; empty if there are none.

        >>> Axis(choice=(4, 8), when={"method.name": ["fedra", "fedbrick"], "lora.dropout": 0.0}).shown_conditions()
        'method.name fedra or fedbrick, lora.dropout 0'
        """
        return ", ".join(condition(name, values) for name, values in self.conditions.items())


def condition(name: str, values: Iterable[Json]) -> str:
    """Return a condition of an axis as text for people."""
    return f"{name} {' or '.join(map(shown_setting, values))}"


def same(one: Json, other: Json) -> bool:
    """Return whether two values are equal in YAML, where `1` equals `1.0`, but not `true`.

    >>> same(1, 1.0), same(1, True), same([4, 4], [4, 4])
    (True, False, True)
    """
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def names_of(key: str) -> list[str]:
    """Return the dotted names that vary together on the axis under a key of `space`.

    >>> names_of("lora.rank"), names_of("method, optimizer")
    (['lora.rank'], ['method', 'optimizer'])
    """
    return [name.strip() for name in key.split(",")]


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
        self._known: dict[str, Mapping[str, Json]] = {}

    def active(self, key: str, arm: Arm) -> bool:
        """Return whether an axis is active in an arm, which must contain all active axes that it depends on."""
        if key not in self._axes or not self._axes[key].when:
            return True
        run = self.run(key, arm)
        return all(holds(name, values, run) for name, values in self._axes[key].conditions.items())

    def run(self, key: str, arm: Arm) -> Mapping[str, Json]:
        """Return the values of an arm's run that the conditions of the axis depend on, among others."""
        part = {name: value for name, value in arm.items() if name in self._decisive[key]}
        if (place := identity(part)) not in self._known:
            self._known[place] = self._resolve(part)
        return self._known[place]
