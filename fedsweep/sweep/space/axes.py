"""The axes of a search space. An axis defines the values or the range of a hyperparameter.

An axis may have conditions, so that it is active only for certain values of other hyperparameters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import IN_WORDS, Arm, identity, same, shown_setting

KINDS = ("grid", "choice", "uniform", "loguniform", "integer", "loginteger")
STEPPED = ("uniform", "integer")
WHOLE = ("integer", "loginteger")
Resolve = Callable[[Arm], Mapping[str, Json]]
"""A function that returns all values of an arm's run by dotted name. The arm may be incomplete or invalid."""


class Axis(Config):
    """The values of one hyperparameter, given by exactly one of the fields in `KINDS`, such as `grid` or `uniform`."""

    grid: tuple[Json, ...] | None = Field(
        None, min_length=1, description="values of a grid; each combination with the values of other grids is an arm"
    )
    choice: tuple[Json, ...] | None = Field(None, min_length=1, description="values from which the search samples one")
    uniform: tuple[float, float] | None = Field(None, description="lower and upper bound of a sampled number")
    loguniform: tuple[float, float] | None = Field(
        None, description="lower and upper bound of a number that is sampled on a logarithmic scale"
    )
    integer: tuple[int, int] | None = Field(None, description="smallest and largest value of a sampled whole number")
    loginteger: tuple[int, int] | None = Field(
        None, description="smallest and largest value of a whole number that is sampled on a logarithmic scale"
    )
    step: float | None = Field(
        None,
        gt=0,
        description="distance between neighbouring values of `uniform` or `integer`; it must divide the range evenly",
    )
    when: dict[str, Json] | None = Field(
        None,
        min_length=1,
        description="conditions under which the axis is active: dotted names, each with one value or a list of values",
    )

    def _violations(self) -> Iterator[str]:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = f"{', '.join(KINDS[:-1])} and {KINDS[-1]}"
            yield f"each entry of `space` must have exactly one of {kinds}, but one has {' and '.join(given) or 'none'}"
            return
        kind, bounds, step = self.kind, self.bounds, self.step
        if bounds and not bounds[0] < bounds[1]:
            yield f"the bounds of `{kind}` must be in ascending order, but they are {list(bounds)}"
        if bounds and kind.startswith("log") and bounds[0] <= 0:
            yield f"the bounds of `{kind}` must be positive, but they are {list(bounds)}"
        if len({repr(value) for value in self.values}) < len(self.values):
            yield f"the values of `{kind}` must be distinct, but they are {list(self.values)}"
        if step is not None:
            if bounds is None or kind not in STEPPED:
                yield f"`step` needs {' or '.join(f'`{one}`' for one in STEPPED)}, but it is given with `{kind}`"
            elif kind == "integer" and not step.is_integer():
                yield f"the `step` of `integer` must be a whole number, but it is {step:g}"
            elif (Decimal(str(bounds[1])) - Decimal(str(bounds[0]))) % Decimal(str(step)):
                ends = f"from {bounds[0]:g} to {bounds[1]:g}"
                yield f"the `step` of `{kind}` must divide the range {ends} evenly, but it is {step:g}"
        for name, wanted in (self.when or {}).items():
            if wanted == []:
                yield f"`when` must list at least one value of `{name}`, but the list is empty"

    @property
    def kind(self) -> str:
        """The name of the field that gives the values, e.g. `grid` or `uniform`."""
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
        """The accepted values of each dotted name in `when`. The axis is active in an arm that meets all conditions.

        >>> Axis(choice=(4, 8), when={"method.name": "fedbrick", "lora.rank": [1, 2]}).conditions
        {'method.name': ('fedbrick',), 'lora.rank': (1, 2)}
        """
        return {one: tuple(value) if isinstance(value, list) else (value,) for one, value in (self.when or {}).items()}

    def exact(self, drawn: Json) -> Json:
        """Remove the floating-point error from a value that was sampled in steps.

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
        steps = 0.0 if self.step is None else (value - low) / self.step  # whole, apart from rounding errors
        return low <= value <= high and abs(steps - round(steps)) < 1e-9

    def probes(self, asked: tuple[Json, ...] = ()) -> list[Json]:
        """Return the values to validate before a search: all listed values, or the two ends of a range.

        Args:
            asked: Values that the conditions of other axes require. They are added if the axis contains them.
        """
        ends = self.values or self.bounds or ()
        return [*ends, *(one for one in asked if self.has(one) and not any(same(one, end) for end in ends))]

    def shown(self) -> str:
        """Return the kind and the values of the axis as readable text.

        >>> Axis(uniform=(0.0, 0.5), step=0.05).shown(), Axis(choice=("l0", None)).shown()
        ('uniform [0, 0.5], step 0.05', 'choice [l0, null]')
        """
        values = shown_setting(list(self.values or self.bounds or ()))
        return f"{self.kind} {values}{f', step {self.step:g}' if self.step is not None else ''}"

    def wanted(self) -> str:
        """Describe the valid values of a sampled axis for an error message, e.g. `a number from 0.0 to 0.5`."""
        if self.bounds is None:
            return f"one of {', '.join(map(str, self.values))}"
        steps = f" in steps of {self.step}" if self.step is not None else ""
        whole = " whole" if self.kind in WHOLE else ""
        return f"a{whole} number from {self.bounds[0]} to {self.bounds[1]}{steps}"

    def shown_conditions(self) -> str:
        """Return the conditions as readable text, or an empty string if there are none.

        >>> Axis(choice=(4, 8), when={"method.name": ["fedra", "fedbrick"], "lora.dropout": 0.0}).shown_conditions()
        'method.name is fedra or fedbrick, lora.dropout is 0'
        """
        return ", ".join(condition(name, values) for name, values in self.conditions.items())


def condition(name: str, values: Iterable[Json]) -> str:
    """Return the condition that `name` has one of the values, as readable text, e.g. `lora.rank is 4 or 8`."""
    return f"{name} is {' or '.join(map(shown_setting, values))}"


def without_kind(content: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return each axis of a search space file that has values but no kind, as it must be written, by its key.

    >>> without_kind({"space": {"lora.rank": [2, 8], "lora.dropout": {"grid": [0, 0.1]}}})
    {'lora.rank': {'grid': [2, 8]}}
    """
    axes, search = content.get("space"), content.get("search")
    name = search.get("name") if isinstance(search, dict) else search
    kind = "choice" if name in ("tpe", "random") else "grid"
    return {
        key: {kind: value if isinstance(value, list) else [value]}
        for key, value in (axes if isinstance(axes, dict) else {}).items()
        if not isinstance(value, dict) and value not in (None, [])
    }


