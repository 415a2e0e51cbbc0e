"""A table below the table: with a heading, and what its numbers are."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedsweep.report.wording import markdown_table


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

    def csv(self) -> str:
        """The cells as they are shown."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()

    def terminal(self) -> Table:
        """The cells for a `rich` console; headings may be folded, numbers not."""
        grid = Table(box=SIMPLE_HEAD, title=self.title, title_justify="left", show_edge=False, pad_edge=False)
        for place, name in enumerate(self.head):
            words = place < self.words
            grid.add_column(Text(name), justify="left" if words else "right", no_wrap=not words)
        for row in self.rows:
            grid.add_row(*map(Text, row))
        return grid
