"""The t-SNE of every arm side by side, from the tables that its trials left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import labels
from fedsweep.report.figures.canvas import INK, Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.results import SweepManifest
from fedsweep.results.tsne_files import TABLE, Embedding, Look, legends, scatter

COLUMNS = 3
TITLE_WIDTH = 34
"""Letters of a line above a panel."""
MOST = 6
"""Panels of a picture. Of more arms it has the best, the baseline among them."""
READING = (
    "Each point is a test image, by what the global model makes of it after the last round: first finished seed of "
    "each arm, six arms at most. t-SNE turns and stretches each plane as it likes: neighbours can be compared between "
    "panels, places cannot. The silhouette is 1 where classes are tight and far apart, 0 where they touch."
)


@dataclass(frozen=True)
class Panel:
    """An arm with the t-SNE of one of its seeds."""

    one: ArmStatistics
    label: str
    seed: int
    embedding: Embedding


@canvas.style()
def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """A panel per arm with the t-SNE of its first finished seed, in the table's order; None where there is none."""
    words = labels(manifest, arms, lines=3, letters=TITLE_WIDTH)
    named = zip(arms, words, strict=True)
    shown = _best([panel for one, label in named if (panel := _first(one, label, manifest.metric))], manifest.mode)
    if not shown:
        return None
    look = Look.of(panel.embedding for panel in shown)
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = canvas.blank(3.0 * columns, 3.3 * rows, layout="constrained")
    for number, panel in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, number)
        scatter(axes, panel.embedding, look, size=13)
        score = f"seed {panel.seed}, silhouette {panel.embedding.silhouette:.3f}"
        axes.set_title(f"{panel.label}\n{score}", fontsize=9.5, color=INK, loc="left")
    legends(figure, look)
    return canvas.save(figure, path, "Features in the plane (t-SNE)", READING)


def _first(one: ArmStatistics, label: str, metric: str) -> Panel | None:
    """The first finished seed that left a t-SNE."""
    for seed, trial in one.arm.finished(metric).items():
        if table := trial.artifacts.get(TABLE):
            return Panel(one, label, seed, Embedding.of_csv(table.read_text(encoding="utf-8")))
    return None


def _best(shown: Sequence[Panel], mode: str) -> list[Panel]:
    """At most `MOST` panels in their order: the baseline, and those with the best mean."""
    sign = -1 if mode == "max" else 1
    ranked = sorted(shown, key=lambda panel: (not panel.one.is_baseline, sign * (panel.one.mean or 0.0)))
    return [panel for panel in shown if panel in ranked[:MOST]]
