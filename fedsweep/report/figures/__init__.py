"""The figures of a report, saved as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path

from fedsweep.report.choice import arms_on_test
from fedsweep.report.figures import (
    by_domain,
    canvas,
    curves,
    forest,
    importance,
    objective_against_cost,
    panels,
    population,
    tuning,
)
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.table import AblationTable
from fedsweep.results import TrialRecord

STYLE = f"{__name__}.look"


def write_figures(table: AblationTable, trials: Sequence[TrialRecord], folder: Path) -> tuple[Figure, ...]:
    """Draw all figures for which there is data, save them in `folder`, and delete those of an earlier report."""
    from matplotlib import style

    manifest, arms = table.manifest, table.arms
    with style.context(STYLE, after_reset=True):
        drawn = {
            "forest": forest.draw(manifest, arms),
            "curves": curves.draw(manifest, arms),
            "front": objective_against_cost.draw_front(manifest, arms),
            "bytes": objective_against_cost.draw_bytes(manifest, arms),
            "time": objective_against_cost.draw_time(manifest, arms),
            "domains": by_domain.draw_dots(manifest, arms_on_test(manifest, arms)),
            "heatmap": by_domain.draw_grid(manifest, arms_on_test(manifest, arms)),
            "importance": importance.draw(table.effects),
            "population": population.draw(manifest, trials),
            "tuning": tuning.draw(manifest, arms),
            "activation": panels.draw_active_blocks(manifest, arms),
            "drift": panels.draw_drift(manifest, arms),
            "metrics": panels.draw_metrics(manifest, arms),
            "tsne": panels.draw_tsne(manifest, arms),
        }
        for name, one in drawn.items():
            if one is None:
                (folder / f"{name}.png").unlink(missing_ok=True)
                (folder / f"{name}.svg").unlink(missing_ok=True)
        return tuple(canvas.save(one, folder, name) for name, one in drawn.items() if one is not None)


__all__ = ["Figure", "write_figures"]
