"""Figures of the accuracy on each domain at the last round: a dot plot with ranges over seeds, and a heat map."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.figures import canvas
from fedsweep.report.figures.canvas import GREY, Drawing, best_places
from fedsweep.report.text_tables import MARK, MARKED
from fedsweep.report.units_and_labels import NOTHING
from fedsweep.results import SweepManifest
from fedsweep.results.tsne_files import blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure as Picture

MOST = 40  # greatest number of rows; the baselines and the arms with the best means are shown
WORSE, SAME, BETTER = "#D55E00", "#F7F7F7", "#0072B2"
LOW, HIGH = "#F7F7F7", "#005B8F"
RULE = "#E6E6E6"  # colour of the lines between domains
LEAST = 1.0  # the full colour stands for at least this many percentage points, so small differences stay pale
WIDTH, HEIGHT, TALL, LINE = 0.74, 0.29, 0.36, 0.14
"""Size of a cell in inches; `TALL` is the height if an arm's label has two lines, plus `LINE` per further line."""
ROOM = 1.0  # inches right of the cells, for the colour bar
BAR = 0.12, 1.3, 2.0  # the colour bar in inches: width, least height, greatest height


def _by_seed(one: ArmStatistics, manifest: SweepManifest) -> dict[str, dict[int, float]]:
    """Return the accuracies of an arm in percent, keyed by domain and then by seed.

    Domains for which no finished trial has a value are left out.
    """
    found = {name: one.arm.finals(manifest.metric, one.metric_on(name)) for name in manifest.domains}
    return {name: {seed: 100 * end for seed, end in ends.items()} for name, ends in found.items() if ends}


