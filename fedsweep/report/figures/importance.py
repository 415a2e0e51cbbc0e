"""How much each hyperparameter matters: horizontal bars of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arms import COLOURS, folded
from fedsweep.report.figures.canvas import INK, RULE, Figure

MOST = 20
"""Bars: the largest shares."""
READING = "Longer bars matter more."


@dataclass(frozen=True)
class Share:
    """What a hyperparameter, or several together, explain of the whole: 0 to 1, with an interval where one is known."""

    name: str
    share: float
    low: float | None = None
    high: float | None = None


@canvas.style()
def draw(shares: Sequence[Share], title: str, path: Path, reading: str = READING) -> Figure:
    """The largest share on top, numbers at the bars' ends; one share at least."""
    shown = sorted(shares, key=lambda one: -one.share)[:MOST]
    figure = canvas.blank(6.0, 0.75 + 0.32 * len(shown))
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    places = range(len(shown))
    axes.barh(places, [100 * one.share for one in shown], height=0.62, color=COLOURS[0])
    for place, one in enumerate(shown):
        ends = [100 * end for end in (one.low, one.high) if end is not None]
        if len(ends) == 2:
            axes.plot(ends, [place, place], color=INK, linewidth=1.3, marker="|", markersize=6)
        right = max([100 * one.share, *ends])
        axes.annotate(
            f"{100 * one.share:.1f}%", (right, place), (5, 0), textcoords="offset points", va="center", color=INK,
            fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(places, [folded(one.name, 1, 46) for one in shown], fontsize=9)
    axes.tick_params(length=0)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, max(1.0, *(100 * max(one.share, one.high or 0.0) for one in shown)))
    axes.set_xlabel("Share (%)")
    return canvas.save(figure, path, title, reading)
