"""The figure of the objective by round, with one line for each arm and one for each trial that did not finish."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import isotonic_regression

from fedsweep.report.arm_statistics import ArmStatistics, ended, recorded
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import BAND, GREY, Drawing
from fedsweep.report.units_and_labels import title
from fedsweep.results import SweepManifest
from fedsweep.results.arms import is_accuracy
from fedsweep.results.tsne_files import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS: dict[str, dict[str, Any]] = {
    "pruned": {"linestyle": "--", "linewidth": 0.9, "marker": "x", "markersize": 5, "markeredgewidth": 1.3},
    "diverged": {"linestyle": ":", "linewidth": 1.1, "marker": "d", "markersize": 4},
    "failed": {"linestyle": ":", "linewidth": 1.1, "marker": "s", "markersize": 3.5},
    "unfinished": {"linestyle": ":", "linewidth": 1.1, "marker": "."},
}
"""Line styles of trials that did not finish."""
LINE = 0.058  # height of one line of a label, as a share of the axes


def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the objective by round; return None if no value of the objective is recorded.

    For each arm, a line shows the mean of the finished trials, and a band shows their lowest and highest values. Each
    trial that did not finish has its own line.
    """
    metric, bounded = manifest.metric, is_accuracy(manifest.metric)
    figure, axes = canvas.plain(6.4, 4.0)
    kinds, whole, others = set[str](), list[float](), list[float]()
    ends: list[tuple[float, float, str, str]] = []
    lost: list[tuple[str, str, str]] = []
    # The best arm is drawn last, so that its line is on top.
    for one, colour, label in reversed(canvas.dressed(manifest, arms)):
        points = canvas.over_seeds(one.arm, metric, metric)
        canvas.draw_over_seeds(axes, one, points, colour)
        if points:
            kinds |= {"grey"} if colour == GREY else {"mean", "band"} if one.n > 1 else {"finished"}
        loose = _draw_others(axes, one, metric, colour, kinds)
        if colour == GREY or not (points or loose):
            continue
        whole += [value for triple in points.values() for value in triple]
        others += [value for line in loose for _, value in line]
        if one.n:
            end = (max(points), points[max(points)][1]) if points else max(line[-1] for line in loose)
            ends.insert(0, (*end, label, colour))
        else:
            kind = ended(max(one.arm.trials, key=lambda trial: trial.last_round))
            lost.insert(0, (label, colour, kind if kind in LOOKS else "unfinished"))
    if not axes.lines:
        return None
    if not bounded and canvas.spans_decades(whole or others):
        axes.set_yscale("log")
    elif not bounded and (whole or others):
        # A diverged trial would flatten all other lines.
        axes.set_ylim(limits(whole, others))
    axes.set_xlabel("Communication round (0: untuned model)")
    axes.set_ylabel(title(metric, manifest.titles))
    axes.set_xlim(0, max(1, *(trial.last_round for one in arms for trial in one.arm.trials)))
    axes.locator_params(axis="x", integer=True)
    _label_lost(axes, lost, _label_ends(axes, ends))
    _legend(axes, kinds)
    return Drawing(figure, f"{canvas.heading_of(metric, manifest.titles)} by round", _reading(kinds, bounded))


def _draw_others(
    axes: "Axes", one: ArmStatistics, metric: str, colour: str, kinds: set[str]
) -> list[list[tuple[int, float]]]:
    """Draw a line for each of the arm's trials that did not finish, and return the points (round, value) of each line.

    The outcome of each drawn trial, such as `pruned`, is added to `kinds`. The legend of the figure has one entry for
    each item of `kinds`.
    """
    drawn = []
    for trial in one.arm.trials:
        kind, values = ended(trial), recorded(trial.history, metric)
        if values and kind != "finished":
            line = [(number, canvas.scale_of(metric) * value) for number, value in values.items()]
            layer = 1 if colour == GREY else 2
            axes.plot(*zip(*line, strict=True), color=colour, zorder=layer, markevery=[-1], **LOOKS[kind])
            kinds.add(kind)
            drawn.append(line)
    return drawn


