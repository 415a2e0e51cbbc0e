"""Figures of the objective against a second objective, the megabytes sent or the simulated time; one point per arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ArmStatistics, same_images
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import COLOURS, GREY, Drawing, Spread, spread
from fedsweep.report.figures.point_labels import label_points
from fedsweep.report.units_and_labels import title
from fedsweep.results import SweepManifest
from fedsweep.results.history import ACCUMULATED, SIMULATED, over_the_run
from fedsweep.results.pareto import Against, pareto_efficient
from fedsweep.results.tsne_files import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COSTS = {
    "megabytes/sent": ("Sent in the whole run (MB)", "megabytes sent"),
    "bytes/up": ("Sent by clients in the whole run (bytes)", "bytes sent by clients"),
    "bytes/down": ("Sent to clients in the whole run (bytes)", "bytes sent to clients"),
    "seconds/round": ("Time of all rounds (s)", "time"),
    SIMULATED: ("Simulated time of the whole run (hours)", "simulated time"),
}
"""The axis title and the name in a heading, for metrics that accumulate over rounds."""
SENT = Against(metric="megabytes/sent", mode="min")
TIME = Against(metric=SIMULATED, mode="min")
UNITS = {SIMULATED: 3600}
"""The number by which the values of a metric are divided in these figures; 1 for all other metrics."""
ALIKE = 1e-9  # all costs count as equal if their relative spread is below this
READING = (
    "Points are means over the finished seeds. An arm is efficient if no other arm is at least as good in both means "
    "and better in one of them; differences between means are not tested. The stepped line joins the efficient arms; "
    "all other arms are on the worse side of the line."
)
LABELLED = 8  # if there are more arms, only efficient ones and the baselines are labelled
EFFICIENT = COLOURS[0]
OTHER = "#8C8C8C"
RANGE: dict[str, Any] = {"linewidth": 1.2, "zorder": 1}


@dataclass(frozen=True)
class Point:
    """The cost (`x`) and the objective (`y`) of an arm.

    Both `x` and `y` contain the lowest value, the mean and the highest value over the arm's finished seeds.
    """

    x: Spread
    y: Spread
    label: str
    arm: ArmStatistics


def draw_front(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the first objective against the second.

    Return None if there is no second objective, or if no arm has a finished trial.
    """
    return _draw(manifest, arms, manifest.against) if manifest.against else None


