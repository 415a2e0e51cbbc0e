"""FedMS's active blocks: one panel per arm, a row per client, a column per round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import labels
from fedsweep.report.figures.canvas import INK, Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import recorded
from fedsweep.results import SweepManifest

METRIC = "sal/active"
COLUMNS = 2
TITLE_WIDTH = 46
"""Letters of a line above a panel."""
MOST = 8
"""Panels of a picture: the first arms of the table."""
READING = (
    "Each row is a client, each column a round; lighter is more active blocks, mean over the finished seeds. "
    "Panels are the first arms of the table, eight at most."
)


@canvas.style()
def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """The mean over finished seeds of every client's active blocks in every round; None where none is recorded."""
    words = labels(manifest, arms, letters=TITLE_WIDTH)
    named = zip(words, arms, strict=True)
    found = [(label, grid) for label, one in named if (grid := active_blocks(one, manifest.metric))][:MOST]
    if not found:
        return None
    most = max(value for _, grid in found for rounds in grid.values() for value in rounds.values())
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    clients = max(len(grid) for _, grid in found)
    figure = canvas.blank(4.6 * columns, (1.1 + 0.17 * clients) * rows, layout="constrained")
    for number, (label, grid) in enumerate(found, 1):
        axes = figure.add_subplot(rows, columns, number)
        image = _draw(axes, grid, most)
        axes.set_title(label, fontsize=9.5, color=INK)
        axes.set_xlabel("Communication round", fontsize=8.5)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.03, pad=0.02)
    bar.set_label("Active blocks, mean of finished seeds", fontsize=8.5)
    return canvas.save(figure, path, "Active blocks of every client by round", READING)


def active_blocks(one: ArmStatistics, metric: str) -> dict[str, dict[int, float]]:
    """By client and round, the mean over the finished seeds that all have it; empty where nothing is recorded."""
    trials = list(one.arm.finished(metric).values())
    names = {name for trial in trials for record in trial.history for name in record.metrics}
    grid: dict[str, dict[int, float]] = {}
    for name in sorted(name for name in names if name.startswith(f"{METRIC}/")):
        series = [recorded(trial.history, name) for trial in trials]
        shared = sorted(set.intersection(*map(set, series)))
        grid[name.removeprefix(f"{METRIC}/")] = {
            round: sum(values[round] for values in series) / len(series) for round in shared
        }
    return {client: rounds for client, rounds in grid.items() if rounds}


def _draw(axes: Any, grid: Mapping[str, Mapping[int, float]], most: float) -> Any:
    """One arm's grid, darker where more is active."""
    rounds = sorted({round for values in grid.values() for round in values})
    cells = [[values.get(round, float("nan")) for round in rounds] for values in grid.values()]
    image = axes.imshow(cells, aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
    axes.set_yticks(range(len(grid)), list(grid), fontsize=7)
    step = max(1, len(rounds) // 10)
    axes.set_xticks(range(0, len(rounds), step), rounds[::step], fontsize=7.5)
    axes.tick_params(length=0)
    return image
