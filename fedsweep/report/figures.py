"""Two figures as PNG: the objective against rounds, and the accuracy on each domain. Matplotlib loads when called."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.arms import is_accuracy
from fedsweep.report.arms import Arm, ended, final, recorded
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import arm_words, names, title
from fedsweep.store import SweepManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's colours, told apart with any colour vision; their yellow is too pale for lines on white."""
GREY = "#C4C4C4"
INK = "#404040"
RULE = "#E6E6E6"
HIGHLIGHTED = 5
"""Arms in colour where there are more arms than colours; the others are grey."""
BAND = 0.16
LOOKS: dict[str, dict[str, Any]] = {
    "pruned": {"linestyle": "--", "linewidth": 0.9, "marker": "x", "markersize": 5, "markeredgewidth": 1.3},
    "diverged": {"linestyle": ":", "linewidth": 1.1, "marker": "d", "markersize": 4},
    "failed": {"linestyle": ":", "linewidth": 1.1, "marker": "s", "markersize": 3.5},
    "unfinished": {"linestyle": ":", "linewidth": 1.1},
}
"""How single trials that did not finish are drawn."""


def colours(arms: Sequence[ArmStatistics], mode: str) -> list[str]:
    """One colour per arm, the same in both figures: all, or the best five and the baseline with the rest in grey."""
    if len(arms) <= len(COLOURS):
        return list(COLOURS[: len(arms)])
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * one.mean, place) for place, one in enumerate(arms) if one.mean is not None)
    best = [place for _, place in ranked[:HIGHLIGHTED]]
    kept = best + [place for place, one in enumerate(arms) if one.is_baseline and place not in best]
    chosen = dict(zip(kept, COLOURS, strict=False))
    return [chosen.get(place, GREY) for place in range(len(arms))]


def curves(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> None:
    """Write the objective against rounds: mean and range of finished seeds per arm, every other trial on its own."""
    figure, axes = empty_figure(6.4, 4.0)
    dotted = names(manifest, arms)
    kinds: set[str] = set()
    ends: list[tuple[float, float, str, str]] = []
    drawn = list(zip(arms, colours(arms, manifest.mode), strict=True))
    # The best arm comes last, hence on top.
    for one, colour in reversed([pair for pair in drawn if pair[1] != GREY]):
        if last := _draw_arm(axes, one.arm, manifest.metric, colour, kinds):
            ends.append((*last, _label(one, dotted), colour))
    limits = axes.get_ylim()
    for one, colour in drawn:
        if colour == GREY:
            _draw_arm(axes, one.arm, manifest.metric, colour, kinds)
            kinds.add("grey")
    if ends and not is_accuracy(manifest.metric):
        # A loss that diverged in some grey arm would flatten all others: cut it.
        axes.set_ylim(limits)
    axes.set_xlabel("Communication round (0: untuned model)")
    axes.set_ylabel(title(manifest.metric))
    axes.set_xlim(0, max(1, *(trial.last_round for one in arms for trial in one.arm.trials)))
    axes.locator_params(axis="x", integer=True)
    _label_ends(axes, ends)
    _legend(axes, kinds)
    save(figure, path)


def _draw_arm(axes: "Axes", arm: Arm, metric: str, colour: str, kinds: set[str]) -> tuple[float, float] | None:
    """Draw one arm and note the kinds of marks in `kinds`; returns where its main line ends, if it has one."""
    grey, last = colour == GREY, None
    scale = 100 if is_accuracy(metric) else 1
    for trial in arm.trials:
        values = {number: scale * value for number, value in recorded(trial.history, metric).items()}
        if values and (kind := ended(trial)) != "finished":
            look = LOOKS[kind] | {"markevery": [-1]}
            axes.plot(list(values), list(values.values()), color=colour, zorder=1 if grey else 2, **look)
            kinds.add(kind)
            last = max(last or (-1.0, 0.0), (float(max(values)), values[max(values)]))
    points = _points(arm, metric)
    if not points:
        return last
    rounds = list(points)
    low, middle, high = ([scale * points[number][part] for number in rounds] for part in range(3))
    axes.plot(rounds, middle, color=colour, linewidth=0.9 if grey else 1.8, zorder=1 if grey else 3)
    many = len(arm.finished(metric)) > 1
    kinds.add("mean" if many else "finished")
    if many and not grey:
        axes.fill_between(rounds, low, high, color=colour, alpha=BAND, linewidth=0, zorder=1)
        kinds.add("band")
    return float(rounds[-1]), middle[-1]


def _legend(axes: "Axes", kinds: set[str]) -> None:
    """Explain the kinds of marks below the axes; arms are named at their lines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Line2D | Patch] = {
        "mean": Line2D([], [], color=INK, linewidth=1.8, label="mean of finished seeds"),
        "band": Patch(color=INK, alpha=BAND, linewidth=0, label="lowest to highest seed"),
        "finished": Line2D([], [], color=INK, linewidth=1.8, label="single finished seed"),
        **{kind: Line2D([], [], color=INK, label=f"{kind} trial", **look) for kind, look in LOOKS.items()},
        "grey": Line2D([], [], color=GREY, linewidth=0.9, label="other arms"),
    }
    present = [handle for kind, handle in handles.items() if kind in kinds]
    if not present:
        return
    axes.legend(
        handles=present, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=8,
        ncols=min(3, len(present)),
    )  # fmt: skip


def _points(arm: Arm, metric: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest over finished seeds at each round that all of them recorded."""
    series = [recorded(trial.history, metric) for trial in arm.finished(metric).values()]
    shared = sorted(set.intersection(*map(set, series))) if series else []
    columns = {number: [values[number] for values in series] for number in shared}
    return {number: (min(column), sum(column) / len(column), max(column)) for number, column in columns.items()}


def domains(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> None:
    """Write the accuracy on each domain at the last round: a dot per arm for the mean, a bar for the range of seeds."""
    figure, axes = empty_figure(max(4.5, 1.6 + 1.05 * len(manifest.domains)), 3.6)
    dotted = names(manifest, arms)
    finished = [pair for pair in zip(arms, colours(arms, manifest.mode), strict=True) if pair[0].n]
    coloured = [colour for _, colour in finished if colour != GREY]
    for one, colour in finished:
        place = coloured.index(colour) if colour != GREY else 0
        offset = 0.66 * ((place + 0.5) / len(coloured) - 0.5)
        _draw_domains(axes, one, manifest, colour, offset)
        if colour != GREY:
            axes.plot([], [], "o", color=colour, markersize=5, label=_label(one, dotted))
    if len(coloured) < len(finished):
        axes.plot([], [], color=GREY, linewidth=0.9, label="other arms")
    axes.set_xticks(range(len(manifest.domains)), manifest.domains)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(manifest.domains) - 0.5)
    for edge in range(1, len(manifest.domains)):
        axes.axvline(edge - 0.5, color=RULE, linewidth=0.8, zorder=0)
    said = ["dot: mean of finished seeds, bar: lowest to highest seed"] * any(one.n > 1 for one, _ in finished)
    looks = "hollow or dotted" if len(coloured) < len(finished) else "hollow"
    said += [f"{looks}: out of domain, no client of the arm has it"] * any(one.held_out for one, _ in finished)
    explained = ";\n".join(said)
    axes.set_xlabel(f"Domain ({explained})" if said else "Domain")
    axes.set_ylabel("Accuracy at the last round (%)")
    if finished:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, handlelength=1.2)
    else:
        axes.set_ylim(0, 100)
        axes.text(0.5, 0.5, "no trial has finished", transform=axes.transAxes, ha="center", color=INK)
    save(figure, path)


