"""Arms in the plane of two values, one of which costs: points, the seeds' ranges, the border of the efficient ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import COLOURS, GREY
from fedsweep.report.figures.canvas import INK, logarithmic, spans_decades
from fedsweep.results.pareto import Mode, pareto_efficient

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes

LABELLED = 8
"""Arms that are named where there are more, all of them efficient but the baseline."""
EFFICIENT = COLOURS[0]
OTHER = "#8C8C8C"
RANGE: dict[str, Any] = {"linewidth": 1.2, "zorder": 1}


@dataclass(frozen=True)
class Point:
    """An arm: lowest, mean and highest over its finished seeds, of what costs (x) and of what is gained (y)."""

    x: tuple[float, float, float]
    y: tuple[float, float, float]
    label: str
    is_baseline: bool = False


def draw(points: Sequence[Point], modes: tuple[Mode, Mode], words: tuple[str, str]) -> "pictures.Figure":
    """Modes and words of y and x, in that order; efficient arms are numbered, named and joined by what they beat."""
    figure, axes = canvas.plain(6.4, 4.0)
    flags = pareto_efficient([(one.y[1], one.x[1]) for one in points], modes)
    kept = sorted((one for one, best in zip(points, flags, strict=True) if best), key=lambda one: (one.x[1], one.y[1]))
    beaten = sorted((one for one, best in zip(points, flags, strict=True) if not best), key=lambda one: one.x[1])
    across = [value for one in points for value in one.x]
    if spans_decades(across, decades=1):
        logarithmic(axes, axes.xaxis, across)
    named = [*kept, *beaten] if len(points) <= LABELLED else _some(kept, [one for one in beaten if one.is_baseline])
    for group, colour, size in ((beaten, OTHER if len(points) <= LABELLED else GREY, 5), (kept, EFFICIENT, 6)):
        for one in group:
            # With many arms the ranges of grey ones would be a thicket.
            if one in named:
                axes.plot([one.x[0], one.x[2]], [one.y[1]] * 2, color=colour, alpha=0.5, **RANGE)
                axes.plot([one.x[1]] * 2, [one.y[0], one.y[2]], color=colour, alpha=0.5, **RANGE)
        axes.plot(
            [one.x[1] for one in group], [one.y[1] for one in group], "o", color=colour, markersize=size, zorder=3
        )
    # From left to right x grows. Where less of x is better, the left arm's y holds until the next arm.
    where: Any = "post" if modes[1] == "min" else "pre"
    axes.step(
        [one.x[1] for one in kept], [one.y[1] for one in kept], where=where, color=EFFICIENT, linewidth=1.2, zorder=2
    )
    axes.set_xlabel(words[1])
    axes.set_ylabel(words[0])
    axes.margins(0.08)
    _name(axes, named)
    _legend(axes, bool(beaten), any(one.y[0] < one.y[2] or one.x[0] < one.x[2] for one in named))
    return figure


def _some(kept: Sequence[Point], baseline: Sequence[Point]) -> list[Point]:
    """Of many efficient arms the cheapest, the best and some evenly between them; the baselines in any case."""
    steps = min(LABELLED, len(kept)) - 1
    places = {round(step * (len(kept) - 1) / max(1, steps)) for step in range(steps + 1)}
    return [*(one for place, one in enumerate(kept) if place in places or one.is_baseline), *baseline[:LABELLED]]


def _name(axes: "Axes", named: Sequence[Point]) -> None:
    """Number the points, and write what the numbers stand for right of the axes."""
    for number, one in enumerate(named, 1):
        axes.annotate(
            str(number), (one.x[1], one.y[1]), (-5, 4), textcoords="offset points", ha="right", color=INK, fontsize=9
        )
    listed = "\n".join(f"{number}: {one.label}".replace("\n", " ") for number, one in enumerate(named, 1))
    axes.text(1.03, 1, listed, transform=axes.transAxes, va="top", color=INK, fontsize=9, linespacing=1.6)


def _legend(axes: "Axes", beaten: bool, ranges: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=EFFICIENT, marker="o", label="efficient")]
    if beaten:
        handles.append(Line2D([], [], color=OTHER, marker="o", linestyle="", label="other arms"))
    if ranges:
        handles.append(Line2D([], [], color=INK, alpha=0.5, linewidth=1.2, label="lowest to highest seed"))
    canvas.legend_below(axes, handles)
