"""Console output of the commands: plans, results and warnings."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsweep.cli.options import DEFAULT_STORE
from fedsweep.common.errors import disk_is_full, one_line, short, without_query
from fedsweep.common.paths import relative as relative
from fedsweep.common.progress import duration, loading, waiting
from fedsweep.results.arms import Arm, agrees, arm_label
from fedsweep.results.records import stand_in, warning
from fedsweep.results.steering import is_running

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.results import Store, SweepStore
    from fedsweep.results.remote import Remote
    from fedsweep.sweep.cluster.cluster import Cluster
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.running.finish import SweepResult
    from fedsweep.sweep.space.axes import Axis
    from fedsweep.tracking import Destination, Recorder

PIPED_WIDTH = 120  # width without a terminal, enough for all columns of the results table


def progress_console() -> Console:
    """Return a console that writes progress to stderr, so that stdout can be piped."""
    return _console(sys.stderr)


_ON_STDERR: ContextVar[bool] = ContextVar("results on stderr", default=False)


@contextmanager
def results_on_stderr() -> Iterator[None]:
    """During the context, write results to stderr, because stdout is reserved for a JSON document."""
    token = _ON_STDERR.set(True)
    try:
        yield
    finally:
        _ON_STDERR.reset(token)


def result_console() -> Console:
    """Return a console that writes results to stdout, except in the context `results_on_stderr`."""
    return _console(sys.stderr if _ON_STDERR.get() else sys.stdout)


def awaiting(step: str, always: bool = False) -> AbstractContextManager[None]:
    """Show on stderr what the command is waiting for; see `fedsweep.common.progress.waiting`."""
    return waiting(progress_console(), step, always)


def loading_torch(module: str) -> AbstractContextManager[None]:
    """Show on stderr that PyTorch is being imported, unless `module`, which imports it, has already been imported."""
    return loading(progress_console(), "PyTorch", module)


def _console(file: TextIO) -> Console:
    width = None if file.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=file, highlight=False, markup=False, width=width)  # `[art]` is a value, not a style


def page_command(store: str, server: str | None = None) -> str:
    """Return the `fedsweep ui` command that shows a results folder or the runs on an MLflow server.

    An option is left out if its default or its environment variable already has the right value.
    """
    words, named = ["fedsweep", "ui"], os.environ.get("FEDSWEEP_MLFLOW")
    if Path(store) != Path(os.environ.get("FEDSWEEP_STORE", DEFAULT_STORE)):
        words += ["--store", store]
    if bool(named) != bool(server):
        words += ["--mlflow", server or "store"]
    return shlex.join(words)


def plan_table(name: str, axes: Mapping[str, Axis], arms: Sequence[Arm] | None, around: Arm | None = None) -> Table:
    """Return a table with one row per arm of a grid, or with one row per hyperparameter of a search.

    Args:
        name: The title of the table.
        axes: The values or the range of each varied hyperparameter, keyed by dotted name. If a hyperparameter is varied
            only under a condition, the caption of the table states the condition.
        arms: The arms of a grid; None for a search. The table of a search shows the range of each hyperparameter.
        around: The baseline. If given, the label of an arm contains only the values that differ from the baseline.
    """
    conditions = [f"{key} only if {axis.shown_conditions()}" for key, axis in axes.items() if axis.when]
    caption = Text("\n".join(conditions), style="none") if conditions else None
    columns = ("#", "arm") if arms is not None else ("hyperparameter", "sampled from")
    table = Table(
        *columns, title=name, min_width=len(name), title_justify="left", caption=caption, caption_justify="left"
    )
    if arms is None:
        for dotted, axis in axes.items():
            table.add_row(dotted, axis.shown())
        return table
    for number, arm in enumerate(arms, 1):
        differs = {one: value for one, value in arm.items() if around and not agrees({one: value}, around)}
        table.add_row(str(number), arm_label(differs or arm))
    return table


def show_recorded(console: Console, config: RunConfig, folder: Path, page_command: str) -> None:
    """Print the folder with the results of a run, and `page_command`, the command that opens MLflow.

    If the run was trained on surrogate images instead of the images of a text-to-image model, also print a warning.
    """
    picture = " (with `tsne.png`)" if config.evaluation.tsne_classes else ""
    console.print(f"Recorded in {relative(folder)}{picture} and in MLflow; run `{page_command}` to open MLflow.")
    if made := stand_in(config.marks()):
        console.print(warning(made), style="yellow")


def show_plan(plan: Plan, cluster: Cluster | None = None, store: Store | None = None) -> None:
    """Print the arms, the number of trials and the number of rounds of a sweep that has not started.

    If `store` is given, also print an estimate of the total time. It is based on rounds that are recorded in the store,
    or else on a round that is run for this purpose.
    """
    from fedsweep.sweep.cluster.cluster import HERE, decided
    from fedsweep.sweep.running.time_estimate import side_by_side

    console, cluster = result_console(), cluster or HERE
    plan = plan.on(decided(plan.space.resources, cluster))
    around = plan.space.baseline if plan.space.design == "one_factor" else None
    console.print(plan_table(plan.name, plan.space.space, plan.arms if plan.sampled is None else None, around))
    rounds, most = plan.base.federation.rounds, side_by_side(plan, cluster)
    packed = plan.space.resources.gpus == "auto"
    side = f"as many trials in parallel as fit, at most {most}" if packed else f"{most} in parallel"
    bound = "at most " * (plan.space.until_decided is not None)
    console.print(
        f"{bound.capitalize()}{plan.num_trials} trial{'s' * (plan.num_trials > 1)} of {plan.space.experiment} with "
        f"{rounds} round{'s' * (rounds > 1)} each ({plan.num_trials * rounds} rounds in all), {side}.\n"
        f"Seeds: {seeds_in_words(plan)}; search: {plan.space.search.name}; scheduler: {plan.space.scheduler.name}."
    )
    show_plan_notes(console, plan)
    if store is None:
        return
    seconds, fit, source = estimated_time(plan, store, most, cluster)
    together = f" with {fit} trials in parallel" if packed and fit is not None else ""
    console.print(f"Estimated time: {bound}{duration(seconds)}{together}, {source}.")


def seeds_in_words(plan: Plan) -> str:
    """Return the seeds of a plan as text, such as `0, 1, 2` or `until decided, 4 to 20`."""
    until, streams = plan.space.until_decided, plan.base.seed_streams
    seeds = ", ".join(map(str, plan.space.planned_seeds)) if until is None else until.words
    return seeds if streams == "all" else f"{seeds}, only for {', '.join(streams)}"


def estimated_time(plan: Plan, store: Store, most: int, cluster: Cluster) -> tuple[float, int | None, str]:
    """Estimate the time of a sweep from rounds in the store, or else from a round that is run for this purpose.

    Returns:
        The seconds; the number of parallel trials, or None if no round was run to measure it; and the source of the
        estimate as a phrase.
    """
    from fedsweep.sweep.running import time_estimate

    if known := time_estimate.from_records(plan, store, most, cluster):
        seconds, sweep = known
        return seconds, None, f"from the rounds of sweep {sweep} on this machine"
    with awaiting("Measuring one round of the experiment", always=True):
        seconds, fit = time_estimate.estimate(plan, most, cluster)
    return seconds, fit, "from measuring one round of the experiment"


def show_plan_notes(console: Console, plan: Plan) -> None:
    """Print the expected numbers of seeds until comparisons are decided, unnamed changes, and the clients' budgets."""
    from fedsweep.cli.budget_table import budget_table
    from fedsweep.sweep.running.time_estimate import seed_forecast_lines

    for line in seed_forecast_lines(plan):
        console.print(line)
    for change in plan.unnamed_changes():
        console.print(f"{change}.", style="yellow")
    if table := budget_table(plan):
        console.print(table)


