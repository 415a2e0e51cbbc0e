"""Arms by domains as a grid of numbers, coloured by what each arm gains over its baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.report.figures import canvas
from fedsweep.report.figures.arm_style import labels
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import final
from fedsweep.results import SweepManifest
from fedsweep.results.arms import counterparts, identity

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes

MOST = 40
"""Rows: the baselines, and of the other arms those with the best means."""
MARK = "*"
WORSE, SAME, BETTER = "#D55E00", "#F7F7F7", "#0072B2"
LOW, HIGH = "#F7F7F7", "#005B8F"
LEAST = 1.0
"""Percentage points of full colour at least, so that a sweep without differences looks like one."""
WIDTH, HEIGHT, TALL = 0.74, 0.29, 0.36
"""A cell in inches; taller where an arm's name takes two lines."""
ROOM = 1.0
"""Inches right of the cells, for the bar of the colours."""
BAR = 0.12, 1.3, 2.0
"""The bar in inches: width, and height at least and at most."""


@dataclass(frozen=True)
class Cell:
    """An arm on a domain, in percent; `gain` over the baseline in points, None where there is nothing to compare."""

    accuracy: float
    gain: float | None
    held_out: bool

    @property
    def words(self) -> str:
        """The number, marked where no client of the arm has the domain."""
        return f"{self.accuracy:.1f}{MARK * self.held_out}"


