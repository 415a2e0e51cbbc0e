"""The accuracy on each domain at the last round: a dot for each arm's mean, a bar for the range of its seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import GREY, colours, labels
from fedsweep.report.figures.canvas import RULE, Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import final
from fedsweep.results import SweepManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@canvas.style()
def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Arms with a finished trial; None where there is none, or no accuracy on a domain."""
    coloured = zip(arms, colours(arms, manifest.mode), labels(manifest, arms), strict=True)
    finished = [(one, colour, label) for one, colour, label in coloured if _any(one, manifest)]
    if not finished:
        return None
    figure, axes = canvas.plain(max(4.5, 1.6 + 1.05 * len(manifest.domains)), 3.6)
    places = [colour for _, colour, _ in finished if colour != GREY]
    for one, colour, label in finished:
        place = places.index(colour) if colour != GREY else 0
        offset = 0.66 * ((place + 0.5) / max(1, len(places)) - 0.5)
        _draw_arm(axes, one, manifest, colour, offset)
        if colour != GREY:
            axes.plot([], [], "o", color=colour, markersize=5, label=label)
    greys = len(places) < len(finished)
    if greys:
        axes.plot([], [], color=GREY, linewidth=0.9, label="other arms")
    axes.set_xticks(range(len(manifest.domains)), manifest.domains, **_slanted(manifest.domains))
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(manifest.domains) - 0.5)
    for edge in range(1, len(manifest.domains)):
        axes.axvline(edge - 0.5, color=RULE, linewidth=0.8, zorder=0)
    said = _explained([one for one, *_ in finished], greys)
    explained = ";\n".join(said)
    axes.set_xlabel(f"Domain ({explained})")
    axes.set_ylabel("Accuracy at the last round (%)")
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, handlelength=1.2, labelspacing=0.8
    )
    reading = " ".join(f"{one[0].upper()}{one[1:]}." for one in said)
    more = "The best arms are in colour, the others are lines across each domain." * greys
    return canvas.save(
        figure, path, "Accuracy on each domain at the last round", " ".join(filter(None, [reading, more]))
    )


def _explained(finished: Sequence[ArmStatistics], greys: bool) -> list[str]:
    many = any(one.n > 1 for one in finished)
    said = ["dot: mean of finished seeds, bar: lowest to highest seed" if many else "dot: single finished seed"]
    looks = "hollow or dotted" if greys else "hollow"
    return said + [f"{looks}: out of domain, no client of the arm has it"] * any(one.held_out for one in finished)


def _slanted(domains: Sequence[str]) -> dict[str, Any]:
    """How names that are wider than their place are written."""
    return {"rotation": 30, "ha": "right"} if max(map(len, domains), default=0) > 11 else {}


def _draw_arm(axes: "Axes", one: ArmStatistics, manifest: SweepManifest, colour: str, offset: float) -> None:
    """One arm on every domain, hollow where it holds the domain out. Grey arms are a line across the domain."""
    for place, name in enumerate(manifest.domains):
        column, hollow = _finals(one, manifest.metric, name), name in one.held_out
        if not column:
            continue
        middle = sum(column) / len(column)
        if colour == GREY:
            look = ":" if hollow else "-"
            axes.plot([place - 0.38, place + 0.38], [middle, middle], look, color=GREY, linewidth=0.9, zorder=1)
            continue
        x, fill = place + offset, "white" if hollow else colour
        axes.plot([x, x], [min(column), max(column)], color=colour, linewidth=1.6, alpha=0.5, zorder=2)
        axes.plot([x], [middle], "o", color=colour, markersize=5, markerfacecolor=fill, zorder=3)


def _any(one: ArmStatistics, manifest: SweepManifest) -> bool:
    return any(_finals(one, manifest.metric, name) for name in manifest.domains)


def _finals(one: ArmStatistics, objective: str, domain: str) -> list[float]:
    """Accuracies on a domain in percent at the end of finished trials."""
    ends = [final(trial, one.metric_on(domain)) for trial in one.arm.finished(objective).values()]
    return [100 * end for end in ends if end is not None]
