"""The second objective of a sweep, and Pareto efficiency. This module does not import torch."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedsweep.common.config import Config

Mode = Literal["max", "min"]


class Against(Config):
    """The second objective of a sweep, which is traded off against the first objective."""

    metric: str = Field(
        description="a metric after the last round; `megabytes/sent`, `bytes/up`, `bytes/down`, `seconds/round` "
        "and `simulated/seconds` are summed over all rounds instead"
    )
    mode: Mode = Field("min", description="whether larger (`max`) or smaller (`min`) values are better")


def pareto_efficient(points: Sequence[tuple[float, float]], modes: tuple[Mode, Mode]) -> list[bool]:
    """Return, for each point, whether it is Pareto-efficient.

    A point is efficient if no other point is at least as good in both values and better in one. For n points, the
    running time is O(n log n).

    >>> pareto_efficient([(0.9, 5.0), (0.8, 3.0), (0.7, 4.0), (0.9, 5.0)], ("max", "min"))
    [True, True, False, True]
    """
    signs = [1 if mode == "min" else -1 for mode in modes]
    costs = [(signs[0] * first, signs[1] * second) for first, second in points]
    efficient: set[tuple[float, float]] = set()
    best = float("inf")
    for first, second in sorted(set(costs)):
        if second < best:
            efficient.add((first, second))
            best = second
    return [cost in efficient for cost in costs]
