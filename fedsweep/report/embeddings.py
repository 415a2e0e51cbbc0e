"""The t-SNE of every arm side by side, from the tables that its trials left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, shorten

from fedsweep.embedding.picture import INK, Look, blank, legends, scatter, to_png
from fedsweep.embedding.points import TABLE, Embedding
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import arm_words, names
from fedsweep.store import SweepManifest

COLUMNS = 3
TITLE_WIDTH = 34
"""Letters of a line above a panel."""
MOST = 6
"""Panels of a picture. Of more arms it has the best, the baseline among them."""


@dataclass(frozen=True)
class Panel:
    """An arm with the t-SNE of one of its seeds."""

    one: ArmStatistics
    seed: int
    embedding: Embedding


def panels(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> bool:
    """Write a panel per arm with the t-SNE of its first finished seed, in the order of the table; say if there is one.

    t-SNE turns and stretches each plane as it likes: neighbours can be compared between panels, places cannot.
    """
    shown = _best([panel for one in arms if (panel := _first(one, manifest.metric))], manifest.mode)
    if not shown:
        return False
    dotted, look = names(manifest, arms), Look.of(panel.embedding for panel in shown)
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = blank(3.0 * columns, 3.3 * rows)
    for number, panel in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, number)
        scatter(axes, panel.embedding, look, size=13)
        words = arm_words(panel.one.arm.values, dotted) + " (baseline)" * panel.one.is_baseline
        arm = fill(shorten(words, 3 * TITLE_WIDTH, placeholder=" ..."), TITLE_WIDTH)
        score = f"seed {panel.seed}, silhouette {panel.embedding.silhouette:.3f}"
        axes.set_title(f"{arm}\n{score}", fontsize=9.5, color=INK, loc="left")
    legends(figure, look)
    path.write_bytes(to_png(figure))
    return True


def _first(one: ArmStatistics, metric: str) -> Panel | None:
    """The first finished seed that left a t-SNE."""
    for seed, trial in one.arm.finished(metric).items():
        if table := trial.artifacts.get(TABLE):
            return Panel(one, seed, Embedding.of_csv(table.read_text(encoding="utf-8")))
    return None


def _best(shown: Sequence[Panel], mode: str) -> list[Panel]:
    """At most `MOST` panels in their order: the baseline, and those with the best mean."""
    sign = -1 if mode == "max" else 1
    ranked = sorted(shown, key=lambda panel: (not panel.one.is_baseline, sign * (panel.one.mean or 0.0)))
    return [panel for panel in shown if panel in ranked[:MOST]]
