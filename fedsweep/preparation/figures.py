"""Functions that draw contact sheets of example images, and charts of the number of images per client and class.

Matplotlib is imported only when a figure is drawn.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.data.prepared.arrow_files import map_domain
from fedsweep.data.prepared.card import StoreCard
from fedsweep.results.tsne_files import INK, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsweep.types import Client

RULE = "#E6E6E6"
COLOURS = ("#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677", "#44AA99", "#AA4499", "#999933", "#882255", "#BBBBBB")
"""Paul Tol's muted colours, which suit readers with any colour vision. More classes are drawn as a heat map."""
PAGE = 12.0  # largest total width of the panels in a row, in inches
MOST_CLASSES = 16  # on a contact sheet
TILE = 0.72  # size of an image on a contact sheet, in inches
GAP = 0.06  # gap between two images, as a share of an image's size


def plain(text: str) -> str:
    r"""Escape the `$` signs in a text, because matplotlib reads text between two `$` as a formula.

    >>> print(plain("from 5$ to 10$"))
    from 5\$ to 10\$
    """
    return text.replace("$", r"\$")


def shorten(name: str, most: int = 24) -> str:
    """Shorten a name to at most `most` characters, and escape it for matplotlib."""
    return plain(name if len(name) <= most else f"{name[: most - 1]}…")


