"""A forest plot: each arm's paired difference from its baseline, with its interval and the difference of each seed."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import COLOURS, Drawing, best_places
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.units_and_labels import Units, shown_p, shown_verdict
from fedsweep.results import SweepManifest
from fedsweep.results.arm_names import BASELINE
from fedsweep.results.arms import is_accuracy
from fedsweep.results.tsne_files import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 40  # greatest number of rows; the arms with the best means are shown
WIDEST = 6  # the axis is at most this many times as long as the median row needs, so that one row does not flatten all
READING_BY_LOOKS = (
    "Dots are means of the paired differences, arm minus baseline; lines are the 95% intervals by which the arms were "
    "judged, which are valid at whatever number of seeds a comparison ended. A filled dot is an arm that was decided "
    "to be higher or lower. Small grey dots are the differences of single seeds."
)
ROW, LINE = 0.3, 0.15
"""Height in inches of a row with a label of one line, and of each further line."""
BELOW = 0.09  # distance in inches between the line of an interval and the dots of single seeds
SEED = "#8C8C8C"
DETECTED, OPEN = COLOURS[0], "white"
Row = tuple[ArmStatistics, str, Comparison]
READING = (
    "Dots are means of the paired differences, arm minus baseline; lines are their 95% t intervals, which are not "
    "corrected for the number of arms. A filled dot is a significant difference: p is at most 0.05 after Holm's "
    "correction. Small grey dots are the differences of single seeds."
)


def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the difference of each arm from its baseline in a row; return None if no arm has a difference."""
    labels = canvas.labels(manifest, arms)
    rows = [
        (one, label, one.comparison)
        for one, label in zip(arms, labels, strict=True)
        if one.comparison is not None and one.comparison.difference is not None
    ]
    if not rows:
        return None
    shown = [rows[place] for place in best_places([one for one, *_ in rows], manifest.mode, MOST)]
    heights = [ROW + LINE * label.count("\n") for _, label, _ in shown]
    figure, axes = canvas.plain(5.2, 0.75 + sum(heights))
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=INK, linewidth=1.0, zorder=1)
    reach, clipped = _reach([_ends(row, arms, manifest) for row in shown])
    places = [sum(heights[:place]) + high / 2 for place, high in enumerate(heights)]
    for row, place in zip(shown, places, strict=True):
        _draw_row(axes, row, place, manifest, arms, reach)
    _write_numbers(axes, shown, places, manifest, arms)
    axes.set_yticks(places, [label for _, label, _ in shown], fontsize=9)
    axes.tick_params(axis="y", length=0, pad=10)  # the arrow of a row that is cut off reaches 3 points to the left
    axes.set(xlim=(-reach, reach), ylim=(sum(heights), 0), xlabel=_title(manifest, arms, labels))
    reading = READING if manifest.until_decided is None else READING_BY_LOOKS
    if clipped:
        reading += " An arrow marks a row that continues beyond the end of the axis."
    if hidden := len(rows) - len(shown):
        reading += f" Not shown: {hidden} arm{'s' * (hidden > 1)} with worse means."
    return Drawing(figure, "Differences from the baseline", reading)


def _ends(row: Row, arms: Sequence[ArmStatistics], manifest: SweepManifest) -> float:
    """Return the distance from 0 to the farthest end of a row, in the unit of the axis."""
    found = row[2]
    ends = [found.difference or 0.0, *(found.interval or ()), *_of_seeds(row, arms)]
    return float(canvas.scale_of(manifest.metric) * max(map(abs, ends)))


def _reach(ends: Sequence[float]) -> tuple[float, bool]:
    """Return the greatest value on the axis, and whether it leaves out a part of a row."""
    most = min(max(ends), WIDEST * median(ends)) if median(ends) else max(ends)
    return 1.06 * most or 1.0, most < max(ends)


def _of_seeds(row: Row, arms: Sequence[ArmStatistics]) -> list[float]:
    """Return the difference of each seed that both the arm and its baseline finished."""
    one, _, found = row
    (other,) = (arm for arm in arms if arm.key == one.counterpart)
    return [one.values[seed] - other.values[seed] for seed in found.seeds]


def _draw_row(
    axes: "Axes", row: Row, place: float, manifest: SweepManifest, arms: Sequence[ArmStatistics], reach: float
) -> None:
    found, scale = row[2], canvas.scale_of(manifest.metric)
    seeds = [scale * value for value in _of_seeds(row, arms)]
    axes.plot(seeds, [place + BELOW] * len(seeds), "o", color=SEED, markersize=3, zorder=2)
    if found.interval is not None:
        axes.plot([scale * end for end in found.interval], [place] * 2, color=DETECTED, linewidth=1.8, zorder=3)
    fill = DETECTED if found.verdict in ("higher", "lower") else OPEN
    difference = scale * (found.difference or 0.0)
    axes.plot([difference], [place], "o", color=DETECTED, markerfacecolor=fill, markersize=7, zorder=4)
    ends = [difference, *seeds, *(scale * end for end in found.interval or ())]
    tip: dict[str, Any] = {"color": DETECTED, "markersize": 6, "clip_on": False, "zorder": 3}
    if min(ends) < -reach:
        axes.plot([-reach], [place], "<", **tip)
    if max(ends) > reach:
        axes.plot([reach], [place], ">", **tip)


def _write_numbers(
    axes: "Axes", shown: Sequence[Row], places: Sequence[float], manifest: SweepManifest, arms: Sequence[ArmStatistics]
) -> None:
    """Write difference, interval and p-value of each row to the right of the axes, below a heading."""
    units = Units.of(manifest.metric, arms)
    fixed = manifest.until_decided is None
    columns = [("difference", 0.19), ("95% interval", 0.52), ("Holm p", 0.69) if fixed else ("verdict", 0.85)]
    across: Any = axes.get_yaxis_transform()
    for heading, right in columns:
        axes.annotate(
            heading, (1 + right, 0), (0, 3), xycoords=across, textcoords="offset points", ha="right", va="bottom",
            fontsize=8.5, color=INK, annotation_clip=False,
        )  # fmt: skip
    for (_, _, found), place in zip(shown, places, strict=True):
        last = shown_p(found.p_holm) if fixed else shown_verdict(manifest, found, units)
        cells = units.difference(found.difference), units.interval(found.interval), last
        for (_, right), cell in zip(columns, cells, strict=True):
            axes.text(
                1 + right, place, cell, transform=across, ha="right", va="center_baseline", fontsize=8.5, color=INK
            )


def _title(manifest: SweepManifest, arms: Sequence[ArmStatistics], labels: Sequence[str]) -> str:
    """Return the title of the axis, which names the baseline if there is only one."""
    baselines = [
        label.replace("\n", " ").removesuffix(BASELINE)
        for one, label in zip(arms, labels, strict=True)
        if one.is_baseline
    ]
    other = baselines[0] if len(baselines) == 1 else "the arm's baseline"
    unit = "percentage points, " if is_accuracy(manifest.metric) else ""
    better = "higher" if manifest.mode == "max" else "lower"
    return f"{canvas.heading_of(manifest.metric, manifest.titles)}: difference from\n{other} ({unit}{better} is better)"
