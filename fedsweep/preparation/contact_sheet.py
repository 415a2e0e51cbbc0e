"""A contact sheet of a prepared data set: a few images of each class and domain."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.data.prepared.arrow_files import map_domain
from fedsweep.data.prepared.card import StoreCard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK = "#404040"
RULE = "#E6E6E6"


def new_figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    """A figure of this size in inches with one plain pair of axes."""
    figure = empty_figure(width, height)
    return figure, figure.add_subplot()


def empty_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    r"""A user's name or title as matplotlib shows it: between two `$` it would read a formula.

    >>> print(plain("from 5$ to 10$"))
    from 5\$ to 10\$
    """
    return text.replace("$", r"\$")


@contextmanager
def without_glyphs() -> Iterator[None]:
    """Without warnings on characters that the font lacks, such as those of Chinese names: they are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG; without the version of matplotlib, the same numbers give the same bytes.

    Raises:
        UserError: it cannot be written.
    """
    from fedsweep.common.errors import UserError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with without_glyphs():
            figure.savefig(
                path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.12, metadata={"Software": None}
            )
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None


MOST_CLASSES = 16
TILE = 0.72
"""Inches of an image on the page."""
GAP = 0.06
"""Between two images, as a share of one."""


def contact_sheet(folder: Path, card: StoreCard, path: Path) -> int:
    """Write a PNG with a row per domain and a column per class; returns the number of classes shown.

    Of more than 16 classes 16 are shown, evenly spaced. Where there are few domains, each has several rows.
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
    """Up to `count` indices, evenly spaced from the first one on."""
    return [first + (last - first) * place // count for place in range(count)][: last - first] if last > first else []


def _draw(page: np.ndarray, card: StoreCard, names: list[str], rows: int, path: Path) -> None:
    wide, high = len(names), len(card.domains) * rows
    figure, axes = new_figure(TILE * wide, TILE * high)
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
    some = f"{wide} of {len(card.class_names)} classes" if wide < len(card.class_names) else f"{wide} classes"
    axes.set_xlabel(f"{card.name}, {card.images:,} images at {card.size} px, {some}", fontsize=9, loc="left")
    save(figure, path)


def shorten(name: str, most: int = 24) -> str:
    """A name that fits beside a picture, as matplotlib's texts want it."""
    return plain(name if len(name) <= most else f"{name[: most - 1]}…")