def draw_dots(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw each arm's accuracy on each domain as a dot.

    Returns:
        The drawing, or None if no finished trial has an accuracy on a domain.
    """
    finished = [one for one in canvas.dressed(manifest, arms) if _by_seed(one[0], manifest)]
    if not finished:
        return None
    domains = manifest.domains
    figure, axes = canvas.plain(max(4.5, 1.6 + 1.05 * len(domains)), 3.6)
    coloured = [colour for _, colour, _ in finished if colour != GREY]
    for one, colour, label in finished:
        if colour == GREY:
            _draw_lines(axes, one, manifest)
        else:
            _draw_dots(axes, one, manifest, colour, 0.66 * ((coloured.index(colour) + 0.5) / len(coloured) - 0.5))
            axes.plot([], [], "o", color=colour, markersize=5, label=label)
    said, hollow = ["dot: single finished seed"], "hollow"
    if any(one.n > 1 for one, *_ in finished):
        said = ["dot: mean of finished seeds, bar: lowest to highest seed"]
    if greys := len(coloured) < len(finished):
        axes.plot([], [], color=GREY, linewidth=0.9, label="other arms")
        hollow = "hollow or dotted"
    if any(one.held_out for one, *_ in finished):
        said.append(f"{hollow}: no client of the arm has images of the domain")
    slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, domains)) > 11 else {}
    axes.set_xticks(range(len(domains)), domains, **slant)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.5, len(domains) - 0.5), xlabel="Domain ({})".format(";\n".join(said)))
    axes.set_ylabel("Accuracy at the last round (%)")
    for edge in range(1, len(domains)):
        axes.axvline(edge - 0.5, color=RULE, linewidth=0.8, zorder=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5, handlelength=1.2, labelspacing=0.8)
    reading = [f"{one[0].upper()}{one[1:]}." for one in said]
    reading += ["The baselines and the arms with the best means are coloured dots; other arms are grey lines."] * greys
    return Drawing(figure, "Accuracy on each domain at the last round", " ".join(reading))


def _draw_lines(axes: "Axes", one: ArmStatistics, manifest: SweepManifest) -> None:
    for name, ends in _by_seed(one, manifest).items():
        place, middle = manifest.domains.index(name), fmean(ends.values())
        look = ":" if name in one.held_out else "-"
        axes.plot([place - 0.38, place + 0.38], [middle] * 2, look, color=GREY, linewidth=0.9, zorder=1)


def _draw_dots(axes: "Axes", one: ArmStatistics, manifest: SweepManifest, colour: str, offset: float) -> None:
    for name, ends in _by_seed(one, manifest).items():
        column, x = [*ends.values()], manifest.domains.index(name) + offset
        fill = "white" if name in one.held_out else colour
        axes.plot([x, x], [min(column), max(column)], color=colour, linewidth=1.6, alpha=0.5, zorder=2)
        axes.plot([x], [fmean(column)], "o", color=colour, markersize=5, markerfacecolor=fill, zorder=3)


def draw_grid(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Drawing | None:
    """Draw a heat map of the accuracies, with one row per arm and one column per domain.

    Returns:
        The drawing, or None if no finished trial has an accuracy on a domain.
    """
    by_key = {one.key: one for one in arms}
    labels = dict(zip(by_key, canvas.labels(manifest, arms, letters=46), strict=True))
    known = [one for one in arms if _by_seed(one, manifest)]
    if not known:
        return None
    shown = [known[place] for place in best_places(known, manifest.mode, MOST)]
    domains, words = manifest.domains, [labels[one.key] for one in shown]
    gains = [_gains(one, by_key.get(one.counterpart or ""), manifest) for one in shown]
    compared = any(found for one, found in zip(shown, gains, strict=True) if not one.is_baseline)
    breaks = max(label.count("\n") for label in words)
    wide, high = len(domains) * WIDTH, len(shown) * (TALL + LINE * (breaks - 1) if breaks else HEIGHT)
    figure = blank(wide + ROOM, high)
    axes = figure.add_axes((0, 0, wide / (wide + ROOM), 1))
    mesh = _draw_cells(axes, shown, manifest, gains if compared else None)
    axes.set_yticks([place + 0.5 for place in range(len(shown))], words, fontsize=8.5)
    slant: dict[str, Any] = {"rotation": 35, "ha": "left"} if max(map(len, domains)) > 10 else {}
    axes.xaxis.tick_top()
    places = [place + 0.5 for place in range(len(domains))]
    axes.set_xticks(places, domains, fontsize=9, rotation_mode="anchor", **slant)
    _draw_bar(figure, mesh, (wide + 0.3) / (wide + ROOM), "Difference (points)" if compared else "Accuracy (%)")
    reading = ["Accuracy at the last round in percent, mean over the finished seeds."]
    if compared:
        reading.append(
            "Colours show the difference from the baseline on the same domain, averaged over common seeds: blue is "
            "better, orange is worse. These differences are not tested."
        )
    if any(name in one.held_out for one in shown for name in _by_seed(one, manifest)):
        reading.append(MARKED)
    if hidden := len(known) - len(shown):
        reading.append(f"Not shown: {hidden} arm{'s' * (hidden > 1)} with worse means.")
    return Drawing(figure, "Accuracy by arm and domain", " ".join(reading))


def _gains(one: ArmStatistics, other: ArmStatistics | None, manifest: SweepManifest) -> dict[str, float]:
    """Return the accuracy of `one` minus that of `other` in percentage points, keyed by domain.

    Each difference is a mean over the seeds that both arms finished.
    """
    if other is None:
        return {}
    own, theirs, gains = _by_seed(one, manifest), _by_seed(other, manifest), {}
    for name in own.keys() & theirs.keys():
        shared = own[name].keys() & theirs[name].keys()
        # If only one of the arms holds out a domain, the arms are tested on different images of this domain.
        if shared and (name in one.held_out) == (name in other.held_out):
            gains[name] = fmean(own[name][seed] - theirs[name][seed] for seed in shared)
    return gains


def _draw_cells(
    axes: "Axes",
    shown: Sequence[ArmStatistics],
    manifest: SweepManifest,
    gains: Sequence[Mapping[str, float]] | None,
) -> "QuadMesh":
    """Draw the accuracies in percent as text on coloured cells.

    The colours show `gains`, each arm's differences from the baseline in percentage points, keyed by domain. If `gains`
    is None, the colours show the accuracies.
    """
    from matplotlib.colors import LinearSegmentedColormap

    means = [{name: fmean(ends.values()) for name, ends in _by_seed(one, manifest).items()} for one in shown]
    cells = pd.DataFrame(means if gains is None else gains, columns=[*manifest.domains], dtype=float)
    low, high = np.nanmin(cells), np.nanmax(cells)
    if gains is None:
        tones, middle, most = [LOW, HIGH], (low + high) / 2, max(LEAST, high - low) / 2
    else:
        tones, middle, most = [WORSE, SAME, BETTER], 0.0, max(LEAST, -low, high)
    shades = LinearSegmentedColormap.from_list("shades", tones).with_extremes(bad="white")
    span: dict[str, Any] = {"cmap": shades, "vmin": middle - most, "vmax": middle + most}
    mesh = axes.pcolormesh(cells, edgecolors="white", linewidth=1.2, **span)
    colours = mesh.to_rgba(cells.to_numpy())
    for down, (one, found) in enumerate(zip(shown, means, strict=True)):
        for across, name in enumerate(manifest.domains):
            text = f"{found[name]:.1f}{MARK * (name in one.held_out)}" if name in found else NOTHING
            ink = _readable(colours[down, across, :3])
            axes.text(across + 0.5, down + 0.52, text, ha="center", va="center", fontsize=8.5, color=ink)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return mesh


def _draw_bar(figure: "Picture", mesh: "QuadMesh", left: float, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    wide, high = figure.get_size_inches()
    tall = max(BAR[1], min(BAR[2], high))
    place = figure.add_axes((left, 1 - tall / high, BAR[0] / wide, tall / high))
    bar = figure.colorbar(mesh, cax=place, ticks=MaxNLocator(4, steps=[1, 2, 5, 10]))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.set_label(label, fontsize=8.5)


def _readable(ground: Iterable[float]) -> str:
    """Return black or white, whichever has the higher WCAG 2 contrast with a background colour.

    `ground` contains the red, green and blue parts of the background colour, from 0 to 1.
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"