@contextmanager
def _no_glyph_warnings() -> Iterator[None]:
    """Silence warnings about characters that the font lacks, which matplotlib draws as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG file, or raise UserError if the file cannot be written.

    The version of matplotlib is not written into the file, so equal figures give equal files.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _no_glyph_warnings():
            figure.savefig(
                path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.12, metadata={"Software": None}
            )
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None


def contact_sheet(folder: Path, card: StoreCard, path: Path) -> int:
    """Write a PNG file with example images of each domain (rows) and class (columns), and return the number of columns.

    If the data set has more than 16 classes, only 16 evenly spaced classes are shown.
    """
    shown = np.unique(np.linspace(0, len(card.class_names) - 1, MOST_CLASSES).round().astype(int))
    rows = max(1, 4 // len(card.domains))
    gap = max(1, round(GAP * card.size))
    step = card.size + gap
    page = np.full((len(card.domains) * rows * step - gap, len(shown) * step - gap, 3), 255, np.uint8)
    for place, name in enumerate(card.domains):
        train, _ = map_domain(folder / f"{name}.arrow")
        for column, label in enumerate(shown):
            first, last = np.searchsorted(train.labels, [label, label + 1])
            for row, index in enumerate(_spread(first, last, rows)):
                top, left = (place * rows + row) * step, column * step
                page[top : top + card.size, left : left + card.size] = train.images[index].transpose(1, 2, 0)
    _draw(page, card, [card.class_names[label] for label in shown], rows, path)
    return len(shown)


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced indices from `first` to `last` - 1."""
    return [first + (last - first) * place // count for place in range(count)][: last - first] if last > first else []


def _draw(page: np.ndarray, card: StoreCard, names: list[str], rows: int, path: Path) -> None:
    wide, high = len(names), len(card.domains) * rows
    figure = blank(TILE * wide, TILE * high)
    axes = figure.add_subplot()
    axes.set_position((0, 0, 1, 1))
    axes.imshow(page, interpolation="lanczos", aspect="auto")
    axes.spines[:].set_visible(False)
    step = (page.shape[1] + max(1, round(GAP * card.size))) / wide
    longest = max(len(name) for name in names)
    turned: dict[str, Any] = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"} if longest > 9 else {}
    axes.xaxis.tick_top()
    axes.set_xticks([(place + 0.5) * step for place in range(wide)], [shorten(name) for name in names], **turned)
    centres = [(place + 0.5) * rows * step for place in range(len(card.domains))]
    axes.set_yticks(centres, [shorten(name) for name in card.domains])
    axes.tick_params(length=0, labelsize=9, pad=4)
    shown = f"{wide} of {len(card.class_names)} classes" if wide < len(card.class_names) else f"{wide} classes"
    axes.set_xlabel(f"{card.name}, {card.images:,} images at {card.size} px, {shown}", fontsize=9, loc="left")
    save(figure, path)


@dataclass(frozen=True)
class Panel:
    """One panel of a figure, with a title (for example `alpha 0.1`) and the clients of a partition."""

    title: str
    clients: "Sequence[Client]"


def class_counts(clients: "Sequence[Client]", num_classes: int) -> np.ndarray:
    """Return the number of training images of each client and class, int64 (clients, classes)."""
    return np.stack([np.bincount(client.train.labels.numpy(), minlength=num_classes) for client in clients])


def distances(clients: "Sequence[Client]", num_classes: int) -> np.ndarray:
    """Return the distance between the label distribution of each client and the label distribution of its domain.

    The distance is the total-variation distance: the fraction of the client's images that would have to be replaced to
    give the client the label distribution of its domain.

    Returns:
        Distances in [0, 1], float64 (clients,).
    """
    counts = class_counts(clients, num_classes)
    domains = np.array([client.domain for client in clients])
    whole = np.stack([counts[domains == domain].sum(0) for domain in domains])
    own, all_of_it = (part / np.maximum(part.sum(1, keepdims=True), 1) for part in (counts, whole))
    return np.asarray(np.abs(own - all_of_it).sum(1) / 2)


def skew(clients: "Sequence[Client]", num_classes: int) -> float:
    """Return the skew of a partition, that is, the mean of `distances` over all clients.

    The skew is 0 if all clients of a domain have the same label distribution. It is near 1 if each domain has many
    clients and no two clients of a domain have images of the same class.
    """
    return float(distances(clients, num_classes).mean())


def missing_classes(clients: "Sequence[Client]", class_names: Sequence[str]) -> list[str]:
    """Return a sentence for each of training, test and tuning images that names the classes without such an image.

    Classes of which the clients have no images at all are not mentioned, nor is a kind of images if none are held out.
    """
    uses = {
        "training": [client.train for client in clients],
        "test": [client.test for client in clients if client.test is not None],
        "tuning": [client.tuning for client in clients if client.tuning is not None],
    }
    held = [client.validation for client in clients if client.validation is not None]
    labels = {use: {label for one in sets for label in one.labels.tolist()} for use, sets in uses.items()}
    known = set.union(*labels.values(), *({*one.labels.tolist()} for one in held))
    return [
        f"No client has a {use} image of {summarise_list(class_names[label] for label in sorted(known - found))}, "
        "because images are held out without regard to their classes."
        for use, found in labels.items()
        if uses[use] and known - found
    ]


def draw_partitions(panels: Sequence[Panel], class_names: Sequence[str], path: Path) -> None:
    """Write a PNG file with one panel per partition.

    Each panel shows the number of images per client and class, with the clients on the x-axis, grouped by domain. Up to
    ten classes are drawn as stacked bars. More than ten classes are drawn as a heat map with the classes on the y-axis.
    """
    bars = len(class_names) <= len(COLOURS)
    most = max(len(panel.clients) for panel in panels)
    width, height = max(3.6, 0.9 + 0.3 * most), 2.3 if bars else min(2.2 + 0.022 * len(class_names), 4.4)
    across = max(1, min(len(panels), int(PAGE // width)))
    down = math.ceil(len(panels) / across)
    figure = blank(width * across, (height + 1.0) * down)
    all_axes = figure.subplots(down, across, squeeze=False)
    counts = [class_counts(panel.clients, len(class_names)) for panel in panels]
    top = max(int(one.sum(1).max() if bars else one.max()) for one in counts)
    for place, axes in enumerate(all_axes.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        (_bars if bars else _heat)(axes, counts[place], class_names, top)
        _label_clients(axes, panels[place].clients)
        value = skew(panels[place].clients, len(class_names))
        axes.set_title(f"{plain(panels[place].title)}  (skew {value:.2f})", fontsize=10, loc="left", color=INK)
        if place % across == 0:
            axes.set_ylabel("Training images" if bars else "Class", fontsize=9)
    with _no_glyph_warnings():
        figure.tight_layout(h_pad=1.6, w_pad=1.4)
    _explain(figure, class_names, top, bars)
    save(figure, path)


def _bars(axes: "Axes", counts: np.ndarray, class_names: Sequence[str], top: int) -> None:
    below = np.zeros(len(counts))
    for label in range(len(class_names)):
        axes.bar(range(len(counts)), counts[:, label], 0.84, below, color=COLOURS[label], edgecolor="white", lw=0.4)
        below += counts[:, label]
    axes.set_ylim(0, top * 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def _heat(axes: "Axes", counts: np.ndarray, class_names: Sequence[str], top: int) -> None:
    from matplotlib.colors import PowerNorm

    shown = np.ma.masked_equal(counts.T, 0)
    axes.imshow(shown, aspect="auto", cmap="viridis_r", norm=PowerNorm(0.5, 0, top), interpolation="nearest")
    step = math.ceil(len(class_names) / 16)
    axes.set_yticks(range(0, len(class_names), step), [shorten(name, 16) for name in class_names[::step]])
    axes.spines[:].set_color(RULE)


def _label_clients(axes: "Axes", clients: "Sequence[Client]") -> None:
    """Label the x-axis with client numbers and, below them, domains.

    If each domain has a single client, the axis is labelled only with domains.
    """
    domains = [client.domain for client in clients]
    groups = [(name, domains.index(name), domains.count(name)) for name in dict.fromkeys(domains)]
    axes.set_xlim(-0.5, len(clients) - 0.5)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    if all(count == 1 for _, _, count in groups):
        turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(groups) > 4 else {}
        axes.set_xticks(range(len(clients)), [shorten(name, 18) for name in domains], **turned)
        return
    axes.set_xticks(range(len(clients)), [plain(client.id.replace("-", "/").rsplit("/", 1)[-1]) for client in clients])
    for _, first, _ in groups[1:]:
        axes.axvline(first - 0.5, color=INK, linewidth=0.7)
    if len(groups) == 1:
        axes.set_xlabel(f"Clients of {plain(groups[0][0])}", fontsize=9)
        return
    for name, first, count in groups:
        middle = first + (count - 1) / 2
        axes.annotate(
            shorten(name, max(6, 4 * count)), (middle, 0), (0, -20), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="top", fontsize=8.5, color=INK, annotation_clip=False,
        )  # fmt: skip


def _explain(figure: "Figure", class_names: Sequence[str], top: int, bars: bool) -> None:
    """Add a legend to the right of the panels and the definition of skew below the panels.

    If `bars` is true, the legend lists the colours of the classes. Otherwise, it is a colour scale from 0 to `top`
    images.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Patch

    if bars:
        handles = [Patch(color=colour, label=shorten(name)) for colour, name in zip(COLOURS, class_names, strict=False)]
        figure.legend(
            handles=handles[::-1], loc="upper left", bbox_to_anchor=(1.0, 0.97), frameon=False, fontsize=8.5,
            handlelength=1.2, borderaxespad=0.2,
        )  # fmt: skip
    else:
        scale = ScalarMappable(PowerNorm(0.5, 0, top), "viridis_r")
        high = min(0.8, 2.4 / figure.get_figheight())
        bar = figure.colorbar(scale, cax=figure.add_axes((1.01, 0.96 - high, 0.12 / figure.get_figwidth(), high)))
        bar.set_label("Training images (white: none)", fontsize=8.5)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    figure.text(
        0.01, 0, "skew: mean total-variation distance between the class shares of a client and of its domain",
        fontsize=8, color=INK, va="top",
    )  # fmt: skip
