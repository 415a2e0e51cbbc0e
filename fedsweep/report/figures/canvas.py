"""Where every figure is drawn: one style, and the same drawing as PNG and as SVG. Matplotlib loads when called."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes

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
