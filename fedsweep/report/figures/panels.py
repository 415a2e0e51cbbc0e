"""Figures with one panel per metric (drift and structural bias) or one panel per arm (active blocks and t-SNE)."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import GREY, Drawing, best_places, draw_over_seeds, labels, over_seeds
from fedsweep.results import SweepManifest
from fedsweep.results.tsne_files import TABLE, Embedding, Look, legends, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRIFT_PANELS = {
    "drift/representation": "Drift of representations\n(1 - cos)",
    "drift/head": "Drift of heads\n(1 - cos)",
    "structural_bias/gradient": "Distortion of gradients\n(share of the norm)",
    "structural_bias/gradient_per_missing_block": "Distortion per missing block\n(share of the norm)",
    "structural_bias/jacobian/identity": "Missing block's Jacobian:\ndistance to identity (per value)",
    "structural_bias/jacobian/brick": "Missing block's Jacobian:\ndistance to BRICK (per value)",
    "structural_bias/brick_error": "Error of BRICK\n(share of the error of skipping)",
}
"""The titles of the metrics that `evaluation.metrics` can add, without metrics of single blocks."""
DRIFT_READING = (
    "Drift is the distance between the features, or the heads, of the clients after local training. Structural bias is "
    "the effect of the blocks that a client lacks on the client's gradients. Values closer to zero mean less "
    "drift and less bias. Lines are means over the finished seeds; bands span the lowest to the highest seed."
)
METRICS_READING = (
    "The metrics that packages outside fedsweep measure after a round. Lines are means over the finished seeds; bands "
    "span the lowest to the highest seed."
)
BRICK_READING = " A BRICK is a small module that the method FedBRICK puts in the place of a missing block."


def draw_drift(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw client drift and structural bias by round, with one panel per metric.

    Structural bias is the effect of a client's missing blocks on its gradients. Only arms with a finished trial are
    drawn.

    Returns:
        The drawing, or None if none of the metrics in `DRIFT_PANELS` is recorded.
    """
    figure, shown = _by_round(manifest, arms, DRIFT_PANELS)
    if figure is None:
        return None
    reading = DRIFT_READING + BRICK_READING * any("brick" in name for name in shown)
    return Drawing(figure, "Client drift and structural bias by round", reading)