def _reading(kinds: set[str], bounded: bool) -> str:
    said = []
    if "band" in kinds:
        said.append(
            "Lines are means over the finished seeds; bands span the lowest to the highest seed. Arms share their "
            "seeds and are compared in pairs, so overlapping bands do not mean that the arms are equal."
        )
    elif "mean" in kinds or "finished" in kinds:
        said.append("Each line is the only finished seed of an arm.")
    if lost := [kind for kind in LOOKS if kind in kinds]:
        listed = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
        said.append(f"{listed.capitalize()} trials are drawn individually and are not part of any mean.")
        if not bounded:
            said.append("Their values lie outside the figure if they are far from the values of finished trials.")
    if "grey" in kinds and kinds & {"mean", "finished"}:
        said.append("The best arms are coloured; the other arms are grey.")
    return " ".join(said)


def _legend(axes: "Axes", kinds: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Line2D | Patch] = {
        "mean": Line2D([], [], color=INK, linewidth=1.8, label="mean of finished seeds"),
        "band": Patch(color=INK, alpha=BAND, linewidth=0, label="lowest to highest seed"),
        "finished": Line2D([], [], color=INK, linewidth=1.8, label="single finished seed"),
        **{kind: Line2D([], [], color=INK, label=f"{kind} trial", **look) for kind, look in LOOKS.items()},
        "grey": Line2D([], [], color=GREY, linewidth=0.9, label="other arms"),
    }
    canvas.legend_below(axes, [handle for kind, handle in handles.items() if kind in kinds])


def _label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> float | None:
    """Write the label of each line to the right of the axes, so that the labels do not overlap.

    Each label is connected to the end of its line.

    Args:
        axes: The axes with the lines.
        ends: The x and y of each line's end, the label of the line, and its colour.

    Returns:
        The height of the lowest label as a share of the axes' height, or None if there are no labels.
    """
    if not ends:
        return None
    bottom, top = axes.get_ylim()
    inside = [(x, min(top, max(bottom, y)), label, colour) for x, y, label, colour in ends]
    shares = axes.transAxes.inverted().transform(axes.transData.transform([end[:2] for end in inside]))[:, 1]
    ordered = sorted(zip(shares, inside, strict=True), key=lambda pair: pair[0])
    heights = apart([share for share, _ in ordered], _gap([label for *_, label, _ in ends]))
    down = max(0.0, heights[-1] - 1)
    for (_, (x, y, label, colour)), height in zip(ordered, heights, strict=True):
        axes.annotate(
            label, (x, y), (1.05, height - down), xycoords="data", textcoords=axes.transAxes, color=INK, fontsize=9,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "relpos": (0, 0.5), "shrinkA": 2},
        )  # fmt: skip
    return heights[0] - down


def _label_lost(axes: "Axes", lost: Sequence[tuple[str, str, str]], lowest: float | None) -> None:
    """Write the labels of arms without a finished trial to the right of the axes.

    Each label is next to a short sample of its line style. Unlike other labels, it is not connected to the end of a
    line. If a line ended early, the connection would look like further rounds.

    Args:
        axes: The axes with the lines.
        lost: The label and the colour of each arm, and the outcome that determines its line style, such as `pruned`.
        lowest: The height of the lowest other label as a share of the axes' height, or None if there is none.
    """
    gap = _gap([label for label, *_ in lost])
    first = 1.0 if lowest is None else lowest - gap - LINE
    for place, (label, colour, kind) in enumerate(lost):
        height = first - place * gap
        look = LOOKS[kind] | {"color": colour, "markevery": [-1], "clip_on": False, "transform": axes.transAxes}
        axes.plot([1.025, 1.045], [height] * 2, **look)
        axes.text(1.06, height, label, transform=axes.transAxes, color=INK, fontsize=9, va="center")


def _gap(named: Sequence[str]) -> float:
    return LINE * max((label.count("\n") + 1 for label in named), default=1)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move the ascending `heights` as little as possible (least squares) so that they are at least `gap` apart."""
    steps = gap * np.arange(len(heights))
    return [float(height) for height in isotonic_regression(np.asarray(heights) - steps).x + steps]


def limits(whole: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows values of finished trials (`whole`) and of other trials (`others`).

    The axis shows all values in `whole`. The values in `others` can extend the axis at each end, but at most by the
    difference between the largest and the smallest value in `whole`. Finally, a margin of 5% of the axis's length is
    added at each end.

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
