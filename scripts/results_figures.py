"""Draw the figures of docs/results.md from the tables in docs/results/.

    python scripts/results_figures.py           # write docs/images/results_*.png
    python scripts/results_figures.py --check   # exit with code 1 if a picture is outdated

Each picture contains a digest of its numbers, which is compared with the tables.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedsweep.report.figures import STYLE
from fedsweep.report.figures.canvas import COLOURS, GREY, logarithmic_if_wide, panels
from fedsweep.results.tsne_files import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
DPI = 150
NUMBER = r"[+-]?\d+(?:\.\d+)?"
NAMES = {
    "all_large": "AllLarge", "all_small": "AllSmall", "inclusivefl": "InclusiveFL", "depthfl": "DepthFL",
    "fedra": "FedRA", "fedms": "FedMS", "ft": "FT", "lfft": "LFFT", "promptfl": "PromptFL", "fedbrick": "FedBRICK",
    "hetlora": "HetLoRA", "flexlora": "FlexLoRA", "flora": "FLoRA",
}  # fmt: skip
"""Names in the figures for the methods of the tables."""
MARGIN = 1.4
"""Margin of error, in percentage points, of a share near 95 % among 1,000 simulated sweeps."""
FILL = {"normal": "", "skewness 6, 3 points": "white"}
"""Fill of a marker by the noise, as the table names it; an empty string means the marker's own colour."""


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Table:
    """A table of a Markdown page."""

    place: str
    """The page and the heading, for error messages."""
    head: list[str]
    rows: list[list[str]]

    def cell(self, row: str, column: str) -> str:
        """Return the text, without bold type, of the cell in `column` and in the row whose first cell is `row`.

        Raises:
            LookupError: There is no such row, or more than one.
        """
        found = [cells for cells in self.rows if cells[0] == row]
        if len(found) != 1:
            raise LookupError(f"{self.place}: {len(found)} rows named {row!r}, expected 1")
        return found[0][self.head.index(column)].replace("**", "")


