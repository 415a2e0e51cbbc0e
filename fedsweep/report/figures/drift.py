"""Client drift and structural bias by round: a small panel for each metric that trials recorded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import GREY, colours, draw_over_seeds, labels, over_seeds
from fedsweep.report.figures.canvas import INK, Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.results import SweepManifest

if TYPE_CHECKING:
    from matplotlib import figure as pictures

PANELS = {
    "drift/representation": "Drift of representations\n(1 - cos)",
    "drift/head": "Drift of heads\n(1 - cos)",
    "structural_bias/gradient": "Distortion of gradients\n(share of their norm)",
    "structural_bias/gradient_per_missing_block": "Distortion per missing block\n(share of their norm)",
    "structural_bias/jacobian/identity": "Missing Jacobian from identity\n(per value)",
    "structural_bias/jacobian/brick": "Missing Jacobian from BRICK's\n(per value)",
    "structural_bias/brick_error": "BRICK's error\n(share of skipping's)",
}
"""What `evaluation.metrics` asks for, but for single blocks."""
COLUMNS = 3
READING = (
    "As evaluation.metrics asked for: lines are means over the finished seeds, bands go from the lowest "
    "seed to the highest. Nearer to zero is less drift and less bias."
)


@canvas.style()
def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Arms with a finished trial; None where none of these metrics is recorded."""
    series = {name: [over_seeds(one.arm, manifest.metric, name) for one in arms] for name in PANELS}
    shown = [name for name, found in series.items() if any(found)]
    if not shown:
        return None
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = canvas.blank(2.7 * columns, 2.3 * rows, layout="constrained")
    palette, words = colours(arms, manifest.mode), labels(manifest, arms)
    for number, name in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, number)
        canvas.quiet(axes)
        for one, colour, points in zip(arms, palette, series[name], strict=True):
            if points:
                draw_over_seeds(axes, points, colour, band=one.n > 1)
        axes.set_title(PANELS[name], fontsize=9, color=INK, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, manifest.rounds)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.locator_params(axis="y", nbins=5)
        if number > len(shown) - columns:
            axes.set_xlabel("Communication round", fontsize=8.5)
    present = [any(found) for found in zip(*series.values(), strict=True)]
    _legend(figure, [pair for pair, there in zip(zip(palette, words, strict=True), present, strict=True) if there])
    return canvas.save(figure, path, "Client drift and structural bias by round", READING)


def _legend(figure: "pictures.Figure", drawn: Sequence[tuple[str, str]]) -> None:
    """Arms below the panels; there are too many ends to name them at their lines."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=1.8, label=words) for colour, words in drawn if colour != GREY]
    if len(handles) < len(drawn):
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, label="other arms"))
    columns = max(1, min(len(handles), int(figure.get_figwidth() // 2.4)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)
