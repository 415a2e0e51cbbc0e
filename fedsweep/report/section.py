"""A table below the table: with a heading, and what its numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def markdown(self) -> str:
        """Heading, table and explanation."""
        table = markdown_table(self.head, self.rows, [place < self.words for place in range(len(self.head))])
        return "\n\n".join([f"## {self.title}", table, self.explained])
