"""A table below the table: with a heading, and what its numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedsweep.report.wording import markdown_table

GAP = 2
"""Blanks between columns on a terminal."""


@dataclass(frozen=True)
class Section:
    """Cells as text; all rows as long as the head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    """So many columns from the left are words; the others are numbers."""
    explained: str
    papers: Sequence[bool] = ()
    """Of each row whether it is what a paper printed for the arm above; none where it is empty."""

    def markdown(self) -> str:
        """Heading, table and explanation."""
        papers = self.papers or [False] * len(self.rows)
        rows = [[f"*{row[0]}*", *row[1:]] if paper else row for row, paper in zip(self.rows, papers, strict=True)]
        table = markdown_table(self.head, rows, [place < self.words for place in range(len(self.head))])
        return "\n\n".join([f"## {self.title}", table, self.explained])

    def fitting(self, width: int, order: Sequence[str]) -> tuple[Section, list[str]]:
        """The section without as many of the columns in `order` as `width` cells take, and those that were left out."""
        ways = (order[:many] for many in range(len(order) + 1))
        dropped = next((names for names in ways if self._width(names) <= width), order)
        kept = [place for place, name in enumerate(self.head) if name not in dropped]
        rows = [[row[place] for place in kept] for row in self.rows]
        words = sum(place < self.words for place in kept)
        head = [self.head[place] for place in kept]
        return replace(self, head=head, rows=rows, words=words), [name for name in self.head if name in dropped]

    def _width(self, dropped: Sequence[str]) -> int:
        """The least width at which nothing but words between spaces is broken."""
        widths = []
        for place, name in enumerate(self.head):
            if name not in dropped:
                cells = [row[place] for row in self.rows]
                broken = [word for cell in cells for word in cell.split()] if place < self.words else cells
                widths.append(max(map(cell_len, [*name.split(), *broken])))
        return sum(widths) + GAP * (len(widths) - 1)

    def terminal(self) -> Table:
        """The cells for a `rich` console; headings and words may be folded, numbers not."""
        grid = Table(
            box=SIMPLE_HEAD,
            title=self.title,
            title_justify="left",
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, name in enumerate(self.head):
            words = place < self.words
            heading = name if words else name.replace(" ", "\n")
            grid.add_column(Text(heading), justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for row in self.rows:
            grid.add_row(*map(Text, row))
        return grid
