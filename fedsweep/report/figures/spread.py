"""Where values and their labels find room: limits of an axis, logarithms, labels that do not overlap."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

DECADE = 10.0


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as keeps neighbours `gap` apart (least squares, by pooling neighbours)."""
    blocks: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        blocks.append((height - index * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, many), (high, more) = blocks.pop(-2), blocks.pop()
            blocks.append(((low * many + high * more) / (many + more), many + more))
    level = [start for start, count in blocks for _ in range(count)]
    return [start + index * gap for index, start in enumerate(level)]


def limits(whole: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Limits that show all of `whole`, and of the others what lies within its height above and below.

    >>> limits([0.0, 2.0], [3.0, 1e6])
    (-0.2, 4.2)
    """
    shown = whole or others
    low, high = min(shown), max(shown)
    height = high - low or abs(high) or 1.0
    low = min(low, max(min(others, default=low), low - height))
    high = max(high, min(max(others, default=high), high + height))
    margin = 0.05 * (high - low or height)
    return low - margin, high + margin


def spans_decades(values: Iterable[float], decades: int = 2) -> bool:
    """Whether positive values differ by more than that many powers of ten, and want a logarithm."""
    listed = list(values)
    return bool(listed) and min(listed) > 0 and max(listed) > DECADE**decades * min(listed)


def logarithmic(axes: "Axes", axis: "Axis", values: Sequence[float]) -> None:
    """A logarithm with plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    steps = (1.0, 2.0, 5.0) if max(values) < 1e3 * min(values) else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
