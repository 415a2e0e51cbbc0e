"""What the verbs print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedsweep.arms import arm_label
from fedsweep.history import RoundRecord
from fedsweep.marks import stand_in, warning
from fedsweep.store import count_outcomes

if TYPE_CHECKING:
    from fedsweep.experiment import RunConfig
    from fedsweep.sweep.plan import Plan
    from fedsweep.sweep.tuner import SweepResult

PIPED_WIDTH = 120
"""Columns where there is no terminal whose width could be asked: enough for every column of the table."""


def progress_console() -> Console:
    """Progress goes to stderr, so that what a command prints can be piped."""
    return _console(sys.stderr)


def result_console() -> Console:
    """Results go to stdout."""
    return _console(sys.stdout)


def _console(file: TextIO) -> Console:
    width = None if file.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=file, highlight=False, markup=False, width=width)  # `[art]` is a value, not a style


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plan_table(name: str, axes: Mapping[str, Any], arms: Sequence[Mapping[str, Any]] | None) -> Table:
    """The arms of a grid, or the ranges of a sampled search."""
    if arms is not None:
        table = Table("#", "arm", title=name, title_justify="left")
        for number, arm in enumerate(arms, 1):
            table.add_row(str(number), arm_label(arm))
        return table
    table = Table("hyperparameter", "sampled from", title=name, title_justify="left")
    for dotted, axis in axes.items():
        kind, values = next((kind, values) for kind, values in axis.model_dump().items() if values is not None)
        table.add_row(dotted, f"{kind} {list(values)}")
    return table


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


def show_recorded(console: Console, config: RunConfig, folder: Path, page_command: str) -> None:
    """Where a run is, which command opens MLflow's page, and what took a generator's place in it."""
    picture = " with `tsne.png`" if config.evaluation.tsne_classes else ""
    console.print(f"Recorded in {relative(folder)}{picture} and MLflow; `{page_command}` opens it.")
    if made := stand_in(config.marks()):
        console.print(warning(made), style="yellow")


def show_plan(plan: Plan, estimate: bool = True) -> None:
    """Arms, trials, rounds, and how long one measured round says that they will take."""
    from fedsweep.sweep.estimate import estimate_seconds
    from fedsweep.sweep.tuner import concurrency

    console = result_console()
    console.print(plan_table(plan.name, plan.space.space, plan.space.arms() if plan.sampled is None else None))
    rounds, side = plan.base.federation.rounds, concurrency(plan.space.resources)
    console.print(
        f"{plan.num_trials} trials around {plan.space.experiment}, of {rounds} rounds "
        f"({plan.num_trials * rounds} in all), seeds "
        f"{', '.join(map(str, plan.space.seeds))}, search {plan.space.search.name}, scheduler "
        f"{plan.space.scheduler.name}, {side} at a time."
    )
    if estimate:
        with console.status("measuring one round"):
            seconds = estimate_seconds(plan, side)
        console.print(f"About {duration(seconds)}, from one round of the experiment measured now.")


def show_sweep(result: SweepResult, plan: Plan, page_command: str) -> None:
    """Report, close the parent run, and say where things are and which command opens MLflow's page."""
    from fedsweep.report import write_report

    console = result_console()
    folder = result.sweep.folder / "report"
    if any(trial.history for trial in result.trials):
        made = write_report(result.sweep.manifest(), result.trials, folder)
        console.print(made.renderable)
    tally = count_outcomes(result.trials)
    result.recorder.close_sweep(
        "KILLED" if result.interrupted else "FINISHED",
        {f"trials/{name}": float(number) for name, number in tally.items()},
        folder if folder.exists() else None,
    )
    console.print(f"Report: {relative(folder)}   MLflow: {page_command}   Sweep: {result.sweep.folder.name}")
    if refused := result.recorder.unsynced:
        console.print(
            f"MLflow refused {len(refused)} writes; the same command with --resume repeats them.", style="yellow"
        )
    if result.interrupted:
        console.print(
            f"Stopped with {tally['finished']} of {plan.num_trials} trials finished; "
            "the same command with --resume goes on."
        )
        raise SystemExit(130)
    if tally["failed"]:
        console.print(
            f"{tally['failed']} trials failed; their tracebacks are in MLflow and in {relative(result.sweep.folder)}."
        )
        raise SystemExit(1)


def relative(path: Path) -> str:
    """The path as a person at this prompt would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
