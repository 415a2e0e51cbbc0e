"""The ablation table for a terminal of any width."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedsweep.report.arm_statistics import asked_columns
from fedsweep.report.declared_comparisons import declared_section
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.text_tables import (
    SEEDS_AND_IMAGES,
    TextColumn,
    comparison_title,
    fitting,
    instead_of_objective,
    terminal_table,
    width_of,
)
from fedsweep.report.units_and_labels import IN_DOMAIN, NOTHING, OUT_OF_DOMAIN, arm_words
from fedsweep.results.arms import short_names

MOST_DECLARED = 24  # longer tables of declared comparisons are not printed
NOTE_WIDTH = 16  # least width of the notes column; if there is less space, notes are printed below the table
DROPPED_FIRST = ("note", "worst client", "MB sent", "worst domain", "paper")
HELD_OUT_DROPPED_FIRST = ("note", "worst client", "worst domain", "MB sent", "paper", IN_DOMAIN, OUT_OF_DOMAIN)
"""The order if an arm holds out domains. In that case, the worst domain matters less than the megabytes sent."""
HEADINGS = {IN_DOMAIN: "in\ndomain", OUT_OF_DOMAIN: "out of\ndomain"}
"""Headings that are split into two lines, since their cells are narrow."""


@dataclass(frozen=True)
class TerminalTable:
    """The table, findings and legend for a terminal. Columns that do not fit are hidden; numbers are never cut off."""

    table: AblationTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.table.cells()
        columns = self._columns(rows)
        asked = [column.heading for column in asked_columns(self.table.manifest)]
        kept, dropped = fitting(columns, options.max_width, self._order(asked))
        yield self._grid(kept, self.table.manifest.name)
        yield from self._apart(columns, [name for name in asked if name in dropped], options.max_width)
        if "note" in dropped:
            for one, row in zip(self.table.arms, rows, strict=True):
                if (note := row.get("note", NOTHING)) != NOTHING:
                    yield Text(f"{arm_words(one.arm.values, self.table.names)}: {note}.")
        yield from self._by_mean(options.max_width)
        yield from self._declared(options.max_width)
        yield Text()
        yield from map(Text, self.table.findings())
        yield Text()
        hidden = [name for name in dropped if name in rows[0] and name != "note" and name not in asked]
        extra = (
            [f"Columns hidden because the terminal is too narrow: {', '.join(hidden)} (see table.md)."]
            if hidden
            else []
        )
        yield Text(" ".join([*self.table.caption(), *extra]), style="dim")

    def _columns(self, rows: Sequence[Mapping[str, str]]) -> list[TextColumn]:
        short = short_names(self.table.names)
        return [
            TextColumn(
                name,
                [row[name] for row in rows],
                heading=HEADINGS.get(name, short.get(name, name)),
                words=name in PROSE or name in short,
                wraps=name in ("arm", "note") or name in short,
                enough=NOTE_WIDTH if name == "note" else None,
            )
            for name in rows[0]
        ]

    def _by_mean(self, width: int) -> Iterable[Text | Table]:
        """Yield, for each other mean, a table that compares the arms by it, and a sentence that names its metric."""
        for name, other in self.table.by_mean.items():
            columns = self._columns(other.comparison_cells())
            kept, dropped = fitting(columns, width, ("paper", "sd"))
            hidden = [one.name for one in columns if one.name in dropped]
            more = f" Columns that do not fit: {', '.join(hidden)} (see table.csv)." if hidden else ""
            yield Text()
            yield self._grid(kept, comparison_title(name))
            yield Text(instead_of_objective(self.table.manifest, other.manifest.metric) + more, style="dim")

    def _declared(self, width: int) -> Iterable[Text | Table]:
        """Yield the table of the declared comparisons, or a sentence if the table would be long."""
        section = declared_section(self.table.arms, self.table.declared)
        if section is None:
            return
        yield Text()
        if len(section.rows) > MOST_DECLARED:
            yield Text(f"{section.title}: {len(section.rows)} (see declared.csv and table.md).")
            return
        grid, hidden = section.terminal(width, ("n", SEEDS_AND_IMAGES, "95% interval"))
        yield grid
        more = f" Columns that do not fit: {', '.join(hidden)} (see declared.csv)." if hidden else ""
        yield Text(section.explained + more, style="dim")

    def _order(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that may be dropped, in the order in which they are dropped.

        The columns in `asked`, which the search space requests, are dropped last.
        """
        kept = {*asked, *(["MB sent"] if self.table.manifest.against is not None else [])}
        order = HELD_OUT_DROPPED_FIRST if self.table.means else DROPPED_FIRST
        return (*(name for name in order if name not in kept), *reversed(asked))

    def _apart(self, columns: Sequence[TextColumn], names: Sequence[str], width: int) -> Iterable[Text | Table]:
        """Yield additional tables for the columns `names`, which did not fit into the main table.

        Each additional table follows an empty line. It contains the columns that identify the arms, and as many of the
        columns `names` as fit into `width` terminal cells.
        """
        arms = [one for one in columns if one.name == "arm" or one.name in self.table.names]
        left = [one for name in names for one in columns if one.name == name]
        while left:
            ways = ([*arms, *left[:many]] for many in range(len(left), 1, -1))
            shown = next((way for way in ways if width_of(way) <= width), [*arms, left[0]])
            yield Text()
            yield self._grid(shown)
            left = left[len(shown) - len(arms) :]

    def _grid(self, columns: Sequence[TextColumn], title: str | None = None) -> Table:
        return terminal_table(columns, title)
