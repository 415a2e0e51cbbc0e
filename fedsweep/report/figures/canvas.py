"""Colours, labels, axes and file output for all figures. The Matplotlib style is in `look.mplstyle`."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsweep.report.arm_statistics import ArmStatistics, ArmTrials, recorded
from fedsweep.report.units_and_labels import arm_words, names, title
from fedsweep.results import SweepManifest
from fedsweep.results.arm_names import BASELINE, ELLIPSIS, abbreviates
from fedsweep.results.arms import is_accuracy
from fedsweep.results.tsne_files import blank

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis

DPI = 200
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette for all kinds of colour vision, without yellow, which is too pale on white."""
GREY = "#C4C4C4"
HIGHLIGHTED = 5  # number of coloured arms if there are more arms than colours; the other arms are grey
BAND = 0.16  # opacity of the band that shows the range of the seeds
LETTERS = 36  # characters per line in the label of an arm
Spread = tuple[float, float, float]
"""Lowest, mean and highest value over the finished seeds."""


class Drawing(NamedTuple):
    """A Matplotlib figure, with the heading and the explanation that the HTML report shows with it."""

    figure: "pictures.Figure"
    title: str
    """The heading."""
    reading: str
    """The explanation, in sentences."""


def best_places(arms: Sequence[ArmStatistics], mode: str, most: int) -> list[int]:
    """Return the indices of the baselines and of the best other arms, at most `most` in total, in ascending order.

    The best arms have the highest means if `mode` is `max`, and the lowest means if `mode` is `min`.
    """
    sign = -1 if mode == "max" else 1
    ranked = sorted(range(len(arms)), key=lambda place: (not arms[place].is_baseline, sign * (arms[place].mean or 0.0)))
    return sorted(ranked[:most])


@dataclass(frozen=True)
class Figure:
    """The PNG and SVG files of a `Drawing`, with its heading and explanation."""

    name: str
    """The file name without its suffix."""
    title: str
    reading: str
    png: Path
    svg: Path


def plain(width: float, height: float) -> tuple["pictures.Figure", "Axes"]:
    """Return a figure of `width` by `height` inches and its only axes, which have horizontal grid lines."""
    figure = blank(width, height)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    return figure, axes


def panels(count: int, columns: int, width: float, height: float) -> tuple["pictures.Figure", list["Axes"]]:
    """Return a figure with `count` panels, at most `columns` per row, and the axes of the panels.

    Each panel measures `width` by `height` inches.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = blank(width * columns, height * rows, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number) for number in range(1, count + 1)]


def legend_below(axes: "Axes", handles: list[Any]) -> None:
    """Add a legend of `handles` below the label of the x-axis, unless `handles` is empty."""
    if handles:
        columns = min(3, len(handles))
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8, ncols=columns)


def save(drawing: Drawing, folder: Path, name: str) -> Figure:
    """Save a drawing as `<name>.png` and `<name>.svg` in `folder`. Equal drawings give bit-identical files."""
    import matplotlib

    figure, title, reading = drawing
    made = Figure(name, title, reading, folder / f"{name}.png", folder / f"{name}.svg")
    # Versions and dates are left out, and ids in the SVG follow from the salt.
    without = {"Creator": None, "Date": None, "Format": None, "Type": None}
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # A character that the font lacks is a box in the PNG; in the SVG, fonts of the reader can show it.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing")
        figure.savefig(made.png, format="png", dpi=DPI, metadata={"Software": None})
        figure.savefig(made.svg, format="svg", dpi=DPI, metadata={"Title": title, **without})
    return made


def spans_decades(values: Sequence[float], decades: int = 2) -> bool:
    """Return whether all values are positive and span more than `decades` powers of ten."""
    return bool(values) and min(values) > 0 and max(values) > 10.0**decades * min(values)


def logarithmic_if_wide(axis: "XAxis | YAxis", values: Sequence[float]) -> None:
    """Make an axis logarithmic if the values are positive and span more than one power of ten.

    The ticks are at 1, 2 and 5 times each power of ten. If the values span three or more powers of ten, the ticks are
    only at the powers of ten.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not spans_decades(values, decades=1):
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    steps = (1.0, 2.0, 5.0) if max(values) < 1e3 * min(values) else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def colours(arms: Sequence[ArmStatistics], mode: str) -> list[str]:
    """Return the colour of each arm, which is the same in all figures of a report.

    If there are more arms than colours, only the baselines and the arms with the best means are coloured, and all other
    arms are grey. The best mean is the highest if `mode` is `max`, and the lowest if it is `min`.
    """
    if len(arms) <= len(COLOURS):
        return list(COLOURS[: len(arms)])
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * one.mean, place) for place, one in enumerate(arms) if one.mean is not None)
    best = [place for _, place in ranked[:HIGHLIGHTED]]
    kept = best + [place for place, one in enumerate(arms) if one.is_baseline and place not in best]
    chosen = dict(zip(kept, COLOURS, strict=False))
    return [chosen.get(place, GREY) for place in range(len(arms))]


