"""Figures of the accuracy on each domain at the last round: dots with the ranges of seeds, and a heat map."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.report.arm_statistics import ArmStatistics, best_places
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import GREY, RULE, Figure, colours, labels
from fedsweep.report.text_tables import MARK, MARKED
from fedsweep.results import SweepManifest

if TYPE_CHECKING:
    from matplotlib import figure as pictures
    from matplotlib.axes import Axes

MOST = 40  # rows at most: the baselines and the arms with the best means
WORSE, SAME, BETTER = "#D55E00", "#F7F7F7", "#0072B2"
LOW, HIGH = "#F7F7F7", "#005B8F"
LEAST = 1.0  # percentage points at full colour, at least, so that small differences stay pale
WIDTH, HEIGHT, TALL = 0.74, 0.29, 0.36
"""Size of a cell in inches; `TALL` is the height if an arm's label takes two lines."""
ROOM = 1.0  # inches right of the cells, for the colour bar
BAR = 0.12, 1.3, 2.0  # the colour bar in inches: width, least height, greatest height


@dataclass(frozen=True)
class Cell:
    """The accuracy of an arm on a domain in percent, and its gain over the baseline in points, if comparable."""

    accuracy: float
    gain: float | None
    held_out: bool

    @property
    def words(self) -> str:
        """The accuracy as text, marked if the domain is held out of the arm's clients."""
        return f"{self.accuracy:.1f}{MARK * self.held_out}"


