"""The figure of the best value so far against the number of samples, for arms that are tuned one by one.

The band is that of Lourie, Cho and He, "Show Your Work with Confidence: Confidence Bands for Tuning Curves" (2024). It
assumes nothing about the distribution of the values, and covers the whole curve at once.
"""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import Drawing
from fedsweep.report.units_and_labels import arm_words, title
from fedsweep.results import SweepManifest
from fedsweep.results.arms import Arm, is_accuracy
from fedsweep.results.pareto import Mode
from fedsweep.results.tsne_files import INK
from fedsweep.results.tuned_arms import Stage, sample_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIDENCE = 0.8
"""The probability that the whole band covers the true curve, as in the source."""
MOST = 9
"""Largest number of panels."""
FAR = 3.0
"""Samples are outside the panels if they are worse than the median by more than this multiple of the best's lead."""
CURVE, SO_FAR = canvas.COLOURS[:2]


class TuningCurve(NamedTuple):
    """The best value against the budget. Entry k - 1 belongs to a budget of k samples."""

    median: list[float]
    """The median of the best value over random draws of k samples, estimated from the recorded ones."""
    lower: list[float]
    """The lower end of the band; infinite where the samples give no bound."""
    upper: list[float]
    """The upper end of the band; infinite where the samples give no bound."""


def tuning_curve(untuned: float | None, drawn: Sequence[float | None], mode: Mode, bounded: bool) -> TuningCurve:
    """Estimate the best value of the objective after the untuned values and k - 1 random samples, for every k.

    The untuned values are not drawn, so the curve begins with their objective, without a band.

    Args:
        untuned: The objective at the untuned values; None if that trial has not finished.
        drawn: The values of the random samples; None for samples that have not finished, which count as worst.
        mode: Whether larger (`max`) or smaller (`min`) values are better.
        bounded: Whether values lie between 0 and 1.
    """
    from opda.nonparametric import EmpiricalDistribution

    low, high = (0.0, 1.0) if bounded else (-math.inf, math.inf)
    worst, best = (low, max) if mode == "max" else (high, min)
    values = np.array([worst if value is None else value for value in drawn])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal values make the band wider than necessary, but not wrong
        found = EmpiricalDistribution.confidence_bands(values, CONFIDENCE, a=low, b=high, method="ld_equal_tailed")
    budgets, minimize, start = range(1, len(drawn) + 1), mode == "min", worst if untuned is None else untuned
    curves = [one.quantile_tuning_curve(budgets, minimize=minimize) for one in found]
    of_cdf_below, middle, of_cdf_above = ([start, *(best(start, float(one)) for one in curve)] for curve in curves)
    return TuningCurve(middle, of_cdf_above, of_cdf_below)


class _Panel(NamedTuple):
    """The samples of one arm and the curves drawn from them.

    Samples are numbered from 0, the untuned values, in the order in which the arm tries them.
    """

    arm: Arm
    known: dict[int, float]
    """The value of each finished sample."""
    so_far: dict[int, float]
    """The best value by the number of samples that have been tried, in the order of the draws."""
    curve: TuningCurve