def names_of(key: str) -> list[str]:
    """Return the dotted names in a key of `space`. Names that are separated by commas vary together on one axis.

    >>> names_of("lora.rank"), names_of("method, optimizer")
    (['lora.rank'], ['method', 'optimizer'])
    """
    return [name.strip() for name in key.split(",")]


def below(name: str, names: Collection[str]) -> bool:
    """Return whether `name` is one of the dotted names or lies below one, as `method.heads` lies below `method`."""
    return any(name == one or name.startswith(f"{one}.") for one in names)


def valued(key: str, value: Json) -> Arm:
    """Return the part of an arm that the axis `key` sets to `value`. A key of several names takes a list of values."""
    names = names_of(key)
    return dict(zip(names, value, strict=True)) if len(names) > 1 and isinstance(value, list) else {key: value}


def holds(name: str, values: Iterable[Json], run: Mapping[str, Json]) -> bool:
    """Return whether a run has the hyperparameter `name` with one of the values."""
    return name in run and any(same(run[name], value) for value in values)


def asking_order(axes: Mapping[str, Axis]) -> list[str]:
    """Return the keys of the axes, sorted so that each axis comes after the axes on which its conditions depend.

    Raises:
        ValueError: The conditions are circular.
    """
    depends = {key: [one for one in axes if concerns(axis, one)] for key, axis in axes.items()}
    if circular := next((key for key in axes if key in depends[key]), None):
        raise ValueError(f"`when` of `space.{circular}` must not depend on the axis itself")
    try:
        return list(TopologicalSorter(depends).static_order())
    except CycleError as error:
        first, *others = (f"`space.{key}`" for key in reversed(error.args[1]))
        circle = f"{first} depends on {', which depends on '.join(others)}"
        raise ValueError(f"the conditions of `space` must not be circular, but {circle}") from None


def concerns(axis: Axis, other: str) -> bool:
    """Return whether a condition of the axis depends on the axis with the key `other`.

    A condition on `method.name`, for example, depends on the axis `method`.
    """
    return any(name == given or name.startswith(f"{given}.") for name in axis.when or () for given in names_of(other))


class Conditions:
    """The conditions of all axes of a search space, which can be evaluated for complete and incomplete arms."""

    def __init__(self, axes: Mapping[str, Axis], resolve: Resolve) -> None:
        self._axes, self._resolve = axes, resolve
        self._decisive = {
            key: {name for one in axes if concerns(axis, one) for name in names_of(one)} | {*IN_WORDS}
            for key, axis in axes.items()
        }
        self._known: dict[str, Mapping[str, Json]] = {}

    def active(self, key: str, arm: Arm) -> bool:
        """Return whether the axis `key` is active in an arm.

        The arm must already contain all active axes on which this axis depends.
        """
        if key not in self._axes or not self._axes[key].when:
            return True
        run = self.run(key, arm)
        return all(holds(name, values, run) for name, values in self._axes[key].conditions.items())

    def run(self, key: str, arm: Arm) -> Mapping[str, Json]:
        """Return the hyperparameter values on which the conditions of the axis `key` are evaluated, by dotted name.

        Values of the arm that do not affect these conditions are replaced by the experiment's values.
        """
        part = {name: value for name, value in arm.items() if name in self._decisive[key]}
        if (place := identity(part)) not in self._known:
            self._known[place] = self._resolve(part)
        return self._known[place]