def draw_bytes(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the objective against the megabytes sent, or return None if the figure would not be informative.

    The figure is not informative if `draw_front` draws the same figure, if all arms send the same amount, if the
    objective is itself a cost such as bytes or seconds, or if the arms are tested on different images.
    """
    return _draw_cost(manifest, arms, SENT)


def draw_time(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the objective against the simulated hours of the run.

    Return None if the runs have no devices, or if the figure would not be informative, as for `draw_bytes`.
    """
    return _draw_cost(manifest, arms, TIME)


def _draw_cost(manifest: SweepManifest, arms: Sequence[ArmStatistics], cost: Against) -> Drawing | None:
    finished = [one for one in arms if one.n]
    costs = [point.x[1] for point in _points(manifest, finished, cost)]
    alike = not costs or max(costs) - min(costs) <= ALIKE * max(costs)
    seen = manifest.against == cost or manifest.metric in ACCUMULATED
    if alike or seen or not same_images(manifest.metric, finished):
        return None
    return _draw(manifest, finished, cost)


def _points(manifest: SweepManifest, arms: Sequence[ArmStatistics], against: Against) -> list[Point]:
    """Return a point for each arm. The cost of an arm is the value of the metric `against.metric`.

    An arm is left out if the cost of one of its finished seeds is missing, because its mean cost and its mean objective
    would then cover different seeds.
    """
    up, across = canvas.scale_of(manifest.metric), canvas.scale_of(against.metric) / UNITS.get(against.metric, 1)
    found = []
    for one, label in zip(arms, canvas.labels(manifest, arms), strict=True):
        costs = [over_the_run(trial.history, against.metric) for trial in one.arm.finished(manifest.metric).values()]
        known = [across * cost for cost in costs if cost is not None]
        if one.values and len(known) == len(costs):
            found.append(Point(spread(known), spread([up * value for value in one.values.values()]), label, one))
    return found


def _draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], against: Against) -> Drawing | None:
    """Draw a point per arm, and join the Pareto-efficient arms by a stepped line.

    Return None if there are no points.
    """
    points = _points(manifest, arms, against)
    if not points:
        return None
    figure, axes = canvas.plain(6.4, 4.0)
    flags = pareto_efficient([(one.y[1], one.x[1]) for one in points], (manifest.mode, against.mode))
    kept = sorted((one for one, best in zip(points, flags, strict=True) if best), key=lambda one: (one.x[1], one.y[1]))
    beaten = sorted((one for one, best in zip(points, flags, strict=True) if not best), key=lambda one: one.x[1])
    canvas.logarithmic_if_wide(axes.xaxis, [value for one in points for value in one.x])
    few = len(points) <= LABELLED
    named = [*kept, *beaten] if few else _ends_and_between(kept, [one for one in beaten if one.arm.is_baseline])
    for group, colour, size in ((beaten, OTHER if few else GREY, 5), (kept, EFFICIENT, 6)):
        for one in group:
            # The ranges of many grey arms would hide the other arms.
            if one in named:
                axes.plot([one.x[0], one.x[2]], [one.y[1]] * 2, color=colour, alpha=0.5, **RANGE)
                axes.plot([one.x[1]] * 2, [one.y[0], one.y[2]], color=colour, alpha=0.5, **RANGE)
        across, up = [one.x[1] for one in group], [one.y[1] for one in group]
        axes.plot(across, up, "o", color=colour, markersize=size, zorder=3)
    # If a lower x is better, the line stays at the y of an arm until the next arm to its right.
    where: Any = "post" if against.mode == "min" else "pre"
    # The last group is the efficient arms.
    border = axes.step(across, up, where=where, color=EFFICIENT, linewidth=1.2, zorder=2)
    label, cost = COSTS.get(against.metric, (title(against.metric, manifest.titles), against.metric))
    axes.set(xlabel=label, ylabel=title(manifest.metric, manifest.titles))
    axes.margins(0.08)
    axes.autoscale_view()
    label_points(axes, [(*_middle(one), one.label) for one in named], [_middle(one) for one in points], border)
    _legend(axes, bool(beaten), any(one.y[0] < one.y[2] or one.x[0] < one.x[2] for one in named))
    return Drawing(figure, f"{canvas.heading_of(manifest.metric, manifest.titles)} against {cost}", READING)


def _ends_and_between(kept: Sequence[Point], baseline: Sequence[Point]) -> list[Point]:
    """Select the points to label if there are too many points to label all of them.

    The selected points are the baselines, the first and the last point in `kept` (the Pareto-efficient arms), and
    evenly spaced points between these two.
    """
    steps = min(LABELLED, len(kept)) - 1
    places = {round(step * (len(kept) - 1) / max(1, steps)) for step in range(steps + 1)}
    return [*(one for place, one in enumerate(kept) if place in places or one.arm.is_baseline), *baseline[:LABELLED]]


def _middle(one: Point) -> tuple[float, float]:
    return one.x[1], one.y[1]


def _legend(axes: "Axes", beaten: bool, ranges: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=EFFICIENT, marker="o", label="efficient")]
    if beaten:
        handles.append(Line2D([], [], color=OTHER, marker="o", linestyle="", label="other arms"))
    if ranges:
        handles.append(Line2D([], [], color=INK, alpha=0.5, linewidth=1.2, label="lowest to highest seed"))
    canvas.legend_below(axes, handles)
