"""The figures of a report: one file draws one figure, as PNG and as SVG."""

from collections.abc import Sequence
from pathlib import Path

from fedsweep.report.figures import (
    activation,
    curves,
    domains,
    drift,
    heatmap,
    importance,
    population,
    tsne,
)
from fedsweep.report.figures import (
    bytes as front,
)
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.table import AblationTable
from fedsweep.results import TrialRecord


def write_figures(table: AblationTable, trials: Sequence[TrialRecord], folder: Path) -> tuple[Figure, ...]:
    """Draw all that there are numbers for into the folder."""
    manifest, arms = table.manifest, table.arms
    drawn = [
        curves.draw(manifest, arms, folder / "curves.png"),
        front.draw_front(manifest, arms, folder / "front.png"),
        front.draw_bytes(manifest, arms, folder / "bytes.png"),
        domains.draw(manifest, arms, folder / "domains.png"),
        heatmap.draw(manifest, arms, folder / "heatmap.png"),
        importance.draw(table.effects, folder / "importance.png"),
        population.draw(manifest, trials, folder / "population.png"),
        activation.draw(manifest, arms, folder / "activation.png"),
        drift.draw(manifest, arms, folder / "drift.png"),
        tsne.draw(manifest, arms, folder / "tsne.png"),
    ]
    return tuple(one for one in drawn if one is not None)


__all__ = ["Figure", "write_figures"]
