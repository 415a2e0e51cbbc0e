"""Two objectives: which arms are efficient, said in a sentence and drawn as a front."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.arms import identity, is_accuracy
from fedsweep.front import Against, efficient
from fedsweep.history import over_the_run
from fedsweep.report import figures
from fedsweep.report.arms import mean
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import Units, arm_words, decimals, names, title
from fedsweep.store import SweepManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOLE_RUN = {
    "megabytes/sent": "Sent in the whole run (MB)",
    "bytes/up": "Sent by clients in the whole run (bytes)",
    "bytes/down": "Sent to clients in the whole run (bytes)",
    "seconds/round": "Time of all rounds (s)",
}
"""How an axis of what accumulates is called."""
UNITS = {"megabytes/sent": " MB", "bytes/up": " bytes", "bytes/down": " bytes", "seconds/round": " s"}
LABELLED = 8
"""Efficient arms that are named in the figure and in the sentence; all of them are marked in the table."""


def weighed(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> dict[str, float]:
    """By an arm's `identity` its mean over finished seeds of the second objective; arms without one are left out."""
    found = {}
    for one in arms if manifest.against else ():
        value = _second(one, manifest)
        if one.mean is not None and value is not None:
            found[identity(one.arm.values)] = value
    return found


def on_front(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """The efficient arms, by their means over finished seeds, in the order of the second objective."""
    second = weighed(manifest, arms)
    known = [(one, one.mean, second[identity(one.arm.values)]) for one in arms if identity(one.arm.values) in second]
    points = [(value, other) for _, value, other in known if value is not None]
    if manifest.against is None:
        return []
    kept = efficient(points, (manifest.mode, manifest.against.mode))
    best = [(other, place, one) for place, (one, _, other) in enumerate(known) if kept[place]]
    return [one for _, _, one in sorted(best, key=lambda entry: entry[:2])]


def finding(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Which arms are efficient, with both values; nothing where there is one objective or no finished arm."""
    best, second = on_front(manifest, arms), weighed(manifest, arms)
    if manifest.against is None or not best:
        return []
    dotted, units = names(manifest, arms), Units.of(manifest.metric, arms)
    percent = "%" if units.percent else ""
    unit = "%" if is_accuracy(manifest.against.metric) else UNITS.get(manifest.against.metric, "")
    said = [
        f"{arm_words(one.arm.values, dotted)} ({units.value(one.mean)}{percent}, "
        f"{shown(manifest.against, second[identity(one.arm.values)], second)}{unit})"
        for one in best[:LABELLED]
    ]
    more = f" and {len(best) - LABELLED} more" if len(best) > LABELLED else ""
    return [
        f"Efficient in {manifest.metric} against {manifest.against.metric}, {len(best)} of {len(second)} arms: "
        f"{'; '.join(said)}{more}."
    ]


def shown(against: Against, value: float | None, second: Mapping[str, float]) -> str:
    """A value of the second objective, with the decimals that suit all of them."""
    if value is None:
        return "-"
    scale = 100 if is_accuracy(against.metric) else 1
    return f"{scale * value:.{2 if scale == 100 else decimals(second.values())}f}"


def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> bool:
    """Write the first objective against the second, the efficient arms joined; False where there is nothing to draw."""
    second = weighed(manifest, arms)
    if manifest.against is None or not second:
        return False
    figure, axes = figures.empty_figure(6.4, 4.0)
    scale, across = (100 if is_accuracy(one) else 1 for one in (manifest.metric, manifest.against.metric))
    best = {identity(one.arm.values) for one in on_front(manifest, arms)}
    points = {
        identity(one.arm.values): (across * second[identity(one.arm.values)], scale * one.mean, one)
        for one in arms
        if one.mean is not None and identity(one.arm.values) in second
    }
    beaten = [point for key, point in points.items() if key not in best]
    kept = sorted((point for key, point in points.items() if key in best), key=lambda point: point[:2])
    axes.plot([x for x, _, _ in beaten], [y for _, y, _ in beaten], "o", color=figures.GREY, markersize=5)
    look: dict[str, Any] = {"color": figures.COLOURS[0], "markersize": 6}
    axes.plot([x for x, _, _ in kept], [y for _, y, _ in kept], "o", zorder=3, **look)
    _steps(axes, manifest, [(x, y) for x, y, _ in kept])
    dotted = names(manifest, arms)
    axes.set_xlabel(WHOLE_RUN.get(manifest.against.metric) or title(manifest.against.metric))
    axes.set_ylabel(title(manifest.metric))
    axes.margins(0.08)
    _name(axes, [(x, y, arm_words(one.arm.values, dotted)) for x, y, one in kept[:LABELLED]])
    _legend(axes, bool(beaten))
    figures.save(figure, path)
    return True


def _steps(axes: "Axes", manifest: SweepManifest, kept: Sequence[tuple[float, float]]) -> None:
    """The border of what the efficient arms beat: between two of them, the worse value of each objective."""
    # From left to right x grows. Where less of x is better, the left arm's y holds until the next arm.
    cheap = manifest.against is not None and manifest.against.mode == "min"
    axes.step(
        [x for x, _ in kept], [y for _, y in kept], where="post" if cheap else "pre", color=figures.COLOURS[0],
        linewidth=1.2, zorder=2,
    )  # fmt: skip


def _name(axes: "Axes", labels: Sequence[tuple[float, float, str]]) -> None:
    """Number the points, and write what the numbers stand for right of the axes."""
    for number, (x, y, _) in enumerate(labels, 1):
        axes.annotate(
            str(number), (x, y), (-5, 4), textcoords="offset points", ha="right", color=figures.INK, fontsize=9
        )
    listed = "\n".join(f"{number}  {label}" for number, (_, _, label) in enumerate(labels, 1))
    axes.text(1.03, 1, listed, transform=axes.transAxes, va="top", color=figures.INK, fontsize=9, linespacing=1.6)


def _legend(axes: "Axes", beaten: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=figures.COLOURS[0], marker="o", label="efficient")]
    if beaten:
        handles.append(Line2D([], [], color=figures.GREY, marker="o", linestyle="", label="other arms"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=8, ncols=len(handles)
    )


def _second(one: ArmStatistics, manifest: SweepManifest) -> float | None:
    """Mean over finished seeds; None if any lacks it, since a mean over other seeds would not compare."""
    metric = manifest.against.metric if manifest.against else manifest.metric
    ends = [over_the_run(trial.history, metric) for trial in one.arm.finished(manifest.metric).values()]
    return None if None in ends else mean(end for end in ends if end is not None)
