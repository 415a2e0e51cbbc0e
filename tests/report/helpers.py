"""Functions that make a table from trials, and read the rows of printed tables."""

import io
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.formats.terminal import TerminalTable
from fedsweep.report.table import AblationTable
from fedsweep.results import SweepManifest
from fedsweep.results.table_columns import check_columns


def tabulate(manifest: SweepManifest | Callable[..., SweepManifest], trials: Any, **changes: Any) -> AblationTable:
    """Return the report's table of `trials`; `manifest` is a manifest, or a function that makes one from `changes`."""
    sweep = manifest if isinstance(manifest, SweepManifest) else manifest(**changes)
    return AblationTable(sweep, summarise(sweep, trials.records))


def printed(table: AblationTable, width: int = 100) -> str:
    """Return the table as a terminal with `width` columns shows it."""
    console = Console(width=width, file=(file := io.StringIO()), color_system=None)
    console.print(TerminalTable(table))
    return file.getvalue()


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of the first Markdown table in a report by row, with its heading."""
    return _cells(markdown.partition("\n## ")[0])


def by_domain(markdown: str) -> list[list[str]]:
    """Return the cells of the Markdown table of accuracies by domain, row by row."""
    return _cells(markdown.partition("## By domain")[2])


def accepts_columns(manifest: SweepManifest, trials: Any, names: Iterable[str]) -> None:
    """Raise UserError if one of the given column names, taken alone, is not accepted by `--columns`."""
    metrics = {name for trial in trials for record in trial.history for name in record.metrics}
    for name in names:
        check_columns([name], metrics, manifest.metric, "`--columns`", manifest.varied)


def _cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
