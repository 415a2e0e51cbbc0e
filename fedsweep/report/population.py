"""A population's hyperparameters by round: the schedule of each member, as a table, a figure and a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsweep.arms import is_accuracy
from fedsweep.embedding.picture import INK, blank, to_png
from fedsweep.report.arms import ended, final, recorded
from fedsweep.report.wording import title
from fedsweep.store import SweepManifest, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POPULATION = "pbt"
"""The scheduler whose trials go on from one another."""
LOOKS: dict[str, dict[str, Any]] = {
    "best": {"color": "#0072B2", "linewidth": 2.0, "zorder": 3},
    "others": {"color": "#9A9A9A", "linewidth": 1.0, "zorder": 2},
    "replaced": {
        **{"color": "#C9C9C9", "linewidth": 0.9, "linestyle": "--", "zorder": 1},
        **{"marker": "x", "markevery": [-1], "markersize": 4.5, "markeredgecolor": "#D55E00"},
    },
}
DECADE = 10.0
"""Values that span more are drawn over a logarithm."""


@dataclass(frozen=True)
class Lineage:
    """A trial with all that it goes on from, the first one first."""

    trials: tuple[TrialRecord, ...]

    @classmethod
    def of(cls, trial: TrialRecord, by_key: Mapping[str, TrialRecord]) -> "Lineage":
        """That of a trial; as far as its ancestors are known."""
        found = [trial]
        while (start := found[-1].plan.start) is not None and start.key in by_key:
            found.append(by_key[start.key])
        return cls(tuple(reversed(found)))

    @property
    def end(self) -> TrialRecord:
        """The trial itself, whose history is that of the whole lineage."""
        return self.trials[-1]

    def segments(self) -> list[tuple[int, int, TrialRecord]]:
        """First and last round that each trial of the lineage played, from round 1 on, if it played any."""
        firsts = [one.plan.start.round + 1 if one.plan.start else 1 for one in self.trials]
        lasts = [*(first - 1 for first in firsts[1:]), self.end.last_round]
        found = zip(firsts, lasts, self.trials, strict=True)
        return [(first, last, one) for first, last, one in found if last >= first]

    def values(self, name: str) -> list[tuple[int, int, float]]:
        """First and last round, and the value of a hyperparameter there."""
        return [
            (first, last, float(value))
            for first, last, one in self.segments()
            if isinstance(value := one.plan.arm.get(name), int | float)
        ]


def lineages(trials: Sequence[TrialRecord]) -> list[Lineage]:
    """Those of all members, in the order of the plan: of every trial but those that were replaced where they stood."""
    by_key = {one.plan.key: one for one in trials}
    return [Lineage.of(one, by_key) for one in trials if ended(one) != "pruned"]


def best(manifest: SweepManifest, found: Sequence[Lineage]) -> Lineage | None:
    """The finished one with the best last value of the objective."""
    sign = 1 if manifest.mode == "max" else -1
    ends = [(final(one.end, manifest.metric), one) for one in found if ended(one.end) == "finished"]
    ranked = [(sign * value, -one.end.plan.number, one) for value, one in ends if value is not None]
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def table(manifest: SweepManifest, found: Sequence[Lineage]) -> pd.DataFrame:
    """A row for every member and round: which trial played it, its hyperparameters, and the objective after it."""
    rows = []
    for lineage in found:
        objective = recorded(lineage.end.history, manifest.metric)
        for first, last, one in lineage.segments():
            for round in range(first, last + 1):
                names = {"member": lineage.end.plan.number, "round": round, "trial": one.plan.number}
                rows.append({**names, **one.plan.arm, manifest.metric: objective.get(round)})
    return pd.DataFrame(rows, columns=["member", "round", "trial", *manifest.varied, manifest.metric])


def sentences(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[str]:
    """How many trials go on from others, and the schedule of the best one; nothing where there is no population."""
    if manifest.scheduler != POPULATION:
        return []
    found = lineages(trials)
    goes_on = sum(one.plan.start is not None for one in trials)
    said = [
        f"Population: {goes_on} of {len(trials)} trials go on from another one's state with other values; an arm's "
        "values are those of its last rounds, and population.csv has those of every round."
    ]
    if (one := best(manifest, found)) is not None and len(one.trials) > 1:
        schedules = [
            f"{name.rsplit('.', 1)[-1]} "
            + ", ".join(f"{value:.4g} from {first}" for first, _, value in one.values(name))
            for name in manifest.varied
        ]
        said.append(f"The best member by round: {'; '.join(schedules)}.")
    return said


def write_population(manifest: SweepManifest, trials: Sequence[TrialRecord], csv: Path, picture: Path) -> bool:
    """Write the table and the figure of a population; say whether there is one that has played a round."""
    found = [one for one in lineages(trials) if one.segments()]
    if manifest.scheduler != POPULATION or not found:
        return False
    csv.write_text(table(manifest, found).to_csv(index=False), encoding="utf-8")
    by_key = {one.plan.key: one for one in trials}
    replaced = [Lineage.of(one, by_key) for one in trials if ended(one) == "pruned"]
    winner, panels = best(manifest, found), len(manifest.varied) + 1
    figure = blank(6.4, 2.0 * panels)
    top = figure.add_subplot(panels, 1, 1)
    _draw_objective(top, manifest, found, replaced, winner)
    for place, name in enumerate(manifest.varied, 2):
        _draw_values(figure.add_subplot(panels, 1, place, sharex=top), name, found, replaced, winner)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.label_outer()
    top.set_xlim(0, manifest.rounds)
    top.locator_params(axis="x", integer=True)
    figure.axes[-1].set_xlabel("Communication round (0: untuned model)", fontsize=9)
    figure.align_ylabels()
    figure.legend(
        handles=_handles(winner is not None, bool(replaced)),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8.5,
    )
    picture.write_bytes(to_png(figure))
    return True


def _draw_objective(
    axes: "Axes",
    manifest: SweepManifest,
    found: Sequence[Lineage],
    replaced: Sequence[Lineage],
    winner: Lineage | None,
) -> None:
    """The objective of every member; of those that were replaced, the rounds that they played themselves."""
    scale = 100 if is_accuracy(manifest.metric) else 1
    for one in [*replaced, *found]:
        values = recorded(one.end.history, manifest.metric)
        since = one.end.plan.start.round if one in replaced and one.end.plan.start else 0
        rounds = [round for round in values if round >= since]
        axes.plot(rounds, [scale * values[round] for round in rounds], **_look(one, replaced, winner))
    axes.set_ylabel(title(manifest.metric), fontsize=8, color=INK)


def _draw_values(
    axes: "Axes", name: str, found: Sequence[Lineage], replaced: Sequence[Lineage], winner: Lineage | None
) -> None:
    """A hyperparameter of every member as steps: the value of a round stands over the way to it."""
    drawn = []
    for one in [*replaced, *found]:
        parts = one.values(name)[-1:] if one in replaced else one.values(name)
        x = [edge for first, last, _ in parts for edge in (first - 1, last)]
        y = [value for *_, value in parts for _ in range(2)]
        axes.plot(x, y, **_look(one, replaced, winner))
        drawn += y
    if min(drawn) > 0 and max(drawn) > DECADE * min(drawn):
        axes.set_yscale("log")
    axes.set_ylabel(name, fontsize=8, color=INK)


def _look(one: Lineage, replaced: Sequence[Lineage], winner: Lineage | None) -> dict[str, Any]:
    """The best member stands out, and who was replaced ends in a cross."""
    return LOOKS["replaced" if one in replaced else "best" if one is winner else "others"]


def _handles(any_finished: bool, any_replaced: bool) -> list[Any]:
    """What the lines are, for the legend."""
    from matplotlib.lines import Line2D

    words = {"best": "best member", "others": "other members", "replaced": "replaced after the cross"}
    there = {"best": any_finished, "others": True, "replaced": any_replaced}
    shown = [name for name in words if there[name]]
    return [Line2D([], [], label=words[name], **LOOKS[name]) for name in shown]
