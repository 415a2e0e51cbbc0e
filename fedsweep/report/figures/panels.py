"""Figures with several panels: drift and structural bias by metric, active blocks and t-SNE by arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ArmStatistics, best_places
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import GREY, INK, Figure, colours, draw_over_seeds, labels, over_seeds
from fedsweep.results import SweepManifest
from fedsweep.results.tsne_files import TABLE, Embedding, Look, legends, scatter

if TYPE_CHECKING:
    from matplotlib import figure as pictures

DRIFT_PANELS = {
    "drift/representation": "Drift of representations\n(1 - cos)",
    "drift/head": "Drift of heads\n(1 - cos)",
    "structural_bias/gradient": "Distortion of gradients\n(share of their norm)",
    "structural_bias/gradient_per_missing_block": "Distortion per missing block\n(share of their norm)",
    "structural_bias/jacobian/identity": "Missing Jacobian from identity\n(per value)",
    "structural_bias/jacobian/brick": "Missing Jacobian from BRICK's\n(per value)",
    "structural_bias/brick_error": "BRICK's error\n(share of skipping's)",
}
"""Titles of the metrics that `evaluation.metrics` can add, except those of single blocks."""
DRIFT_READING = (
    "As evaluation.metrics asked for: lines are means over the finished seeds, bands go from the lowest "
    "seed to the highest. Nearer to zero is less drift and less bias."
)


@canvas.style()
def draw_drift(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Draw drift and bias by round for arms with a finished trial; return None if none of these metrics is recorded."""
    series = {name: [over_seeds(one.arm, manifest.metric, name) for one in arms] for name in DRIFT_PANELS}
    shown = [name for name, found in series.items() if any(found)]
    if not shown:
        return None
    figure, panels = canvas.panels(len(shown), 3, 2.7, 2.3)
    palette, words = colours(arms, manifest.mode), labels(manifest, arms)
    for axes, name in zip(panels, shown, strict=True):
        canvas.quiet(axes)
        for one, colour, points in zip(arms, palette, series[name], strict=True):
            if points:
                draw_over_seeds(axes, points, colour, band=one.n > 1)
        axes.set_title(DRIFT_PANELS[name], fontsize=9, color=INK, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, manifest.rounds)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.locator_params(axis="y", nbins=5)
    for axes in panels[-3:]:
        axes.set_xlabel("Communication round", fontsize=8.5)
    present = [any(found) for found in zip(*series.values(), strict=True)]
    _name_arms(figure, [pair for pair, there in zip(zip(palette, words, strict=True), present, strict=True) if there])
    return canvas.save(figure, path, "Client drift and structural bias by round", DRIFT_READING)


def _name_arms(figure: "pictures.Figure", drawn: Sequence[tuple[str, str]]) -> None:
    """Add a legend of the arms below the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=1.8, label=words) for colour, words in drawn if colour != GREY]
    if len(handles) < len(drawn):
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, label="other arms"))
    columns = max(1, min(len(handles), int(figure.get_figwidth() // 2.4)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)


ACTIVE_BLOCKS = "sal/active"
MOST_ACTIVE_PANELS = 8  # of the first arms of the table
ACTIVE_READING = (
    "Each row is a client, each column a round; lighter is more active blocks, mean over the finished seeds. "
    "Panels are the first arms of the table, eight at most."
)


@canvas.style()
def draw_active_blocks(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Draw each client's active blocks by round, mean over finished seeds; return None if none are recorded."""
    named = zip(labels(manifest, arms, letters=46), arms, strict=True)
    found = [(label, grid) for label, one in named if (grid := active_blocks(one, manifest.metric))]
    found = found[:MOST_ACTIVE_PANELS]
    if not found:
        return None
    most = max(value for _, grid in found for rounds in grid.values() for value in rounds.values())
    clients = max(len(grid) for _, grid in found)
    figure, panels = canvas.panels(len(found), 2, 4.6, 1.1 + 0.17 * clients)
    for axes, (label, grid) in zip(panels, found, strict=True):
        image = _draw_clients(axes, grid, most)
        axes.set_title(label, fontsize=9.5, color=INK)
        axes.set_xlabel("Communication round", fontsize=8.5)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.03, pad=0.02)
    bar.set_label("Active blocks, mean of finished seeds", fontsize=8.5)
    return canvas.save(figure, path, "Active blocks of every client by round", ACTIVE_READING)


def active_blocks(one: ArmStatistics, metric: str) -> dict[str, dict[int, float]]:
    """Return the mean active blocks over finished seeds, by client and round; only rounds that all seeds recorded."""
    names = {name for trial in one.arm.finished(metric).values() for record in trial.history for name in record.metrics}
    prefix = f"{ACTIVE_BLOCKS}/"
    series = {name: over_seeds(one.arm, metric, name) for name in sorted(names) if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): {round: middle for round, (_, middle, _) in points.items()}
        for name, points in series.items()
        if points
    }


def _draw_clients(axes: Any, grid: Mapping[str, Mapping[int, float]], most: float) -> Any:
    rounds = sorted({round for values in grid.values() for round in values})
    cells = [[values.get(round, float("nan")) for round in rounds] for values in grid.values()]
    image = axes.imshow(cells, aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
    axes.set_yticks(range(len(grid)), list(grid), fontsize=7)
    step = max(1, len(rounds) // 10)
    axes.set_xticks(range(0, len(rounds), step), rounds[::step], fontsize=7.5)
    axes.tick_params(length=0)
    return image


MOST_TSNE_PANELS = 6  # of the baselines and the best arms
TSNE_READING = (
    "Each point is a test image, by what the global model makes of it after the last round: first finished seed of "
    "each arm, six arms at most. t-SNE turns and stretches each plane as it likes: neighbours can be compared between "
    "panels, places cannot. The silhouette is 1 where classes are tight and far apart, 0 where they touch."
)


@dataclass(frozen=True)
class TsnePanel:
    """The t-SNE of one seed of an arm."""

    one: ArmStatistics
    label: str
    seed: int
    embedding: Embedding


@canvas.style()
def draw_tsne(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Draw the t-SNE of each arm's first finished seed, in the table's order; return None if none is recorded."""
    named = zip(arms, labels(manifest, arms, lines=3, letters=34), strict=True)
    known = [panel for one, label in named if (panel := _first_tsne(one, label, manifest.metric))]
    shown = [known[place] for place in best_places([panel.one for panel in known], manifest.mode, MOST_TSNE_PANELS)]
    if not shown:
        return None
    look = Look.of(panel.embedding for panel in shown)
    figure, panels = canvas.panels(len(shown), 3, 3.0, 3.3)
    for axes, panel in zip(panels, shown, strict=True):
        scatter(axes, panel.embedding, look, size=13)
        score = f"seed {panel.seed}, silhouette {panel.embedding.silhouette:.3f}"
        axes.set_title(f"{panel.label}\n{score}", fontsize=9.5, color=INK, loc="left")
    legends(figure, look)
    return canvas.save(figure, path, "Features in the plane (t-SNE)", TSNE_READING)


def _first_tsne(one: ArmStatistics, label: str, metric: str) -> TsnePanel | None:
    for seed, trial in one.arm.finished(metric).items():
        if table := trial.artifacts.get(TABLE):
            return TsnePanel(one, label, seed, Embedding.of_csv(table.read_text(encoding="utf-8")))
    return None
