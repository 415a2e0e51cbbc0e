"""The table of rounds that `fedsweep run` prints, and its progress bars."""

import json
import sys
from collections.abc import Sequence
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedsweep.cli import output
from fedsweep.common.progress import LeftColumn, TimeLeft
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.history import RoundRecord
from fedsweep.types import RoundListener

OF_DOMAINS = "accuracy/domain/", "accuracy/out_of_domain/"
"""The beginnings of the metrics of single domains."""


class RoundTable:
    """A table of a run's rounds on stdout, with a progress bar and a time estimate on stderr."""

    def __init__(self, config: RunConfig, as_json: bool) -> None:
        """Choose the columns of the table.

        If the clients hold out test images, include the mean and the worst accuracy of the clients' own models. If they
        hold out tuning images, include the mean on these.
        """
        self.as_json = as_json
        self.shown: dict[str, str] = {}
        if config.partition.test_share > 0:
            self.shown |= {"clients": "accuracy/clients/mean", "worst client": "accuracy/clients/worst"}
        if config.partition.tuning_share > 0:
            self.shown |= {"clients, tuning": "validation/accuracy/clients/mean"}
        self.shown |= {"validation": "validation/accuracy/mean"} if config.data.validation_fraction else {}
        self.shown |= {"mean": "accuracy/mean", "worst": "accuracy/worst_domain"}
        self.shown |= {one: f"accuracy/domain/{one}" for one in config.data.training_domains}
        held_out = config.data.held_out_domains
        self.shown |= {"out: mean": "accuracy/out_of_domain_mean"} if len(held_out) > 1 else {}
        self.shown |= {f"out: {one}": f"accuracy/out_of_domain/{one}" for one in held_out}
        self.console = output.progress_console()
        self.left_out = self._fit(output.result_console().width) if sys.stdout.isatty() and not as_json else 0
        self.rounds, self.last, self.time = config.federation.rounds, -1, TimeLeft()
        columns = (
            TextColumn("{task.description}", table_column=Column(min_width=STEP_WIDTH, no_wrap=True)),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            LeftColumn(lambda task: self.left() if task.id == self.task else None),
        )
        in_terminal = sys.stdout.isatty()  # print rows above the bar, but keep them on stdout if it is a pipe
        self.progress = Progress(*columns, console=self.console, transient=True, redirect_stdout=in_terminal)
        self.task = self.progress.add_task("rounds", total=self.rounds)

    def __enter__(self) -> Self:
        if self.left_out:
            domains = "1 domain is" if self.left_out == 1 else f"{self.left_out} domains are"
            self.console.print(f"{domains} left out of the table, because the terminal is too narrow.")
        if not self.as_json:
            self._print(self.headings)
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def add(self, record: RoundRecord) -> None:
        """Print the row of a round. The duration is left out, so that repeated runs print the same rows."""
        if self.as_json:
            print(json.dumps({"round": record.round, **record.metrics}), flush=True)
        else:
            loss = record.metrics.get("loss/train")
            values = map(record.metrics.get, self.shown.values())
            shown = ["" if value is None else f"{value:.2%}" for value in values]  # no value: not evaluated
            self._print([str(record.round), *shown, "" if loss is None else f"{loss:.4f}"])
        self.last = record.round
        if record.round:  # round 0 only evaluates
            self.time.add(record.seconds)
        self.progress.update(self.task, completed=record.round)

    def left(self) -> float | None:
        """Return the estimated number of seconds until the last round ends, or None if it is not known yet."""
        return self.time.left(self.rounds - max(self.last, 0))

    def stop(self, where: str) -> None:
        """Print that the run is stopping, and what is kept in the results folder `where`."""
        kept = f"rounds 0 to {self.last} are kept in {where}" if self.last > 0 else f"round 0 is kept in {where}"
        self.console.print(
            f"Stopping ... {kept if self.last >= 0 else 'no round has been recorded yet'}.", soft_wrap=True
        )

    @property
    def headings(self) -> list[str]:
        """The headings of the columns."""
        return ["round", *self.shown, "train loss"]

    def _fit(self, width: int) -> int:
        """Leave out the last domains whose columns do not fit into a terminal of `width` columns, and count them."""
        domains = [one for one, metric in self.shown.items() if metric.startswith(OF_DOMAINS)]
        left_out = 0
        while domains and len(self._row(self.headings)) > width:
            del self.shown[domains.pop()]
            left_out += 1
        return left_out

    def _row(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(max(9, len(head))) for cell, head in zip(cells, self.headings, strict=True))

    def _print(self, cells: Sequence[str]) -> None:
        print(self._row(cells), flush=True)


STEP_WIDTH = len("training clients")


class RoundBar(RoundListener):
    """A progress bar for the steps of a round: the clients that train, and the images that are tested.

    It is shown only on a terminal.
    """

    def __init__(self, progress: Progress) -> None:
        """Add the bar to `progress`."""
        self.progress, self.images, self.seen = progress, 0, 0
        self.task = progress.add_task("building", total=None)

    def training(self, done: float, clients: int) -> None:
        """Show the number of clients that have finished local training."""
        self.images = 0
        self._show("training clients", done, clients)

    def testing(self, images: int) -> None:
        """Show that an evaluation on `images` images begins."""
        self.images, self.seen = images, 0
        self._show("testing images", 0, images)

    def tested(self, images: int) -> None:
        """Count the tested images. Predictions that a method makes during training are not counted."""
        if self.images:
            self.seen = min(self.seen + images, self.images)
            self._show("testing images", self.seen, self.images)

    def _show(self, step: str, done: float, total: int) -> None:
        if self.progress.console.is_terminal:
            self.progress.update(self.task, description=step, completed=done, total=total)
