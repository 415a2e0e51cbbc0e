"""The ablation table for a terminal of any width: a number is never cut, and what finds no room is named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedsweep.report.sections import GAP
from fedsweep.report.statistics import asked_columns
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.wording import IN_DOMAIN, NOTHING, OUT_OF_DOMAIN, arm_words, short_names

NOTE_WIDTH = 16
"""Least width for notes beside the numbers; narrower, and they stand below the table."""
DROPPED_FIRST = ("note", "worst client", "MB sent", "worst domain", "paper")
HELD_OUT_DROPPED_FIRST = ("note", "worst client", "worst domain", "MB sent", "paper", IN_DOMAIN, OUT_OF_DOMAIN)
"""Beside what is out of domain, the worst domain of the clients matters less than what was sent."""
HEADINGS = {IN_DOMAIN: "in\ndomain", OUT_OF_DOMAIN: "out of\ndomain"}
"""On two lines, where the cells are narrower than the words."""


@dataclass(frozen=True)
class TerminalTable:
    """Prints the table, what was found, and how to read it."""

    table: AblationTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, short = self.table.cells(), short_names(self.table.names)
        order = self._order()
        ways = [order[:many] for many in range(len(order) + 1)]
        fitting = (dropped for dropped in ways if _width(_without(rows, dropped), short) <= options.max_width)
        dropped = next(fitting, order)
        yield self._grid(_without(rows, dropped), short, self.table.manifest.name)
        asked = self._asked()
        yield from self._apart(rows, [name for name in asked if name in dropped], short, options.max_width)
        if "note" in dropped:
            yield from self._notes(rows)
        yield Text()
        yield from map(Text, self.table.findings())
        yield Text()
        hidden = [name for name in dropped if name in rows[0] and name != "note" and name not in asked]
        extra = [f"Not shown for want of width: {', '.join(hidden)} (see table.md)."] if hidden else []
        yield Text(" ".join([*self.table.caption(), *extra]), style="dim")

    def _asked(self) -> list[str]:
        return [column.heading for column in asked_columns(self.table.manifest)]

    def _order(self) -> tuple[str, ...]:
        """The columns that may go, the first one first; of those that were asked for the last one."""
        asked = self._asked()
        kept = {*asked, *(["MB sent"] if self.table.manifest.against is not None else [])}
        order = HELD_OUT_DROPPED_FIRST if self.table.means else DROPPED_FIRST
        return (*(name for name in order if name not in kept), *reversed(asked))

    def _apart(
        self, rows: Sequence[Mapping[str, str]], names: Sequence[str], short: Mapping[str, str], width: int
    ) -> RenderResult:
        """Columns that were asked for and found no room: beside the arms once more, as many at a time as fit."""
        arms = [name for name in rows[0] if name == "arm" or name in short]
        while names:
            ways = ([*arms, *names[:many]] for many in range(len(names), 1, -1))
            shown = next((way for way in ways if _width(_only(rows, way), short) <= width), [*arms, names[0]])
            yield Text()
            yield self._grid(_only(rows, shown), short)
            names = names[len(shown) - len(arms) :]

    def _grid(self, rows: Sequence[Mapping[str, str]], short: Mapping[str, str], title: str | None = None) -> Table:
        grid = Table(
            box=SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for column in rows[0]:
            words = column in PROSE or column in short
            grid.add_column(
                Text(HEADINGS.get(column, short.get(column, column))),
                justify="left" if words else "right",
                no_wrap=not _wraps(column, short),
                overflow="fold",
            )
        for one, row in zip(self.table.arms, rows, strict=True):
            grid.add_row(*map(Text, row.values()), style="bold" if one.is_baseline else "")
        return grid

    def _notes(self, rows: Sequence[Mapping[str, str]]) -> RenderResult:
        for one, row in zip(self.table.arms, rows, strict=True):
            if (note := row.get("note", NOTHING)) != NOTHING:
                yield Text(f"{arm_words(one.arm.values, self.table.names)}: {note}.")


def _wraps(column: str, short: Mapping[str, str]) -> bool:
    return column in ("arm", "note") or column in short


def _without(rows: Sequence[Mapping[str, str]], dropped: Sequence[str]) -> list[dict[str, str]]:
    return [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]


def _only(rows: Sequence[Mapping[str, str]], shown: Sequence[str]) -> list[dict[str, str]]:
    return [{name: row[name] for name in shown} for row in rows]


def _width(rows: Sequence[Mapping[str, str]], short: Mapping[str, str]) -> int:
    """The least width, in cells of the terminal, at which nothing but words between spaces is broken."""

    def least(column: str) -> int:
        heading = HEADINGS.get(column, short.get(column, column))
        texts = [*heading.splitlines(), *(row[column] for row in rows)]
        if column == "note":
            return min(NOTE_WIDTH, max(map(cell_len, texts)))
        return max(cell_len(word) for text in texts for word in (text.split() if _wraps(column, short) else [text]))

    return sum(least(column) + GAP for column in rows[0]) - GAP