def tables(page: Path) -> list[tuple[str, Table]]:
    """Return all tables of a page, each with the heading above it."""
    found, heading = list[tuple[str, Table]](), ""
    for block in re.findall(r"^#+ .+$|(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        if block.startswith("#"):
            heading = block.lstrip("# ")
            continue
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        found.append((heading, Table(f"{page.name}, {heading!r}", head, rows)))
    return found


def table(folder: Path, page: str, heading: str, column: str) -> Table:
    """Return the table that has the column `column` below the heading `heading` of a page.

    Raises:
        LookupError: There is no such table, or more than one.
    """
    below = [one for title, one in tables(folder / page) if title == heading and column in one.head]
    if len(below) != 1:
        raise LookupError(f"{page}: {len(below)} tables with the column {column!r} below {heading!r}, expected 1")
    return below[0]


def number(text: str) -> float:
    """Return the number at the start of a cell, such as 17.24 or +0.5.

    Raises:
        ValueError: The cell does not start with a number.
    """
    if not (found := re.match(NUMBER, text)):
        raise ValueError(f"no number at the start of {text!r}")
    return float(found[0])


def estimate(label: str, text: str) -> Estimate:
    """Return the value and the interval of a cell.

    >>> estimate("DepthFL", "+2.58 (2.02 to 3.15)")
    Estimate(label='DepthFL', value=2.58, low=2.02, high=3.15)

    Raises:
        ValueError: The cell does not consist of a number and an interval.
    """
    if not (found := re.match(rf"({NUMBER})\D*? \(?({NUMBER}) to ({NUMBER})", text)):
        raise ValueError(f"no number with an interval in {text!r}")
    value, low, high = map(float, found.groups())
    return Estimate(label, value, low, high)


def differences(one: Table) -> list[Estimate]:
    """Return, for each arm but the baseline, the arm's difference from the baseline with its interval."""
    return [
        estimate(NAMES[row[0].split()[0]], f"{one.cell(row[0], 'difference')} {one.cell(row[0], '95% interval')}")
        for row in one.rows
        if "baseline" not in row
    ]


Groups = dict[str, list[Estimate]]
"""Estimates by experiment."""


def read_depth_methods(folder: Path) -> tuple[Groups, Groups]:
    """Return the differences between other depth methods and FedRA, and the effect of BRICKs on each depth method."""
    headings = {
        "PACS, Table 1": "Table 1 on PACS",
        "digits, Table 1": "Table 1 on digits",
        "digits, Table 2": "Table 2 on digits: five clients for each style",
        "digits, Table 4": "Table 4 on digits: depths drawn anew in every round",
    }
    methods = {
        label: differences(table(folder, "fedra.md", heading, "difference")) for label, heading in headings.items()
    }
    bricks = {}
    for images in ("PACS", "digits"):
        one = table(folder, "fedbrick.md", f"BRICKs over each depth method, on {images}", "effect of BRICKs over")
        bricks[images] = [estimate(NAMES[name], one.cell("accuracy, points", name)) for name in one.head[1:]]
    return methods, bricks


def read_depth_or_rank(folder: Path) -> dict[str, Groups]:
    """Return the differences between tuned methods and FedRA on PACS and on digits, keyed by what is equal."""
    return {
        equal: {
            images: differences(table(folder, "ranks.md", f"{equal}, on {images}", "learning rate"))
            for images in ("PACS", "digits")
        }
        for equal in ("Equal bytes", "Equal memory")
    }


def read_fedag(folder: Path) -> Groups:
    """Return the differences between other methods and FedAG on PACS, on a held-out domain and on training domains."""
    one = table(folder, "fedag.md", "Table 2 on PACS: each domain held out in turn", "mean minus FedAG")
    columns = {"out of domain": "mean minus FedAG", "in domain": "in domain minus FedAG"}
    return {
        label: [estimate(row[0], one.cell(row[0], column)) for row in one.rows if "baseline" not in row]
        for label, column in columns.items()
    }


def read_fedms(folder: Path) -> tuple[dict[str, tuple[float, float]], Groups]:
    """Return the MB sent and the accuracy of each method without an attack, and the accuracy that each attack costs."""
    one = table(folder, "fedms.md", "Malicious clients", "no attack")
    names = [row[0] for row in one.rows]
    sent = {NAMES[name]: (number(one.cell(name, "MB sent")), number(one.cell(name, "no attack"))) for name in names}
    costs = {
        attack: [estimate(NAMES[name], one.cell(name, f"cost of {attack}")) for name in names]
        for attack in ("reversed updates", "reversed weights")
    }
    return sent, costs


Shares = dict[str, dict[int, float]]
"""Shares in percent, by column and by number of seeds."""


def read_statistics(folder: Path) -> dict[str, Shares]:
    """Return the percentages in the table of simulated sweeps, keyed by the noise in `FILL`."""
    one = table(folder, "platform.md", "Coverage and error rates on simulated sweeps", "bootstrap")
    seeds = one.head.index("seeds")
    return {
        noise: {
            column: {
                int(row[seeds]): number(row[place])
                for row in one.rows
                if row[0] == noise and row[place] != "-"
            }
            for place, column in enumerate(one.head)
            if place > seeds
        }
        for noise in FILL
    }  # fmt: skip


def draw_depth_methods(data: tuple[Groups, Groups]) -> Figure:
    """Draw each method's difference from FedRA on the left, and the effect of BRICKs on each method on the right."""
    methods, bricks = data
    figure, (left, right) = panels(2, 2, 4.9, 3.9)
    dots(left, methods, COLOURS)
    left.set_title("FedRA")
    left.set_xlabel("other method minus FedRA (percentage points)")
    dots(right, bricks, COLOURS)
    right.set_title("FedBRICK")
    right.set_xlabel("with BRICKs minus without (percentage points)")
    return figure


def draw_depth_or_rank(data: dict[str, Groups]) -> Figure:
    """Draw each method's difference from FedRA: at equal bytes (left) and at equal memory (right)."""
    return side_by_side(data, "FedRA", 3.6)


def draw_fedag(data: Groups) -> Figure:
    """Draw each method's difference from FedAG: on a held-out domain (left) and on training domains (right)."""
    return side_by_side({f"Accuracy {name}": {name: estimates} for name, estimates in data.items()}, "FedAG", 4.0)


def side_by_side(data: dict[str, Groups], baseline: str, height: float) -> Figure:
    """Draw differences from a baseline in two panels, keyed by their titles, with common axes."""
    figure, both = panels(2, 2, 4.9, height)
    both[1].sharex(both[0])
    for axes, (title, groups) in zip(both, data.items(), strict=True):
        dots(axes, groups, COLOURS)
        axes.set_title(title)
        axes.set_xlabel(f"other method minus {baseline} (percentage points)")
    both[1].tick_params(labelleft=False)
    return figure


def draw_fedms(data: tuple[dict[str, tuple[float, float]], Groups]) -> Figure:
    """Draw accuracy against megabytes on the left, and the accuracy that attacks cost on the right."""
    sent, costs = data
    figure, (left, right) = panels(2, 2, 4.9, 3.6)
    for name, (megabytes, accuracy) in sent.items():
        own = name == "FedMS"
        left.plot(megabytes, accuracy, "o", color=COLOURS[0] if own else INK, markersize=9 if own else 7)
        side = -1 if megabytes > 50 else 1
        left.annotate(
            f"{name}, {megabytes:g} MB", (megabytes, accuracy), (9 * side, 0), textcoords="offset points",
            ha="right" if side < 0 else "left", va="center", fontsize=9, color=INK,
        )  # fmt: skip
    logarithmic_if_wide(left.xaxis, [megabytes for megabytes, _ in sent.values()])
    left.grid()
    left.set(xlim=(0.8, 1000), ylim=(65, 95), ylabel="accuracy of the clients' own models (%)")
    left.set_xlabel("sent in the whole run (MB)")
    left.set_title("Without an attack")
    dots(right, costs, COLOURS)
    right.set_title("Two malicious clients of ten")
    right.set_xlabel("accuracy lost (percentage points)")
    return figure


def draw_statistics(data: dict[str, Shares]) -> Figure:
    """Draw the coverage of the intervals on the left, and the share of detected differences on the right."""
    from matplotlib.lines import Line2D

    figure, (left, right) = panels(2, 2, 4.9, 4.0)
    seeds = [*data["normal"]["mean"]]
    kinds = {"mean": "mean of the baseline", "difference": "difference, t", "bootstrap": "difference, bootstrap"}
    left.axhspan(95 - MARGIN, 95 + MARGIN, color=GREY, alpha=0.35, linewidth=0)
    left.axhline(95, color=INK, linewidth=1)
    for place, (column, colour) in enumerate(zip(kinds, COLOURS, strict=False)):
        for noise, shift in zip(FILL, (-0.05, 0.05), strict=True):
            shares = data[noise][column]
            x = [seeds.index(one) + (place - 1) * 0.24 + shift for one in shares]
            left.plot(x, [*shares.values()], "o", color=colour, markerfacecolor=FILL[noise] or colour)
    left.set(ylim=(87, 98), ylabel="share of simulated sweeps (%)")
    left.set_title("95 % intervals that contain the true value")
    found: dict[str, tuple[str, str, Literal["-", "--"]]] = {
        "found 3": ("3 points, paired test", COLOURS[0], "-"),
        "found 3, unpaired": ("3 points, unpaired test", COLOURS[0], "--"),
        "found 1.5": ("1.5 points, paired test", COLOURS[1], "-"),
        "found 1.5, unpaired": ("1.5 points, unpaired test", COLOURS[1], "--"),
        "false": ("no difference (false alarm)", COLOURS[2], "-"),
    }
    for column, (_, colour, line) in found.items():
        for noise, style in zip(FILL, (line, ""), strict=True):
            detected = [data[noise][column][one] for one in seeds]
            right.plot(detected, linestyle=style, marker="o", color=colour, markerfacecolor=FILL[noise] or colour)
    right.set(ylim=(-3, 103), ylabel="share of simulated sweeps (%)")
    right.set_title("Differences that are detected")
    of_noise = [
        Line2D([], [], color=INK, linestyle="", marker="o", markerfacecolor=FILL[noise] or INK, label=f"noise: {noise}")
        for noise in data
    ]
    of_kinds = [
        Line2D([], [], color=colour, linestyle="", marker="o", label=label)
        for colour, label in zip(COLOURS, kinds.values(), strict=False)
    ]
    of_found = [
        Line2D([], [], color=colour, linestyle=line, marker="o", label=label) for label, colour, line in found.values()
    ]
    for axes, handles in ((left, of_kinds), (right, of_found)):
        legend_below(axes, handles + of_noise)
        axes.set_xticks(range(len(seeds)), [str(one) for one in seeds])
        axes.set_xlabel("seeds")
        axes.grid(axis="y")
    return figure


def dots(axes: Axes, groups: Groups, colours: Sequence[str]) -> None:
    """Draw a row for each label. Each row has a dot with an interval for each group that has the label."""
    from matplotlib.lines import Line2D

    labels = list(dict.fromkeys(one.label for estimates in groups.values() for one in estimates))
    height = 0.66 / len(groups)
    axes.axvline(0, color=INK, linewidth=1)
    for place, (estimates, colour) in enumerate(zip(groups.values(), colours, strict=False)):
        shift = (place - (len(groups) - 1) / 2) * height
        for one in estimates:
            y = labels.index(one.label) + shift
            axes.plot([one.low, one.high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
            axes.plot(one.value, y, "o", color=colour, markersize=5.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    if len(groups) > 1:
        handles = [
            Line2D([], [], color=colour, marker="o", label=name) for name, colour in zip(groups, colours, strict=False)
        ]
        legend_below(axes, handles)


def legend_below(axes: Axes, handles: list[Any]) -> None:
    """Add a legend of two columns below the label of the x-axis."""
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8.5, ncols=2, handlelength=2.8
    )


FIGURES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Figure]]] = {
    "results_depth_methods": (read_depth_methods, draw_depth_methods),
    "results_depth_or_rank": (read_depth_or_rank, draw_depth_or_rank),
    "results_fedag": (read_fedag, draw_fedag),
    "results_fedms": (read_fedms, draw_fedms),
    "results_statistics": (read_statistics, draw_statistics),
}
"""For each picture, the function that reads its numbers and the function that draws them."""


