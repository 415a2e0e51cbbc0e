"""A figure without pyplot, which would keep it and choose a screen."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