@canvas.style()
def draw_dots(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Draw a dot per arm and domain; return None if no finished trial has an accuracy on a domain."""
    coloured = zip(arms, colours(arms, manifest.mode), labels(manifest, arms), strict=True)
    finished = [
        (one, colour, label)
        for one, colour, label in coloured
        if any(_by_seed(one, manifest.metric, name) for name in manifest.domains)
    ]
    if not finished:
        return None
    figure, axes = canvas.plain(max(4.5, 1.6 + 1.05 * len(manifest.domains)), 3.6)
    places = [colour for _, colour, _ in finished if colour != GREY]
    for one, colour, label in finished:
        place = places.index(colour) if colour != GREY else 0
        offset = 0.66 * ((place + 0.5) / max(1, len(places)) - 0.5)
        _draw_arm(axes, one, manifest, colour, offset)
        if colour != GREY:
            axes.plot([], [], "o", color=colour, markersize=5, label=label)
    greys = len(places) < len(finished)
    if greys:
        axes.plot([], [], color=GREY, linewidth=0.9, label="other arms")
    slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, manifest.domains)) > 11 else {}
    axes.set_xticks(range(len(manifest.domains)), manifest.domains, **slant)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(manifest.domains) - 0.5)
    for edge in range(1, len(manifest.domains)):
        axes.axvline(edge - 0.5, color=RULE, linewidth=0.8, zorder=0)
    said = _explained([one for one, *_ in finished], greys)
    axes.set_xlabel("Domain ({})".format(";\n".join(said)))
    axes.set_ylabel("Accuracy at the last round (%)")
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, handlelength=1.2, labelspacing=0.8
    )
    reading = [f"{one[0].upper()}{one[1:]}." for one in said]
    reading += ["The best arms are in colour, the others are lines across each domain."] * greys
    return canvas.save(figure, path, "Accuracy on each domain at the last round", " ".join(reading))


def _explained(finished: Sequence[ArmStatistics], greys: bool) -> list[str]:
    many = any(one.n > 1 for one in finished)
    said = ["dot: mean of finished seeds, bar: lowest to highest seed" if many else "dot: single finished seed"]
    looks = "hollow or dotted" if greys else "hollow"
    return said + [f"{looks}: out of domain, no client of the arm has it"] * any(one.held_out for one in finished)


def _draw_arm(axes: "Axes", one: ArmStatistics, manifest: SweepManifest, colour: str, offset: float) -> None:
    """Draw one arm on every domain: hollow dots for held-out domains, and only a line for grey arms."""
    for place, name in enumerate(manifest.domains):
        column, hollow = [*_by_seed(one, manifest.metric, name).values()], name in one.held_out
        if not column:
            continue
        middle = sum(column) / len(column)
        if colour == GREY:
            look = ":" if hollow else "-"
            axes.plot([place - 0.38, place + 0.38], [middle, middle], look, color=GREY, linewidth=0.9, zorder=1)
            continue
        x, fill = place + offset, "white" if hollow else colour
        axes.plot([x, x], [min(column), max(column)], color=colour, linewidth=1.6, alpha=0.5, zorder=2)
        axes.plot([x], [middle], "o", color=colour, markersize=5, markerfacecolor=fill, zorder=3)


@canvas.style()
def draw_grid(manifest: SweepManifest, arms: Sequence[ArmStatistics], path: Path) -> Figure | None:
    """Draw a cell per arm and domain; return None if no finished trial has an accuracy on a domain."""
    by_key = {one.key: one for one in arms}
    rows = []
    for one, words in zip(arms, labels(manifest, arms, letters=46), strict=True):
        if cells := _cells(one, by_key.get(one.counterpart or ""), manifest):
            rows.append((one, words, cells))
    if not rows:
        return None
    shown = [rows[place] for place in best_places([one for one, *_ in rows], manifest.mode, MOST)]
    grid = [[cells.get(name) for name in manifest.domains] for *_, cells in shown]
    compared = any(cell.gain is not None for one, _, cells in shown if not one.is_baseline for cell in cells.values())
    height = HEIGHT if all("\n" not in words for _, words, _ in shown) else TALL
    wide, high = len(manifest.domains) * WIDTH, len(shown) * height
    figure = canvas.blank(wide + ROOM, high)
    axes = figure.add_axes((0, 0, wide / (wide + ROOM), 1))
    _draw_grid(figure, axes, grid, compared)
    axes.set_yticks([place + 0.5 for place in range(len(shown))], [words for _, words, _ in shown], fontsize=8.5)
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
        said.append(MARKED)
    if hidden:
        said.append(f"Of the arms, {hidden} with lower means are left out.")
    return " ".join(said)


def _cells(one: ArmStatistics, other: ArmStatistics | None, manifest: SweepManifest) -> dict[str, Cell]:
    cells = {}
    for name in manifest.domains:
        own = _by_seed(one, manifest.metric, name)
        if not own:
            continue
        # A domain that one of the two holds out is tested on other images than in the other.
        alike = other is not None and (name in one.held_out) == (name in other.held_out)
        theirs = _by_seed(other, manifest.metric, name) if other is not None and alike else {}
        gains = [own[seed] - theirs[seed] for seed in own.keys() & theirs.keys()]
        gain = math.fsum(gains) / len(gains) if gains else None
        cells[name] = Cell(math.fsum(own.values()) / len(own), gain, name in one.held_out)
    return cells


def _by_seed(one: ArmStatistics, objective: str, domain: str) -> dict[int, float]:
    return {seed: 100 * end for seed, end in one.arm.finals(objective, one.metric_on(domain)).items()}


def _draw_grid(figure: "pictures.Figure", axes: "Axes", grid: Sequence[Sequence[Cell | None]], compared: bool) -> None:
    """Draw the cells as vector patches, so that an SVG stays sharp, and a colour bar."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    values = [[None if cell is None else cell.gain if compared else cell.accuracy for cell in row] for row in grid]
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
    drawn.locator = MaxNLocator(4, steps=[1, 2, 5, 10])
    drawn.update_ticks()


def _draw_cell(axes: "Axes", across: int, down: int, cell: Cell | None, colour: Any) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((across, down), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
    axes.text(
        across + 0.5, down + 0.52, cell.words if cell else "-", ha="center", va="center", fontsize=8.5,
        color=_readable(to_rgb(colour)),
    )  # fmt: skip


def _readable(ground: tuple[float, float, float]) -> str:
    """Return black or white, whichever has the higher contrast on `ground` (WCAG 2: by relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def _name_domains(axes: "Axes", domains: Sequence[str]) -> None:
    wide = max(map(len, domains)) > 10
    axes.xaxis.tick_top()
    axes.set_xticks(
        [place + 0.5 for place in range(len(domains))], domains, fontsize=9,
        rotation=35 if wide else 0, ha="left" if wide else "center", rotation_mode="anchor",
    )  # fmt: skip
