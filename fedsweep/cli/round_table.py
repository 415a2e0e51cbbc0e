"""What `fedsweep run` prints while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedsweep.results.history import RoundRecord
from fedsweep.terminal import progress_console


class RoundTable:
    """Rounds of one run as they end: rows on stdout, a bar with a time estimate on stderr."""

    def __init__(
        self, rounds: int, domains: Sequence[str], as_json: bool, clients: bool = False, held_out: Sequence[str] = ()
    ) -> None:
        """With `clients`, the mean and worst accuracy of clients' own models stand before those of the global one.

        Domains that are `held_out` come last.
        """
        self.as_json = as_json
        of_clients = {"clients": "accuracy/clients/mean", "worst client": "accuracy/clients/worst"} if clients else {}
        of_domains = {"mean": "accuracy/mean", "worst": "accuracy/worst_domain"}
        of_domains |= {one: f"accuracy/domain/{one}" for one in domains}
        others = {"out: mean": "accuracy/out_of_domain_mean"} if len(held_out) > 1 else {}
        self.shown = (
            of_clients | of_domains | others | {f"out: {one}": f"accuracy/out_of_domain/{one}" for one in held_out}
        )
        self.headings = ["round", *self.shown, "train loss"]
        self.console = progress_console()
        self.progress = Progress(
            TextColumn("round"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left about"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # rows stand above the bar; in a pipe they stay in the pipe
        )
        self.task = self.progress.add_task("rounds", total=rounds)

    def __enter__(self) -> Self:
        if not self.as_json:
            self._print(self.headings)
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def add(self, record: RoundRecord) -> None:
        """Print a round. Seconds are left out: they alone differ between repetitions of a run."""
        if self.as_json:
            print(json.dumps({"round": record.round, **record.metrics}), flush=True)
        else:
            loss = record.metrics.get("loss/train")
            shown = [f"{record.metrics[name]:.2%}" for name in self.shown.values()]
            self._print([str(record.round), *shown, "" if loss is None else f"{loss:.4f}"])
        self.progress.update(self.task, completed=record.round)

    def _print(self, cells: Sequence[str]) -> None:
        """A row under the headings, each column as wide as its heading and at least nine."""
        print(
            "  ".join(cell.rjust(max(9, len(head))) for cell, head in zip(cells, self.headings, strict=True)),
            flush=True,
        )
