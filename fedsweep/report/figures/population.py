"""The figure of the objective and the hyperparameters by round in population-based training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ended, recorded
from fedsweep.report.figures.canvas import Drawing, logarithmic_if_wide, scale_of
from fedsweep.report.population_schedule import Lineage, best, played
from fedsweep.report.units_and_labels import title
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.tsne_files import blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS: dict[str, dict[str, Any]] = {
    "best": {"color": "#0072B2", "linewidth": 2.0, "zorder": 3},
    "others": {"color": "#9A9A9A", "linewidth": 1.0, "zorder": 2},
    "replaced": {
        **{"color": "#C9C9C9", "linewidth": 0.9, "linestyle": "--", "zorder": 1},
        **{"marker": "x", "markevery": [-1], "markersize": 4.5, "markeredgecolor": "#D55E00"},
    },
}
READING = (
    "The worst trials are replaced by copies of better trials, and the copies continue with new hyperparameter values. "
    "Each horizontal line of a hyperparameter spans the rounds that were trained with that value. A cross marks the "
    "end of a replaced trial."
)

WORDS = {"best": "best member", "others": "other members", "replaced": "replaced at the cross"}


def draw(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> Drawing | None:
    """Draw the objective and each hyperparameter by round; return None if no round was completed."""
    from matplotlib.lines import Line2D

    members = played(manifest, trials)
    if not members:
        return None
    by_key, winner = {one.plan.key: one for one in trials}, best(manifest, members)
    lines = [("replaced", Lineage.of(one, by_key)) for one in trials if ended(one) == "pruned"]
    lines += [("best" if one is winner else "others", one) for one in members]
    panels = len(manifest.varied) + 1
    figure = blank(6.4, 2.0 * panels, layout="constrained")
    top, *others = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    _draw_objective(top, manifest.metric, title(manifest.metric, manifest.titles), lines)
    for axes, name in zip(others, manifest.varied, strict=True):
        _draw_values(axes, name, lines)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    top.set_xlim(0, manifest.rounds)
    top.locator_params(axis="x", integer=True)
    figure.axes[-1].set_xlabel("Communication round (0: untuned model)", fontsize=9)
    figure.align_ylabels()
    present = {"others", *(look for look, _ in lines)}
    handles = [Line2D([], [], label=words, **LOOKS[look]) for look, words in WORDS.items() if look in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return Drawing(figure, "Schedules of the population", READING)


def _draw_objective(axes: "Axes", metric: str, label: str, lines: Sequence[tuple[str, Lineage]]) -> None:
    """Draw the objective by round for every member of the population and every replaced trial.

    A replaced trial is a trial that was stopped in favour of a copy of a better trial. If a replaced trial was itself
    such a copy, its line omits the rounds before the copy.
    """
    for look, one in lines:
        values = recorded(one.end.history, metric)
        since = one.end.plan.start.round if look == "replaced" and one.end.plan.start else 0
        rounds = [round for round in values if round >= since]
        axes.plot(rounds, [scale_of(metric) * values[round] for round in rounds], **LOOKS[look])
    axes.set_ylabel(label, fontsize=8)


def _draw_values(axes: "Axes", name: str, lines: Sequence[tuple[str, Lineage]]) -> None:
    """Draw the hyperparameter `name` by round as steps, for every member of the population and every replaced trial.

    A replaced trial is a trial that was stopped in favour of a copy of a better trial. The value that was used to train
    round r is drawn from r - 1 to r.
    """
    drawn = []
    for look, one in lines:
        parts = one.values(name)[-1:] if look == "replaced" else one.values(name)
        x = [edge for first, last, _ in parts for edge in (first - 1, last)]
        y = [value for *_, value in parts for _ in range(2)]
        axes.plot(x, y, **LOOKS[look])
        drawn += y
    logarithmic_if_wide(axes.yaxis, drawn)
    axes.set_ylabel(name, fontsize=8)