def digest(data: Any) -> str:
    """Return the SHA-256 of the numbers that a picture shows."""
    return hashlib.sha256(repr(data).encode()).hexdigest()


def drawn_from(picture: Path) -> str:
    """Return the digest of a picture's numbers, which is stored in the picture file."""
    from PIL import Image

    with Image.open(picture) as image:
        return str(image.info.get("Description", ""))


def write(results: Path, images: Path) -> list[Path]:
    """Draw all figures from the pages in `results` into `images`, and return their files."""
    from matplotlib import style

    written = []
    with style.context(STYLE, after_reset=True):
        for name, (read, draw) in FIGURES.items():
            data = read(results)
            path = images / f"{name}.png"
            draw(data).savefig(path, dpi=DPI, metadata={"Software": None, "Description": digest(data)})
            written.append(path)
    return written


def outdated(results: Path, images: Path) -> list[str]:
    """Return the names of the pictures whose numbers differ from the numbers in the tables."""
    return [name for name, (read, _) in FIGURES.items() if drawn_from(images / f"{name}.png") != digest(read(results))]


def main() -> None:
    """Draw all figures or, with `--check`, compare them with the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a picture is outdated")
    if parser.parse_args().check:
        old = outdated(DOCS / "results", DOCS / "images")
        sys.exit(f"outdated: {', '.join(old)}; run scripts/results_figures.py" if old else 0)
    for path in write(DOCS / "results", DOCS / "images"):
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