def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the best validation value against the number of samples, with one panel per arm.

    Return None unless the sweep tunes its arms and at least two samples of an arm have finished.
    """
    stage, metric = manifest.stage, manifest.metric
    if stage is None or stage.name != "tuning" or not (found := _panels(manifest, stage, arms)):
        return None
    shown, scale = found[:MOST], canvas.scale_of(metric)
    ends = _ends(shown, scale, manifest.mode)
    figure, panels = canvas.panels(len(shown), 2 if len(shown) == 4 else 3, 2.6, 2.2)
    dotted = [name for name in manifest.varied if name not in stage.names]
    for axes, one in zip(panels, shown, strict=True):
        _draw_panel(axes, one, scale, ends)
        axes.set_title(arm_words(one.arm, dotted), fontsize=8.5)
        axes.set_xlim(0.8, stage.samples + 0.2)
    figure.supxlabel("Samples tried", fontsize=9)
    figure.supylabel(title(metric, manifest.titles), fontsize=9)
    beyond = any(not ends[0] <= scale * value <= ends[1] for one in shown for value in one.known.values())
    return Drawing(figure, "Best value against the number of samples", _reading(len(found) - len(shown), beyond))


def _ends(panels: "Sequence[_Panel]", scale: float, mode: Mode) -> tuple[float, float]:
    """Return the ends of the vertical axis, which leaves out samples that are far worse than most, as of divergence.

    The axis always contains the best values of each panel and its curve.
    """
    sign = 1 if mode == "max" else -1  # so that larger is better
    values = np.array([sign * scale * value for one in panels for value in one.known.values()])
    curves = [sign * scale * value for one in panels for value in (*one.so_far.values(), *one.curve.median)]
    middle = float(np.median(values))
    near = values[values >= middle - FAR * (values.max() - middle)]
    shown = [*near, *(value for value in curves if math.isfinite(value))]
    margin = 0.08 * (max(shown) - min(shown)) or 0.01
    ends = float(sign * (min(shown) - margin)), float(sign * (max(shown) + margin))
    return min(ends), max(ends)


def _panels(manifest: SweepManifest, stage: Stage, arms: Sequence[ArmStatistics]) -> list[_Panel]:
    """Return the panel of each arm of which at least two samples have finished."""
    trials = [trial for one in arms for trial in one.arm.trials]
    found = []
    for arm, samples in sample_values(stage, manifest.metric, trials).values():
        untuned, *drawn = [samples[number][1] for number in sorted(samples)]
        known = {place: value for place, value in enumerate([untuned, *drawn]) if value is not None}
        if len(known) > 1:
            curve = tuning_curve(untuned, drawn, manifest.mode, is_accuracy(manifest.metric))
            found.append(_Panel(arm, known, _best_so_far(known, len(drawn) + 1, manifest.mode), curve))
    return found


def _draw_panel(axes: "Axes", one: _Panel, scale: float, ends: tuple[float, float]) -> None:
    """Draw the samples of an arm; `ends` are the ends of the vertical axis, in units of `scale`."""
    budgets = range(1, len(one.curve.median) + 1)
    lower, middle, upper = (
        [min(max(scale * value, ends[0]), ends[1]) for value in side]
        for side in (one.curve.lower, one.curve.median, one.curve.upper)
    )
    axes.fill_between(budgets, lower, upper, color=CURVE, alpha=canvas.BAND, linewidth=0)
    axes.plot(budgets, middle, color=CURVE, linewidth=1.2)
    axes.step(
        [*one.so_far], [scale * value for value in one.so_far.values()], where="post", color=SO_FAR, linewidth=1.2
    )
    points = {number + 1: scale * value for number, value in one.known.items()}
    inside = {number: value for number, value in points.items() if ends[0] <= value <= ends[1]}
    axes.plot([*inside], [*inside.values()], ".", color=INK, markersize=4)
    for end, marker in zip(ends, "v^", strict=True):
        beyond = [number for number, value in points.items() if (value < end if marker == "v" else value > end)]
        if beyond:
            axes.plot(beyond, [end] * len(beyond), marker, color=INK, markersize=4, clip_on=False)
    axes.set_ylim(ends)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=7.5)


def _best_so_far(known: dict[int, float], samples: int, mode: Mode) -> dict[int, float]:
    """Return the best value by the number of samples that have been tried, in the order in which they were drawn."""
    best, found = None, dict[int, float]()
    for number in range(samples):
        if number in known:
            better = max if mode == "max" else min
            best = known[number] if best is None else better(best, known[number])
        if best is not None:
            found[number + 1] = best
    return found


def _reading(hidden: int, beyond: bool) -> str:
    more = " Triangles: samples that are far worse." * beyond
    more += f" Not shown: {hidden} further arm{'s' * (hidden > 1)}." if hidden else ""
    return (
        "Points: the samples, as means over the seeds of tuning. Steps: the best of them so far. Curve: the median of "
        f"the best value if the samples were drawn in another way. Band: {CONFIDENCE:.0%} confidence for the whole "
        "curve, whatever the distribution of the values. A band that reaches the edge of a panel has no end there: so "
        "few samples give no bound." + more
    )