@canvas.style()
def draw(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Arms with a finished trial; None where there is none, or no accuracy on a domain."""
    others = _baselines(manifest, arms)
    rows = {place: row for place, one in enumerate(arms) if (row := _row(one, others.get(place), manifest.domains))}
    if not rows:
        return None
    shown = _best(arms, [*rows], manifest.mode)
    grid = [[rows[place].get(name) for name in manifest.domains] for place in shown]
    compared = any(
        cell.gain is not None for place in shown if not arms[place].is_baseline for cell in rows[place].values()
    )
    words = labels(manifest, arms, letters=46)
    height = HEIGHT if all("\n" not in words[place] for place in shown) else TALL
    wide, high = len(manifest.domains) * WIDTH, len(shown) * height
    figure = canvas.blank(wide + ROOM, high)
    axes = figure.add_axes((0, 0, wide / (wide + ROOM), 1))
    _draw_grid(figure, axes, grid, compared)
    axes.set_yticks([place + 0.5 for place in range(len(shown))], [words[place] for place in shown], fontsize=8.5)
    _name_domains(axes, manifest.domains)
    held_out = any(cell is not None and cell.held_out for row in grid for cell in row)
    return canvas.save(figure, path, "Every arm on every domain", _reading(compared, held_out, len(rows) - len(shown)))


def _reading(compared: bool, held_out: bool, hidden: int) -> str:
    said = ["Accuracy at the last round in percent, mean over the finished seeds."]
    if compared:
        said.append(
            "Blue is better than the baseline and orange worse on the same domain, over the seeds that both finished; "
            "without a test."
        )
    if held_out:
        said.append(f"With {MARK}: out of domain, no client of that arm has images of the domain.")
    if hidden:
        said.append(f"Of the arms, {hidden} with lower means are left out.")
    return " ".join(said)


def _baselines(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Mapping[int, ArmStatistics]:
    """By an arm's place the arm that it is compared to."""
    if manifest.baseline is None:
        return {}
    by_arm = {identity(one.arm.values): one for one in arms}
    found = counterparts([one.arm.values for one in arms], manifest.baseline)
    keys = [identity(one.arm.values) for one in arms]
    return {place: by_arm[identity(found[key])] for place, key in enumerate(keys) if key in found}


def _row(one: ArmStatistics, other: ArmStatistics | None, domains: Sequence[str]) -> dict[str, Cell]:
    """The arm's cells by domain; empty where no trial has finished."""
    row = {}
    for name in domains:
        own = _by_seed(one, name)
        if not own:
            continue
        # A domain that one of the two holds out is tested on other images than in the other.
        alike = other is not None and (name in one.held_out) == (name in other.held_out)
        theirs = _by_seed(other, name) if other is not None and alike else {}
        gains = [own[seed] - theirs[seed] for seed in own.keys() & theirs.keys()]
        gain = math.fsum(gains) / len(gains) if gains else None
        row[name] = Cell(math.fsum(own.values()) / len(own), gain, name in one.held_out)
    return row


def _by_seed(one: ArmStatistics, domain: str) -> dict[int, float]:
    trials = {trial.plan.seed: trial for trial in one.arm.trials if trial.plan.seed in one.values}
    ends = {seed: final(trial, one.metric_on(domain)) for seed, trial in trials.items()}
    return {seed: 100 * end for seed, end in ends.items() if end is not None}


def _best(arms: Sequence[ArmStatistics], places: Sequence[int], mode: str) -> list[int]:
    """At most `MOST` places, in the order of the table."""
    sign = -1 if mode == "max" else 1
    ranked = sorted(places, key=lambda place: (not arms[place].is_baseline, sign * (arms[place].mean or 0.0)))
    return sorted(ranked[:MOST])


def _draw_grid(figure: "pictures.Figure", axes: "Axes", grid: Sequence[Sequence[Cell | None]], compared: bool) -> None:
    """Cells with their numbers, and a bar that says what the colours are. Vectors, so that an SVG stays sharp."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    values = [[_value(cell, compared) for cell in row] for row in grid]
    known = [value for row in values for value in row if value is not None]
    if compared:
        most = max(LEAST, *map(abs, known))
        span, shades = Normalize(-most, most), LinearSegmentedColormap.from_list("gain", [WORSE, SAME, BETTER])
    else:
        middle = (min(known) + max(known)) / 2
        most = max(LEAST, max(known) - min(known)) / 2
        span, shades = Normalize(middle - most, middle + most), LinearSegmentedColormap.from_list("level", [LOW, HIGH])
    for down, (row, numbers) in enumerate(zip(grid, values, strict=True)):
        for across, (cell, number) in enumerate(zip(row, numbers, strict=True)):
            colour: Any = "#FFFFFF" if number is None else shades(span(number))
            _draw_cell(axes, across, down, cell, colour)
    axes.set(xlim=(0, len(grid[0])), ylim=(len(grid), 0))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    wide, high = figure.get_size_inches()
    tall = max(BAR[1], min(BAR[2], high))
    bar = figure.add_axes(((wide - ROOM + 0.3) / wide, 1 - tall / high, BAR[0] / wide, tall / high))
    drawn = figure.colorbar(ScalarMappable(span, shades), cax=bar)
    drawn.outline.set_visible(False)
    drawn.ax.tick_params(labelsize=8, length=2)
    drawn.set_label("Points over the baseline" if compared else "Accuracy (%)", fontsize=8.5)
    drawn.locator = _few_ticks()
    drawn.update_ticks()


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4, steps=[1, 2, 5, 10])


def _value(cell: Cell | None, compared: bool) -> float | None:
    """What colours a cell."""
    return None if cell is None else cell.gain if compared else cell.accuracy


def _draw_cell(axes: "Axes", across: int, down: int, cell: Cell | None, colour: Any) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((across, down), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
    axes.text(
        across + 0.5, down + 0.52, cell.words if cell else "-", ha="center", va="center", fontsize=8.5,
        color=_readable(to_rgb(colour)),
    )  # fmt: skip


def _readable(ground: tuple[float, float, float]) -> str:
    """Black or white, whichever has the higher contrast on a colour (WCAG 2: by relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def _name_domains(axes: "Axes", domains: Sequence[str]) -> None:
    """Names above their columns, slanted where they are wider than these."""
    wide = max(map(len, domains)) > 10
    axes.xaxis.tick_top()
    axes.set_xticks(
        [place + 0.5 for place in range(len(domains))], domains, fontsize=9,
        rotation=35 if wide else 0, ha="left" if wide else "center", rotation_mode="anchor",
    )  # fmt: skip