def labels(manifest: SweepManifest, arms: Sequence[ArmStatistics], lines: int = 2, letters: int = LETTERS) -> list[str]:
    """Return each arm's label, such as `rank 4, lr 0.1`, wrapped and shortened as by `distinct`."""
    dotted = names(manifest, arms)
    words = [arm_words(one.arm.values, dotted) for one in arms]
    return distinct(words, [BASELINE * one.is_baseline for one in arms], lines, letters)


def distinct(words: Sequence[str], after: Sequence[str], lines: int, letters: int) -> list[str]:
    """Return `words` with the suffixes `after`, each wrapped to at most `lines` lines of `letters` characters.

    A label is shortened if necessary. If a shortened label fits several of the `words`, it has more lines.

    >>> distinct(["abcd efgh ijkl", "abcd mnop ijkl"], ["", ""], 1, 12)
    ['abcd efgh\\nijkl', 'abcd mnop\\nijkl']
    """
    found = []
    for own, end in zip(words, after, strict=True):
        for most in range(lines, lines + len(own) + 1):
            label = folded(own, most, letters, end)
            short = label.replace("\n", " ").removesuffix(end)
            if ELLIPSIS not in label or sum(abbreviates(short, other) for other in words) == 1:
                break
        found.append(label)
    return found


def dressed(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[tuple[ArmStatistics, str, str]]:
    """Return a tuple of arm, colour and label for each arm."""
    return list(zip(arms, colours(arms, manifest.mode), labels(manifest, arms), strict=True))


def folded(words: str, lines: int, letters: int, after: str = "") -> str:
    """Wrap `words`, followed by the suffix `after`, to at most `lines` lines of `letters` characters.

    If the text is too long, an ellipsis replaces the middle of `words`. The beginning and the end remain readable:
    entries between commas and words are left out as a whole, and only a single long word is cut.

    >>> folded("one  two three", 2, 8)
    'one two\\nthree'
    >>> folded("abcdefghijkl", 1, 8), folded("rank 8", 1, 20, " (baseline)")
    ('abcd…jkl', 'rank 8 (baseline)')
    >>> folded("skew (clients 4, heads 2, alpha 1), lr 1", 1, 32)
    'skew (clients 4, …, lr 1'
    """
    room = lines * (letters + 1)  # with the spaces at which lines end
    found: list[str] = []
    for shorter in _ever_shorter(" ".join(words.split())):
        if len(shorter + after) <= room:
            found = wrap(shorter + after, letters, break_on_hyphens=False)
            if len(found) <= lines:
                break
    return "\n".join(found)


def _ever_shorter(text: str) -> Iterator[str]:
    """Yield `text`, and then with ever fewer entries, words and characters around an ellipsis."""
    yield text
    for between, least in ((", ", 2), (" ", 2), ("", 1)):
        parts = text.split(between) if between else [*text]
        for keep in range(len(parts) - 1, least - 1, -1):
            last = keep // 2
            yield between.join([*parts[: keep - last], ELLIPSIS, *parts[len(parts) - last :]])


def scale_of(metric: str) -> int:
    """Return the factor by which figures multiply a metric's values: 100 for accuracies (percent), otherwise 1."""
    return 100 if is_accuracy(metric) else 1


def heading_of(metric: str, others: Mapping[str, str]) -> str:
    """Return a metric's title without the unit, for the heading of a figure; `others` are titles as for `title`."""
    if metric in others:
        return others[metric].rsplit(" (", 1)[0]
    return title(metric).removesuffix(" (%)").removesuffix(" (nats)")


def spread(values: Sequence[float]) -> Spread:
    """Return the lowest value, the mean and the highest value."""
    return min(values), sum(values) / len(values), max(values)


def over_seeds(arm: ArmTrials, objective: str, metric: str) -> dict[int, Spread]:
    """Return a dict from round to the lowest, mean and highest value of a metric over an arm's finished seeds.

    Accuracies are in percent. Only rounds that all finished seeds recorded are included.

    Args:
        arm: The arm with its trials.
        objective: The objective of the sweep. Trials whose last objective is not finite count as not finished.
        metric: The metric to return.
    """
    series = [recorded(trial.history, metric) for trial in arm.finished(objective).values()]
    shared = sorted(set.intersection(*map(set, series))) if series else []
    return {number: spread([scale_of(metric) * values[number] for values in series]) for number in shared}


def draw_over_seeds(axes: "Axes", one: ArmStatistics, points: Mapping[int, Spread], colour: str) -> None:
    """Draw the mean over an arm's seeds as a line, and the range from the lowest to the highest seed as a band.

    There is no band if the arm has only one seed or if `colour` is grey. A grey line is thinner than other lines.

    Args:
        axes: The axes to draw on.
        one: The arm.
        points: A dict from round to the lowest, mean and highest value, as `over_seeds` returns it.
        colour: The colour of the arm.
    """
    if not points:
        return
    low, middle, high = zip(*points.values(), strict=True)
    width, place = (0.9, 1) if colour == GREY else (1.8, 3)
    # Markers show which rounds were evaluated, unless all of them were.
    marker = "." if len(points) == 1 or len(points) <= max(points) - min(points) else ""
    axes.plot([*points], middle, color=colour, linewidth=width, zorder=place, marker=marker)
    if one.n > 1 and colour != GREY:
        axes.fill_between([*points], low, high, color=colour, alpha=BAND, linewidth=0, zorder=1)
