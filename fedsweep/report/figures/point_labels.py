"""Places labels next to the points of a figure, so that no label covers a point, another label or certain lines."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedsweep.results.tsne_files import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

SIZE = 8.5  # font size
DOT = 5.0  # half the width of the square around a point that no label may cover, in points
GAP = 2.0  # space around a label, in points
DISTANCES = (7, 12, 18, 26, 36, 48, 62, 78, 96, 120, 150, 190, 240, 300, 380, 480, 600)
"""Distances from a point at which its label may begin, in points."""
ANGLES = 16  # number of directions
TOUCHING = 12  # a label at a larger distance is joined to its point by a line
CROSSED = 15.0  # covering a line is as bad as this much distance, in points
Segment = tuple[tuple[float, float], tuple[float, float]]
"""The start and the end of a straight line."""


class Box(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: "Box") -> bool:
        """Return whether the two rectangles overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def crossed_by(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Return whether the line from `start` to `end` crosses the rectangle (Liang and Barsky, 1984)."""
        first, last = 0.0, 1.0
        for low, high, begin, step in (
            (self.left, self.right, start[0], end[0] - start[0]),
            (self.bottom, self.top, start[1], end[1] - start[1]),
        ):
            if step == 0:
                if not low < begin < high:
                    return False
                continue
            enter, leave = sorted(((low - begin) / step, (high - begin) / step))
            first, last = max(first, enter), min(last, leave)
        return first < last


def label_points(
    axes: "Axes",
    named: Sequence[tuple[float, float, str]],
    others: Sequence[tuple[float, float]] = (),
    uncovered: Sequence["Line2D"] = (),
) -> None:
    """Write a label next to each of the points `named`, where it covers no point, no other label and no given line.

    A label may leave the axes at the top and on the right. If a label is not directly next to its point, a thin line
    joins the two. Other lines that are already drawn are covered only if all places without lines are much farther
    away.

    Args:
        axes: The axes, whose limits must not change afterwards.
        named: The x and y of each point, and its label.
        others: The x and y of the points without a label.
        uncovered: Lines of the axes that no label may cover.
    """
    scale = 72 / axes.figure.dpi  # from pixels to points
    spots = [_spot(axes, x, y, scale) for x, y in [*((x, y) for x, y, _ in named), *others]]
    blocked = [Box(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in spots]
    lines = [pair for line in axes.lines for pair in _segments(line, scale)]
    barriers = [pair for line in uncovered for pair in _segments(line, scale)]
    corner = axes.get_window_extent()
    floor = Box(corner.x0 * scale, corner.y0 * scale, float("inf"), float("inf"))
    for spot, (x, y, words) in zip(spots, named, strict=False):
        text = axes.annotate(words, (x, y), fontsize=SIZE, color=INK, annotation_clip=False, linespacing=1.1)
        shape = text.get_window_extent()
        size = shape.width * scale + 2 * GAP, shape.height * scale + 2 * GAP
        distance, box = _best(spot, size, floor, blocked, lines, barriers)
        blocked.append(box)
        text.remove()
        look: dict[str, Any] = {}
        if distance > TOUCHING:
            nearest = min(max(spot[0], box.left), box.right), min(max(spot[1], box.bottom), box.top)
            lines.append((spot, nearest))
            look["arrowprops"] = {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "alpha": 0.7, "shrinkB": 4}
            look["arrowprops"] |= {"shrinkA": 0, "relpos": _share(nearest, box)}
        offset = box.left + GAP - spot[0], box.bottom + GAP - spot[1]
        axes.annotate(
            words, (x, y), offset, textcoords="offset points", ha="left", va="bottom", fontsize=SIZE, color=INK,
            linespacing=1.1, annotation_clip=False, zorder=5, **look,
        )  # fmt: skip


def _share(nearest: tuple[float, float], box: Box) -> tuple[float, float]:
    return (nearest[0] - box.left) / (box.right - box.left), (nearest[1] - box.bottom) / (box.top - box.bottom)


def _spot(axes: "Axes", x: float, y: float, scale: float) -> tuple[float, float]:
    across, up = axes.transData.transform((x, y))
    return float(across) * scale, float(up) * scale


def _segments(line: "Line2D", scale: float) -> Iterator[Segment]:
    """Yield the straight pieces of a drawn line, in points; nothing for lines that consist of markers only."""
    from matplotlib.cbook import STEP_LOOKUP_MAP

    if line.get_linestyle() != "None":
        corners = STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data(orig=False))
        pixels = line.get_transform().transform(np.column_stack([*corners]))
        yield from pairwise([(float(x) * scale, float(y) * scale) for x, y in pixels])


def _best(
    spot: tuple[float, float],
    size: tuple[float, float],
    floor: Box,
    blocked: Sequence[Box],
    lines: Sequence[Segment],
    barriers: Sequence[Segment],
) -> tuple[float, Box]:
    """Return the best free rectangle for a label of a given size, and its distance from the point `spot`."""
    best: tuple[float, float, Box] | None = None
    for distance in DISTANCES:
        if best is not None and distance >= best[0]:
            break
        for turn in range(ANGLES):
            box = _at(spot, size, distance, 2 * pi * (turn + 1) / ANGLES)
            if box.left < floor.left or box.bottom < floor.bottom or any(map(box.meets, blocked)):
                continue
            if any(box.crossed_by(*barrier) for barrier in barriers):
                continue
            cost = distance + CROSSED * sum(box.crossed_by(*line) for line in lines)
            if best is None or cost < best[0]:
                best = cost, hypot(*_apart(spot, box)), box
    if best is None:  # above everything that is drawn
        top = max(one.top for one in blocked)
        return top - spot[1], Box(floor.left, top, floor.left + size[0], top + size[1])
    return best[1:]


def _apart(spot: tuple[float, float], box: Box) -> tuple[float, float]:
    return max(box.left - spot[0], 0, spot[0] - box.right), max(box.bottom - spot[1], 0, spot[1] - box.top)


def _at(spot: tuple[float, float], size: tuple[float, float], distance: float, angle: float) -> Box:
    """Return a rectangle that begins at a distance from `spot`, in a direction from it."""
    across, up = cos(angle), sin(angle)
    x, y = spot[0] + distance * across, spot[1] + distance * up
    left = x - size[0] * (1 - across) / 2
    bottom = y - size[1] * (1 - up) / 2
    return Box(left, bottom, left + size[0], bottom + size[1])
