"""The figures of a report, as PNG and as SVG."""

from collections.abc import Sequence
from pathlib import Path

from fedsweep.report.figures import by_domain, curves, importance, objective_against_cost, panels, population
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.table import AblationTable
from fedsweep.results import TrialRecord


def write_figures(table: AblationTable, trials: Sequence[TrialRecord], folder: Path) -> tuple[Figure, ...]:
    """Draw all figures for which there is data into `folder`."""
    manifest, arms = table.manifest, table.arms
    drawn = [
        curves.draw(manifest, arms, folder / "curves.png"),
        objective_against_cost.draw_front(manifest, arms, folder / "front.png"),
        objective_against_cost.draw_bytes(manifest, arms, folder / "bytes.png"),
        by_domain.draw_dots(manifest, arms, folder / "domains.png"),
        by_domain.draw_grid(manifest, arms, folder / "heatmap.png"),
        importance.draw(table.effects, folder / "importance.png"),
        population.draw(manifest, trials, folder / "population.png"),
        panels.draw_active_blocks(manifest, arms, folder / "activation.png"),
        panels.draw_drift(manifest, arms, folder / "drift.png"),
        panels.draw_tsne(manifest, arms, folder / "tsne.png"),
    ]
    return tuple(one for one in drawn if one is not None)


__all__ = ["Figure", "write_figures"]