def show_sweep(result: SweepResult, page_command: str) -> None:
    """Print the result of a sweep that has ended: the report folder, the command that opens MLflow, and any errors.

    Raise SystemExit with the exit status of the sweep unless the status is 0.
    """
    console, session, tally = result_console(), result.session, result.tally
    name, folder = session.plan.name, relative(result.folder)
    if result.report_error is not None and not disk_is_full(result.report_error):
        console.print(f"The report could not be written: {one_line(result.report_error)}.", style="yellow")
    if session.left:
        cause = f" because {session.lost} was killed or has crashed" if session.lost else ""
        cause = " because the disk is full" if result.disk_full else cause
        label = session.sweep.manifest().label
        console.print(f"This process has left sweep {label}{cause}. {_others(session.sweep)}".rstrip(), soft_wrap=True)
        raise SystemExit(result.status)
    report = relative(result.folder / "report") if (result.folder / "report").exists() else "none yet"
    console.print(f"Report: {report}\nMLflow: {page_command}\nSweep:  {result.folder.name}", soft_wrap=True)
    if session.recorder is not None:
        show_undelivered(console, session.recorder, page_command)
    if result.disk_full:
        console.print(f"Nothing more can be written to {folder}: the disk is full.", style="yellow")
    if session.remote_error:
        console.print(
            f"The sweep ended early, or its remote results are incomplete: {session.remote_error}.", style="yellow"
        )
    else:
        show_unsent(console, session.sweep.remote, result.folder)
    if session.lost and not session.interrupted:
        console.print(f"After the last trial had ended, {session.lost} was killed or has crashed; nothing was lost.")
    if session.interrupted:
        most = "at most " * (session.plan.space.until_decided is not None)
        finished = f"{tally['finished']} of {most}{session.plan.num_trials} trials finished"
        cause = (
            f"Stopped because {session.lost} was killed or has crashed. All recorded rounds are kept, with {finished}."
            if session.lost
            else f"Stopped with {finished}."
        )
        again = "the same command with --resume"
        if (manifest := session.sweep.manifest()).seeds_or_arms_changed:  # the same command would undo the changes
            again = f"`fedsweep tune {manifest.label} --resume`"
        console.print(f"{cause} {_others(session.sweep) or f'To continue, run {again}.'}")
    elif tally["failed"]:
        failed = "1 trial" if tally["failed"] == 1 else f"{tally['failed']} trials"
        console.print(f"{failed} failed; see the tracebacks in MLflow and in {folder}.")
        failures = (one.outcome for one in result.trials if one.outcome and one.outcome.outcome == "failed")
        for reason, number in Counter(one.reason for one in failures if one.reason).items():
            console.print(f"Cause of {number} failed trial{'s' * (number > 1)}: {reason}.", soft_wrap=True)
    elif result.disk_full:
        console.print(
            f"All trials have ended. Free some disk space, then run `fedsweep report {name}` to write the report."
        )
    elif result.report_error is not None:
        console.print(f"All trials have ended and are recorded; run `fedsweep report {name}` to try again.")
    if result.status:
        raise SystemExit(result.status)


