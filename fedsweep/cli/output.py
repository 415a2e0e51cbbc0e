"""What the verbs print."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsweep.common.errors import disk_is_full, one_line
from fedsweep.common.yaml_values import Json
from fedsweep.results import count_outcomes
from fedsweep.results.arms import agrees, arm_label
from fedsweep.results.provenance import stand_in, warning

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.results import Store
    from fedsweep.results.remote import Remote
    from fedsweep.sweep.cluster.cluster import Cluster
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.running.tuner import SweepResult
    from fedsweep.sweep.space.axes import Axis
    from fedsweep.tracking import Destination, Recorder

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


def plan_table(
    name: str,
    axes: Mapping[str, Axis],
    arms: Sequence[Mapping[str, Json]] | None,
    around: Mapping[str, Json] | None = None,
) -> Table:
    """The arms of a grid, or the ranges of a sampled search; below them, which axes are there in some arms only.

    Of arms `around` another one, only what differs from it is shown.
    """
    said = [f"{key} only where {axis.shown_conditions()}" for key, axis in axes.items() if axis.when]
    caption = Text("\n".join(said), style="none") if said else None
    columns = ("#", "arm") if arms is not None else ("hyperparameter", "sampled from")
    table = Table(*columns, title=name, title_justify="left", caption=caption, caption_justify="left")
    for number, arm in enumerate(arms or (), 1):
        shown = arm if around is None else {one: arm[one] for one in arm if not agrees({one: arm[one]}, around)}
        table.add_row(str(number), arm_label(shown or arm))
    for dotted, axis in axes.items() if arms is None else ():
        table.add_row(dotted, axis.shown())
    return table


def show_recorded(console: Console, config: RunConfig, folder: Path, page_command: str) -> None:
    """Where a run is, which command opens MLflow's page, and what took a generator's place in it."""
    picture = " with `tsne.png`" if config.evaluation.tsne_classes else ""
    console.print(f"Recorded in {relative(folder)}{picture} and MLflow; `{page_command}` opens it.")
    if made := stand_in(config.marks()):
        console.print(warning(made), style="yellow")


def show_plan(plan: Plan, estimate: bool = True, cluster: Cluster | None = None) -> None:
    """Arms, trials, rounds, and how long one measured round says that they will take."""
    from fedsweep.sweep.cluster.cluster import HERE
    from fedsweep.sweep.running.time_estimate import estimate as measured
    from fedsweep.sweep.running.tuner import side_by_side

    console = result_console()
    around = plan.space.baseline if plan.space.design == "one_factor" else None
    console.print(plan_table(plan.name, plan.space.space, plan.arms if plan.sampled is None else None, around))
    rounds, most = plan.base.federation.rounds, side_by_side(plan, cluster or HERE)
    packed = plan.space.resources.gpus_per_trial == "auto"
    side = f"as many at a time as fit, up to {most}" if packed else f"{most} at a time"
    console.print(
        f"{plan.num_trials} trials around {plan.space.experiment}, of {rounds} rounds "
        f"({plan.num_trials * rounds} in all), seeds "
        f"{', '.join(map(str, plan.space.seeds))}, search {plan.space.search.name}, scheduler "
        f"{plan.space.scheduler.name}, {side}."
    )
    if estimate:
        with console.status("measuring one round"):
            seconds, fit = measured(plan, most, cluster or HERE)
        together = f" with {fit} at a time" if packed else ""
        console.print(f"About {duration(seconds)}{together}, from one round of the experiment measured now.")


def show_sweep(result: SweepResult, plan: Plan, page_command: str) -> None:
    """Report, close the parent run, and say where things are and which command opens MLflow's page."""
    console = result_console()
    folder = result.sweep.folder / "report"
    lost = _report(result, folder, console)
    full = result.full or (lost is not None and disk_is_full(lost))
    tally = count_outcomes(result.trials)
    with delivering(progress_console()) as tell:
        result.recorder.close_sweep(
            "KILLED" if result.interrupted else "FINISHED",
            {f"trials/{name}": float(number) for name, number in tally.items()},
            folder if folder.exists() else None,
            tell,
        )
    result.sweep.remote.push()
    report = relative(folder) if folder.exists() else "none yet"
    console.print(f"Report: {report}   MLflow: {page_command}   Sweep: {result.sweep.folder.name}")
    show_undelivered(console, result.recorder, page_command)
    if full:
        console.print(f"No more can be written in {relative(result.sweep.folder)}: the disk is full.", style="yellow")
    away = result.away or show_unsent(console, result.sweep.remote, result.sweep.folder)
    if result.away:
        console.print(f"The sweep ended early, or is not whole in its store: {result.away}.", style="yellow")
    if result.interrupted:
        console.print(
            f"Stopped with {tally['finished']} of {plan.num_trials} trials finished; "
            "the same command with --resume goes on."
        )
        raise SystemExit(1 if full or away else 130)
    if tally["failed"]:
        console.print(
            f"{tally['failed']} trials failed; their tracebacks are in MLflow and in {relative(result.sweep.folder)}."
        )
        raise SystemExit(1)
    if full:
        console.print(f"All trials have ended; `fedsweep report {plan.name}` makes the report once there is room.")
        raise SystemExit(1)
    if lost is not None:
        console.print(f"All trials have ended and are recorded; `fedsweep report {plan.name}` tries again.")
    if away or lost is not None:
        raise SystemExit(1)


def show_unsent(console: Console, remote: Remote, folder: Path) -> bool:
    """What a store elsewhere did not take, and where that is; whether there is anything."""
    if not remote.unsent:
        return False
    reason = next(iter(remote.unsent.values()))
    console.print(f"The store did not take all of {relative(folder)}: {reason}.", style="yellow")
    return True


def _report(result: SweepResult, folder: Path, console: Console) -> Exception | None:
    """Make and print it where there is anything to report; what went wrong, which keeps no trial from MLflow."""
    from fedsweep.report import write_report

    try:
        if any(trial.history for trial in result.trials):
            console.print(write_report(result.sweep.manifest(), result.trials, folder).renderable)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # a part of it would look like the whole
        if not disk_is_full(error):
            console.print(f"The report could not be made: {one_line(error)}.", style="yellow")
        return error
    return None


@contextlib.contextmanager
def delivering(console: Console) -> Iterator[Callable[[int], None]]:
    """A line that says how many runs MLflow still lacks, while it is waited for."""
    with console.status("") as status:
        yield lambda left: status.update(f"MLflow takes the last rounds: {left} runs to go (Ctrl-C: later)")


def show_undelivered(console: Console, recorder: Recorder, page_command: str) -> None:
    """What MLflow does not have, why, and the command that brings it there."""
    if missing := recorder.unsynced:
        why = recorder.outage or "MLflow refused them."
        runs = "run is" if len(missing) == 1 else "runs are"
        console.print(
            f"{len(missing)} {runs} not whole in MLflow: {why} All is in the store; `{page_command} --deliver` brings "
            "it there.",
            style="yellow",
        )


def show_delivery(console: Console, store: Store, destination: Destination) -> None:
    """Bring MLflow up to what the store holds, sweep by sweep."""
    from fedsweep.tracking import deliver_all

    with delivering(console) as tell:
        for what, missing in deliver_all(store, destination, tell):
            reason = "".join(next(iter(missing.values()), "").strip().splitlines()[-1:])
            left_out = f"{len(missing)} runs are not whole in MLflow: {reason}"
            console.print(f"{what}: {left_out if missing else 'whole in MLflow'}")


def relative(path: Path) -> str:
    """The path as a person at this prompt would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
