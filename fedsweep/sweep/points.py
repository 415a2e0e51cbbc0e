"""Points of a search space: whether they lie in its axes. No ray, no torch."""

from collections.abc import Mapping, Sequence

from fedsweep.common.errors import near
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, identity
from fedsweep.sweep.axis import Axis


def check_points(points: Sequence[Arm], axes: Mapping[str, Axis], samples: int) -> None:
    """Refuse points to try first that no sample could be.

    Raises:
        ValueError: a name or a value is not of the axes, or there are more points than samples.
    """
    if len(points) > samples:
        raise ValueError(f"`search.first` has {len(points)} points, but `search.samples` is {samples}")
    for place, point in enumerate(points):
        if not point:
            raise ValueError(f"`search.first.{place}` must give a value of `space`, but it is empty")
        for name, value in point.items():
            if name not in axes:
                raise ValueError(
                    f"`search.first.{place}` names `{name}`, which `space` does not vary{near(name, axes)}"
                )
            if not holds(axes[name], value):
                raise ValueError(f"`search.first.{place}`: `{name}` must be {wanted(axes[name])}, but it is {value}")


def holds(axis: Axis, value: Json) -> bool:
    """Whether a value is one that the axis can give.

    >>> holds(Axis(integer=(1, 8)), 4), holds(Axis(integer=(1, 8)), 4.5), holds(Axis(choice=("a", [1])), [1])
    (True, False, True)
    """
    if axis.choice is not None:
        return identity(value) in map(identity, axis.choice)
    whole, bounds = _range(axis)
    if bounds is None or not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
        return False
    steps = 0.0 if axis.step is None else (value - bounds[0]) / axis.step
    return bounds[0] <= value <= bounds[1] and abs(steps - round(steps)) < 1e-9


def wanted(axis: Axis) -> str:
    """What an axis gives, in words."""
    if axis.choice is not None:
        return f"one of {', '.join(map(str, axis.choice))}"
    whole, bounds = _range(axis)
    low, high = bounds or (None, None)
    steps = f" in steps of {axis.step}" if axis.step is not None else ""
    return f"a{' whole' if whole else ''} number from {low} to {high}{steps}"


def _range(axis: Axis) -> tuple[bool, tuple[float, float] | None]:
    """Whether its numbers are whole, and its bounds."""
    whole = axis.integer or axis.loginteger
    return whole is not None, whole or axis.uniform or axis.loguniform
