"""Figures in one style, saved as PNG and SVG; intervals and bands around means."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


INK = "#404040"
RULE = "#E6E6E6"
DPI = 200
STYLE: dict[str, Any] = {
    # What a browser has of these differs in width; DejaVu, by which all is placed, is the widest of them.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "svg.fonttype": "none",
    "text.parse_math": False,  # an arm may be called $5$
    "figure.constrained_layout.h_pad": 0.08,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.labelcolor": INK,
}


@dataclass(frozen=True)
class Figure:
    """A drawing on disk, and what a page says about it."""

    name: str
    """The files' name without its ending."""
    title: str
    """What it shows, as a heading."""
    reading: str
    """How to read it, in plain sentences."""
    png: Path
    svg: Path


@contextmanager
def style(**changes: Any) -> Iterator[None]:
    """The look of all figures, whatever the user's matplotlibrc says; also as a decorator, `@style()`."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = STYLE | changes
        matplotlib.rcParams.update(settings)
        yield


def blank(width: float, height: float, layout: Any = None) -> "pictures.Figure":
    """An empty figure of this size in inches. No pyplot: it would keep the figure and choose a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    figure = Picture(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def plain(width: float, height: float) -> tuple["pictures.Figure", "Axes"]:
    """A figure of this size in inches with one pair of plain axes."""
    figure = blank(width, height)
    axes = figure.add_subplot()
    quiet(axes)
    return figure, axes


def quiet(axes: "Axes") -> None:
    """Axes without a frame, with pale lines across."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def legend_below(axes: "Axes", handles: list[Any], columns: int = 3) -> None:
    """A legend under the label of the x-axis, if there is anything to explain."""
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=8,
            ncols=min(columns, len(handles)),
        )  # fmt: skip


def save(figure: "pictures.Figure", path: Path, title: str, reading: str) -> Figure:
    """Write a figure as `path`, a PNG, and as an SVG beside it. The same numbers give the same bytes."""
    made = Figure(path.stem, title, reading, path.with_suffix(".png"), path.with_suffix(".svg"))
    # Without versions and dates. In an SVG text stays text, and the ids follow from the salt.
    without = {"Creator": None, "Date": None, "Format": None, "Type": None}
    with style(**{"svg.hashsalt": made.name}), warnings.catch_warnings():
        # A letter that the font lacks is a box in the PNG and, by the reader's own fonts, itself in the SVG.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing")
        figure.savefig(made.png, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(made.svg, format="svg", dpi=DPI, bbox_inches="tight", metadata={"Title": title, **without})
    return made


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
