"""The points of a t-SNE plot, and functions that write them to a CSV file and a picture.

This module does not import torch, and imports matplotlib only to draw a picture.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE = "tsne.csv"
PICTURE = "tsne.png"
FILES = (TABLE, PICTURE)
"""Files that a run writes if its configuration requests a t-SNE."""
COLUMNS = ("x", "y", "class", "domain", "silhouette")


@dataclass(frozen=True)
class Point:
    """A test image in a t-SNE plot, with its position, class, domain and silhouette (Rousseeuw, 1987).

    Positions have no unit. The silhouette, from -1 to 1, measures how well the features of the image fit its class. It
    is computed from the features, not from the position.
    """

    x: float
    y: float
    label: str
    domain: str
    silhouette: float


@dataclass(frozen=True)
class Embedding:
    """The points of a t-SNE plot, sorted by class, then domain, then position in the data set."""

    points: tuple[Point, ...]

    @property
    def silhouette(self) -> float:
        """The mean silhouette of all points, from -1 to 1.

        The better the features separate the classes, the higher the mean silhouette.
        """
        return math.fsum(point.silhouette for point in self.points) / len(self.points)

    def csv(self) -> str:
        """Return a CSV table with one row per point. Numbers have six significant digits."""
        table = io.StringIO()
        rows = [(f"{one.x:.6g}", f"{one.y:.6g}", one.label, one.domain, f"{one.silhouette:.6g}") for one in self.points]
        csv.writer(table, lineterminator="\n").writerows([COLUMNS, *rows])
        return table.getvalue()

    @classmethod
    def of_csv(cls, text: str) -> Embedding:
        """Parse an embedding from a CSV table that `csv` returned."""
        rows = list(csv.reader(io.StringIO(text)))[1:]
        return cls(tuple(Point(float(x), float(y), label, domain, float(near)) for x, y, label, domain, near in rows))


COLOURS = (
    "#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE", "#000000", "#44AA99", "#AA4499", "#999933", "#882255",
)  # fmt: skip
"""Paul Tol's muted colours and black, which people with any colour vision can tell apart."""
MARKERS = ("o", "^", "s", "P", "X", "D", "v", "*")
INK = "#404040"
FRAME = "#C4C4C4"


@dataclass(frozen=True)
class Look:
    """The colours of the classes and the markers of the domains in t-SNE pictures."""

    colours: Mapping[str, str]
    markers: Mapping[str, str]

    @classmethod
    def of(cls, embeddings: Iterable[Embedding]) -> Look:
        """Return the colours and markers for the classes and domains of several embeddings.

        Pictures of these embeddings can then share the same colours and markers.
        """
        points = [point for one in embeddings for point in one.points]
        classes = dict.fromkeys(point.label for point in points)
        domains = dict.fromkeys(point.domain for point in points)
        colours = zip(classes, palette(len(classes)), strict=True)
        return cls(dict(colours), dict(zip(domains, cycle(MARKERS), strict=False)))


def palette(count: int) -> Sequence[str]:
    """Return the first `count` colours of `COLOURS`, or evenly spaced rainbow colours if `COLOURS` has too few."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["turbo"]([place / (count - 1) for place in range(count)])]


def files(embedding: Embedding) -> dict[str, bytes]:
    """Return the contents of the files `tsne.csv` and `tsne.png`, keyed by file name."""
    return {TABLE: embedding.csv().encode(), PICTURE: png(embedding)}


def png(embedding: Embedding) -> bytes:
    """Return a PNG picture of the points, with legends.

    The file does not contain the version of matplotlib. Otherwise, two versions could not write the same file for the
    same picture.
    """
    figure, written = blank(6.2, 5.4, "constrained"), io.BytesIO()
    axes, look = figure.add_subplot(), Look.of([embedding])
    scatter(axes, embedding, look, size=26)
    axes.set_title(
        f"t-SNE of the global model's features, {len(embedding.points)} test images\n"
        f"silhouette score by class, from the features: {embedding.silhouette:.3f}",
        fontsize=10.5, color=INK, loc="left",
    )  # fmt: skip
    legends(figure, look)
    figure.savefig(written, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    return written.getvalue()


def blank(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Return an empty figure of a given width and height in inches.

    The figure is created without pyplot, which would keep it in memory and could open a window.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def scatter(axes: Axes, embedding: Embedding, look: Look, size: float) -> None:
    """Draw the points of an embedding. `size` is the area of a marker in (1/72 inch)^2, matplotlib's unit.

    The axes have no ticks, because positions in a t-SNE plot have no unit.
    """
    for domain, marker in look.markers.items():
        dots = [point for point in embedding.points if point.domain == domain]
        axes.scatter(
            [point.x for point in dots], [point.y for point in dots], c=[look.colours[point.label] for point in dots],
            marker=marker, s=size, linewidths=0.4, edgecolors="white",
        )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set(visible=True, color=FRAME)


def legends(figure: Figure, look: Look) -> None:
    """Add a legend of the classes on the right and a legend of the domains at the bottom."""
    from matplotlib.lines import Line2D

    classes = [Line2D([], [], linestyle="", marker="o", color=one, label=name) for name, one in look.colours.items()]
    domains = [Line2D([], [], linestyle="", marker=one, color=INK, label=name) for name, one in look.markers.items()]
    widest = int(figure.get_figwidth())  # each name is about one inch wide
    common: dict[str, Any] = {
        "loc": "upper left", "frameon": False, "fontsize": 9.5, "title_fontsize": 9.5, "alignment": "left",
        "handletextpad": 0.2,
    }  # fmt: skip
    figure.legend(handles=classes, title="class", bbox_to_anchor=(1, 1), ncols=1 + len(classes) // 16, **common)
    figure.legend(handles=domains, title="domain", bbox_to_anchor=(0, 0), ncols=min(widest, len(domains)), **common)