def draw_metrics(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the metrics of plug-ins by round, with one panel per metric; return None if none of them is recorded."""
    titles = {name: shown.replace(" (", "\n(", 1) for name, shown in manifest.titles.items()}
    figure, _ = _by_round(manifest, arms, titles)
    return None if figure is None else Drawing(figure, "Metrics of plug-ins by round", METRICS_READING)


def _by_round(
    manifest: SweepManifest, arms: Sequence[ArmStatistics], titles: Mapping[str, str]
) -> tuple["Figure | None", list[str]]:
    """Draw some metrics by round, with one panel per metric that is recorded.

    Args:
        manifest: The description of the sweep.
        arms: The arms. Only those with a finished trial are drawn.
        titles: The title of each panel, keyed by metric.

    Returns:
        The figure, or None if none of the metrics is recorded, and the metrics in the panels.
    """
    from matplotlib.lines import Line2D

    drawn = []
    for one, colour, label in canvas.dressed(manifest, arms):
        series = {name: over_seeds(one.arm, manifest.metric, name) for name in titles}
        if any(series.values()):
            drawn.append((one, colour, label, series))
    shown = [name for name in titles if any(series[name] for *_, series in drawn)]
    if not shown:
        return None, []
    figure, panels = canvas.panels(len(shown), 3, 2.7, 2.3)
    for axes, name in zip(panels, shown, strict=True):
        axes.grid(axis="y")
        for one, colour, _, series in drawn:
            draw_over_seeds(axes, one, series[name], colour)
        axes.set_title(titles[name], fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, manifest.rounds)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.locator_params(axis="y", nbins=5)
    for axes in panels[-3:]:
        axes.set_xlabel("Communication round", fontsize=8.5)
    named = [(colour, label) for _, colour, label, _ in drawn if colour != GREY]
    handles = [Line2D([], [], color=colour, linewidth=1.8, label=label) for colour, label in named]
    if len(named) < len(drawn):
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, label="other arms"))
    columns = max(1, min(len(handles), int(figure.get_figwidth() // 2.4)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8.5)
    return figure, shown


ACTIVE_BLOCKS = "sal/active/"
MOST_ACTIVE_PANELS = 8  # greatest number of panels; the first arms of the table are shown
ACTIVE_READING = (
    "Active blocks are the blocks that a client trains. Each row is a client and each column is a round. Lighter cells "
    "have more active blocks (mean over the finished seeds). At most the first eight arms of the table are shown."
)


def draw_active_blocks(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the number of active blocks (blocks that a client trains) by client and round.

    The numbers are means over the finished seeds of an arm. Return None if the metric is not recorded.
    """
    named = zip(labels(manifest, arms, letters=46), arms, strict=True)
    grids = [(label, grid) for label, one in named if not (grid := active_blocks(one, manifest.metric)).empty]
    grids = grids[:MOST_ACTIVE_PANELS]
    if not grids:
        return None
    most, clients = max(np.nanmax(grid) for _, grid in grids), max(len(grid) for _, grid in grids)
    figure, panels = canvas.panels(len(grids), 2, 4.6, 1.1 + 0.17 * clients)
    for axes, (label, grid) in zip(panels, grids, strict=True):
        image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
        axes.spines[:].set_visible(True)
        axes.set_yticks(range(len(grid)), [*grid.index], fontsize=7)
        step = max(1, len(grid.columns) // 10)
        axes.set_xticks(range(0, len(grid.columns), step), [*grid.columns[::step]], fontsize=7.5)
        axes.tick_params(length=0)
        axes.set_title(label, fontsize=9.5)
        axes.set_xlabel("Communication round", fontsize=8.5)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.03, pad=0.02)
    bar.set_label("Active blocks, mean over finished seeds", fontsize=8.5)
    return Drawing(figure, "Active blocks of every client by round", ACTIVE_READING)


def active_blocks(one: ArmStatistics, metric: str) -> pd.DataFrame:
    """Return the mean number of active blocks over finished seeds, as a table of shape (clients, rounds).

    Only rounds that all finished seeds recorded are included.
    """
    names = {name for trial in one.arm.finished(metric).values() for record in trial.history for name in record.metrics}
    means = {}
    for name in sorted(names):
        if name.startswith(ACTIVE_BLOCKS) and (points := over_seeds(one.arm, metric, name)):
            means[name.removeprefix(ACTIVE_BLOCKS)] = {round: middle for round, (_, middle, _) in points.items()}
    return pd.DataFrame(means).sort_index().T


MOST_TSNE_PANELS = 6  # greatest number of panels; the baselines and the best arms are shown
TSNE_READING = (
    "Each point is a test image. Images with similar features in the global model after the last round are close to "
    "each other. Each panel shows the first finished seed of an arm, for at most six arms. t-SNE rotates and stretches "
    "each panel arbitrarily, so compare the neighbours of points between panels, but not their positions. The "
    "silhouette is close to 1 if the features separate the classes well, and close to 0 if the classes overlap."
)


def draw_tsne(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw the t-SNE of the features of test images, with one panel per arm.

    Each panel shows the arm's first finished seed that has a recorded t-SNE. Only the baselines and the arms with the
    best means are shown, at most six arms in total.

    Returns:
        The drawing, or None if no t-SNE is recorded.
    """
    known = []
    for one, label in zip(arms, labels(manifest, arms, lines=3, letters=34), strict=True):
        finished = one.arm.finished(manifest.metric).items()
        tables = ((seed, trial.artifacts[TABLE]) for seed, trial in finished if TABLE in trial.artifacts)
        known += [(one, label, seed, table) for seed, table in islice(tables, 1)]
    shown = [known[place] for place in best_places([one for one, *_ in known], manifest.mode, MOST_TSNE_PANELS)]
    if not shown:
        return None
    embeddings = [Embedding.of_csv(table.read_text(encoding="utf-8")) for *_, table in shown]
    look = Look.of(embeddings)
    figure, panels = canvas.panels(len(shown), 3, 3.0, 3.3)
    for axes, (_, label, seed, _), embedding in zip(panels, shown, embeddings, strict=True):
        scatter(axes, embedding, look, size=13)
        axes.set_title(f"{label}\nseed {seed}, silhouette {embedding.silhouette:.3f}", fontsize=9.5, loc="left")
    legends(figure, look)
    return Drawing(figure, "Features of test images (t-SNE)", TSNE_READING)