def _draw_domains(axes: "Axes", one: ArmStatistics, manifest: SweepManifest, colour: str, offset: float) -> None:
    """One arm on every domain, hollow where it holds the domain out. Grey arms are a line across the domain."""
    for place, name in enumerate(manifest.domains):
        column, hollow = _finals(one, manifest.metric, name), name in one.held_out
        if not column:
            continue
        middle = sum(column) / len(column)
        if colour == GREY:
            style = ":" if hollow else "-"
            axes.plot([place - 0.38, place + 0.38], [middle, middle], style, color=GREY, linewidth=0.9, zorder=1)
            continue
        x, fill = place + offset, "white" if hollow else colour
        axes.plot([x, x], [min(column), max(column)], color=colour, linewidth=1.6, alpha=0.5, zorder=2)
        axes.plot([x], [middle], "o", color=colour, markersize=5, markerfacecolor=fill, zorder=3)


def _finals(one: ArmStatistics, objective: str, domain: str) -> list[float]:
    """Accuracies on a domain in percent at the end of finished trials."""
    ends = [final(trial, one.metric_on(domain)) for trial in one.arm.finished(objective).values()]
    return [100 * end for end in ends if end is not None]


def _label(one: ArmStatistics, dotted: Sequence[str]) -> str:
    return arm_words(one.arm.values, dotted) + (" (baseline)" if one.is_baseline else "")


def _label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write labels right of the axes at the height of their lines, pushed apart, with a thin leader."""
    if not ends:
        return
    bottom, top = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[1])
    heights = apart([(end[1] - bottom) / (top - bottom) for end in ordered], 0.058)
    down = max(0.0, heights[-1] - 1)
    for (x, y, label, colour), height in zip(ordered, heights, strict=True):
        axes.annotate(
            label, (x, y), (1.05, height - down), xycoords="data", textcoords=axes.transAxes, color=INK, fontsize=9,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "relpos": (0, 0.5), "shrinkA": 2},
        )  # fmt: skip


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as keeps neighbours `gap` apart (least squares, by pooling neighbours)."""
    blocks: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        blocks.append((height - index * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, many), (high, more) = blocks.pop(-2), blocks.pop()
            blocks.append(((low * many + high * more) / (many + more), many + more))
    level = [start for start, count in blocks for _ in range(count)]
    return [start + index * gap for index, start in enumerate(level)]


def empty_figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    """A figure of this size in inches with plain axes. No pyplot: it would keep the figure and choose a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG."""
    # Without the version of matplotlib, the same numbers give the same bytes.
    figure.savefig(path, format="png", dpi=200, bbox_inches="tight", metadata={"Software": None})
