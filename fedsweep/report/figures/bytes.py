"""The objective against what it costs: a second objective, or else the megabytes sent."""

from collections.abc import Sequence
from pathlib import Path

from fedsweep.report.figures import canvas, plane
from fedsweep.report.figures.arm_style import heading_of, labels, same_images, scale_of
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import title
from fedsweep.results import SweepManifest
from fedsweep.results.history import ACCUMULATED, over_the_run
from fedsweep.results.pareto import Against

WHOLE_RUN = {
    "megabytes/sent": "Sent in the whole run (MB)",
    "bytes/up": "Sent by clients in the whole run (bytes)",
    "bytes/down": "Sent to clients in the whole run (bytes)",
    "seconds/round": "Time of all rounds (s)",
}
"""How an axis of what accumulates is called."""
COSTS = {
    "megabytes/sent": "megabytes sent",
    "bytes/up": "bytes sent by clients",
    "bytes/down": "bytes sent to clients",
    "seconds/round": "time",
}
"""The same in a heading."""
SENT = Against(metric="megabytes/sent", mode="min")
ALIKE = 1e-9
"""Relative spread of means below which all arms cost the same."""
READING = (
    "Points are means over the finished seeds. Efficient: no other arm is as good in both means and better in one; "
    "said of the means, without a test. The line borders what the efficient arms beat."
)


@canvas.style()
def draw_front(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """The first objective against the second; None where there is one objective, or no finished arm."""
    return _draw(manifest, arms, manifest.against, path) if manifest.against else None


@canvas.style()
def draw_bytes(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """The objective against the megabytes sent.

    None where that is the front of two objectives already, where all arms send the same, and where the objective is a
    cost itself or is over other images in some arms.
    """
    finished = [one for one in arms if one.n]
    shown = [point.x[1] for point in _points(manifest, finished, SENT)]
    alike = not shown or max(shown) - min(shown) <= ALIKE * max(shown)
    seen = manifest.against == SENT or manifest.metric in ACCUMULATED
    if alike or seen or not same_images(manifest.metric, finished):
        return None
    return _draw(manifest, finished, SENT, path)


def _draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], against: Against, path: Path) -> Figure | None:
    points = _points(manifest, arms, against)
    if not points:
        return None
    words = title(manifest.metric), WHOLE_RUN.get(against.metric) or title(against.metric)
    figure = plane.draw(points, (manifest.mode, against.mode), words)
    heading = f"{heading_of(manifest.metric)} against {COSTS.get(against.metric) or against.metric}"
    return canvas.save(figure, path, heading, READING)


def _points(manifest: SweepManifest, arms: Sequence[ArmStatistics], against: Against) -> list[plane.Point]:
    """Arms whose finished seeds all have both values, since means over other seeds would not compare."""
    up, across = scale_of(manifest.metric), scale_of(against.metric)
    found = []
    for one, label in zip(arms, labels(manifest, arms), strict=True):
        trials = one.arm.finished(manifest.metric).values()
        costs = [value for trial in trials if (value := over_the_run(trial.history, against.metric)) is not None]
        if one.values and len(costs) == len(trials):
            x, y = [across * cost for cost in costs], [up * value for value in one.values.values()]
            found.append(plane.Point(_range(x), _range(y), label, one.is_baseline))
    return found


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), sum(values) / len(values), max(values)