def _others(sweep: SweepStore) -> str:
    """Return a sentence if other processes go on with the sweep, or else an empty string."""
    manifest = sweep.manifest()
    stopped = bool(manifest.changes) and manifest.changes[-1].kind == "stopped"
    if stopped or not is_running(sweep):
        return ""
    return f"Another process goes on with the sweep; `fedsweep status {manifest.name}` shows it."


def show_unsent(console: Console, remote: Remote, folder: Path) -> bool:
    """Return whether the upload of any file to the remote results folder failed, and print a warning if so."""
    if not remote.unsent:
        return False
    reason = next(iter(remote.unsent.values()))
    console.print(
        f"Some files of {relative(folder)} could not be uploaded to the remote results folder: {reason}.",
        style="yellow",
    )
    return True


def _cause(reason: str) -> str:
    """Return the message of the last error of a traceback, without the SQL of a database; empty without an error."""
    *before, last = re.split(r"(?m)^[\w.]*(?:Error|Exception): ", reason)
    return short(without_query(last)) if before else ""


def _incomplete(runs: Sized) -> str:
    return f"{len(runs)} {'run is' if len(runs) == 1 else 'runs are'} incomplete in MLflow"


def show_undelivered(console: Console, recorder: Recorder, page_command: str) -> None:
    """Print a warning if runs are incomplete in MLflow.

    The warning contains the reason and the command that copies the missing results to MLflow.
    """
    if missing := recorder.unsynced:
        cause = next(filter(None, map(_cause, missing.values())), "")
        why = recorder.outage or f"MLflow rejected them{f' ({cause})' if cause else ''}."
        console.print(
            f"{_incomplete(missing)}: {why} The results folder has everything; run "
            f"`{page_command} --deliver` to copy it to MLflow.",
            style="yellow",
        )


def show_delivery(console: Console, store: Store, destination: Destination) -> None:
    """Copy results from the results folder to MLflow unless MLflow already has them.

    For each sweep and each single run, print whether it is now complete in MLflow.
    """
    from fedsweep.sweep.running.display import delivering
    from fedsweep.tracking import deliver_all

    with delivering(console) as tell:
        for what, missing in deliver_all(store, destination, tell):
            reason = next(iter(missing.values()), "")
            outcome = f"{_incomplete(missing)}: {_cause(reason) or reason}" if missing else "complete in MLflow"
            console.print(f"{what}: {outcome}")
