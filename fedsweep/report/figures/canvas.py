"""Common style, colours and labels of all figures, and their PNG and SVG files."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ArmStatistics, ArmTrials, recorded
from fedsweep.report.units_and_labels import arm_words, names, title
from fedsweep.results import SweepManifest
from fedsweep.results.arms import is_accuracy

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

INK = "#404040"
RULE = "#E6E6E6"
DPI = 200
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette for all kinds of colour vision, without yellow, which is too pale on white."""
GREY = "#C4C4C4"
HIGHLIGHTED = 5  # arms in colour if there are more arms than colours; the others are grey
BAND = 0.16  # opacity of the band that shows the range of the seeds
LETTERS = 36  # characters per line in the label of an arm
BASELINE = " (baseline)"
STYLE: dict[str, Any] = {
    # Browsers lack some of these fonts. DejaVu, by which all text is placed, is the widest.
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
    """A saved figure, with its heading and explanation on the page."""

    name: str
    """The file name without its suffix."""
    title: str
    """The heading."""
    reading: str
    """The explanation, in plain sentences."""
    png: Path
    svg: Path


@contextmanager
def style(**changes: Any) -> Iterator[None]:
    """Apply the common style, ignoring the user's matplotlibrc; usable as a decorator, `@style()`."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = STYLE | changes
        matplotlib.rcParams.update(settings)
        yield


def blank(width: float, height: float, layout: Any = None) -> "pictures.Figure":
    """Return an empty figure of this size in inches, without pyplot, which would keep it and open a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    figure = Picture(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def plain(width: float, height: float) -> tuple["pictures.Figure", "Axes"]:
    """Return a figure of this size in inches with one pair of axes in the plain style."""
    figure = blank(width, height)
    axes = figure.add_subplot()
    quiet(axes)
    return figure, axes


def panels(count: int, columns: int, width: float, height: float) -> tuple["pictures.Figure", list["Axes"]]:
    """Return a figure of `count` panels of this size in inches, at most `columns` per row, and their axes."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = blank(width * columns, height * rows, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number) for number in range(1, count + 1)]


def quiet(axes: "Axes") -> None:
    """Remove the top and right spines, and add pale horizontal grid lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def legend_below(axes: "Axes", handles: list[Any], columns: int = 3) -> None:
    """Add a legend below the label of the x-axis, if there are any handles."""
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=8,
            ncols=min(columns, len(handles)),
        )  # fmt: skip


def save(figure: "pictures.Figure", path: Path, title: str, reading: str) -> Figure:
    """Write a figure to `path` as PNG, and next to it as SVG; equal data give equal bytes."""
    made = Figure(path.stem, title, reading, path.with_suffix(".png"), path.with_suffix(".svg"))
    # Versions and dates are left out, and ids in the SVG follow from the salt.
    without = {"Creator": None, "Date": None, "Format": None, "Type": None}
    with style(**{"svg.hashsalt": made.name}), warnings.catch_warnings():
        # A letter that the font lacks is a box in the PNG and, by the reader's own fonts, itself in the SVG.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing")
        figure.savefig(made.png, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(made.svg, format="svg", dpi=DPI, bbox_inches="tight", metadata={"Title": title, **without})
    return made


def spans_decades(values: Iterable[float], decades: int = 2) -> bool:
    """Return whether all values are positive and span more than `decades` powers of ten."""
    listed = list(values)
    return bool(listed) and min(listed) > 0 and max(listed) > 10.0**decades * min(listed)


def logarithmic(axes: "Axes", axis: "Axis", values: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    steps = (1.0, 2.0, 5.0) if max(values) < 1e3 * min(values) else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def colours(arms: Sequence[ArmStatistics], mode: str) -> list[str]:
    """Return one colour per arm, the same in all figures; of many arms, all but the best and the baselines are grey."""
    if len(arms) <= len(COLOURS):
        return list(COLOURS[: len(arms)])
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * one.mean, place) for place, one in enumerate(arms) if one.mean is not None)
    best = [place for _, place in ranked[:HIGHLIGHTED]]
    kept = best + [place for place, one in enumerate(arms) if one.is_baseline and place not in best]
    chosen = dict(zip(kept, COLOURS, strict=False))
    return [chosen.get(place, GREY) for place in range(len(arms))]


def labels(manifest: SweepManifest, arms: Sequence[ArmStatistics], lines: int = 2, letters: int = LETTERS) -> list[str]:
    """Return the label of each arm, folded to at most `lines` lines of `letters` characters."""
    dotted = names(manifest, arms)
    return [folded(arm_words(one.arm.values, dotted), lines, letters, BASELINE * one.is_baseline) for one in arms]


def folded(words: str, lines: int, letters: int, after: str = "") -> str:
    """Fold text to at most `lines` lines of `letters` characters; cut its middle if too long: arms differ at the ends.

    >>> folded("one  two three", 2, 8)
    'one two\\nthree'
    >>> folded("abcdefghijkl", 1, 8), folded("rank 8", 1, 20, " (baseline)")
    ('abcd…jkl', 'rank 8 (baseline)')
    """
    plain = " ".join(words.split())
    for keep in range(len(plain) - 1, 0, -1):
        if len(found := wrap(plain + after, letters)) <= lines:
            break
        plain = f"{plain[: keep - keep // 2]}…{plain[len(plain) - keep // 2 :]}"
    return "\n".join(found)


def scale_of(metric: str) -> int:
    """Return the factor from a metric's values to its axis: 100 for accuracies, otherwise 1."""
    return 100 if is_accuracy(metric) else 1


def heading_of(metric: str) -> str:
    """Return a metric's title for a heading, without its unit."""
    return title(metric).removesuffix(" (%)").removesuffix(" (nats)")


def over_seeds(arm: ArmTrials, objective: str, metric: str) -> dict[int, tuple[float, float, float]]:
    """Return (lowest, mean, highest) over finished seeds for each round that all recorded, on the axis's scale."""
    scale = scale_of(metric)
    series = [recorded(trial.history, metric) for trial in arm.finished(objective).values()]
    shared = sorted(set.intersection(*map(set, series))) if series else []
    columns = {number: [scale * values[number] for values in series] for number in shared}
    return {number: (min(column), sum(column) / len(column), max(column)) for number, column in columns.items()}


def draw_over_seeds(axes: Any, points: Mapping[int, tuple[float, float, float]], colour: str, band: bool) -> None:
    """Draw the mean as a line and the range of the seeds as a band; grey arms get a thin line only."""
    rounds, grey = list(points), colour == GREY
    low, middle, high = ([points[number][part] for number in rounds] for part in range(3))
    width, place = (0.9, 1) if grey else (1.8, 3)
    axes.plot(rounds, middle, color=colour, linewidth=width, zorder=place, marker="." if len(rounds) == 1 else "")
    if band and not grey:
        axes.fill_between(rounds, low, high, color=colour, alpha=BAND, linewidth=0, zorder=1)
