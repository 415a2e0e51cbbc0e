"""The commands that watch a running sweep from another terminal."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from functools import partial
from time import sleep
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table
from typer import Argument

from fedsweep.cli import completion, json_output, json_results
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import DEFAULT_STORE, StoreOption, SweepArgument, check_format
from fedsweep.cli.output import awaiting, progress_console, result_console
from fedsweep.common.errors import UserError
from fedsweep.common.progress import TimeLeft, duration, loading
from fedsweep.results import Store, SweepManifest, SweepStore, TrialRecord
from fedsweep.results.arms import is_accuracy, shown_value
from fedsweep.results.steering import driver_of, is_running, joined, parallel_trials

REFRESH_SECONDS = 1.0
"""Seconds between two updates of the live table of `attach`."""
MOST_RUNNING = 12
"""Largest number of running trials that `status` lists."""


def status(
    sweep: Annotated[
        str | None,
        Argument(
            metavar="[SEARCH_SPACE[@SWEEP]]",
            help="search space, whose newest sweep is shown, or a sweep; by default, all running sweeps",
            autocompletion=completion.sweeps,
        ),
    ] = None,
    format: FormatOption = "terminal",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Print which trials of a sweep are running, how its arms compare so far, and the time left.

    Example: `fedsweep status ablations/lora_rank`
    """
    check_format(format, ("terminal", "json"))
    home = Store.at(store)
    shown = [home.find(sweep)] if sweep is not None else _running(home)
    with loading(progress_console(), "the statistics", "fedsweep.report"):
        import fedsweep.report  # noqa: F401
    found = [_described(one) for one in shown]
    if format == "json":
        json_output.document("status", sweeps=found)
        return
    console = result_console()
    for one in found:
        _show(console, one)
    if not found:
        console.print("No sweep is running here. `fedsweep list sweeps` lists the sweeps that were run.")


def _running(home: Store) -> list[SweepStore]:
    with awaiting("Looking for running sweeps"):
        return [one for one in home.sweeps() if is_running(one)]


def _described(sweep: SweepStore) -> dict[str, Any]:
    """Return the state of a sweep in JSON types."""
    from fedsweep.report import summarise

    manifest, trials, driver, others = sweep.manifest(), sweep.trials(), driver_of(sweep), joined(sweep)
    going = driver is not None or is_running(sweep)
    planned = manifest.trials
    if planned is None and driver is not None and driver.planned is not None:
        planned = max(driver.planned, len(trials))
    arms = summarise(manifest, trials) if any(trial.history for trial in trials) else []
    return {
        "space": manifest.name,
        "id": manifest.id,
        "status": json_results.status(manifest, trials, going),
        "running": going,
        "process": driver.pid if driver else None,
        "machine": driver.machine if driver else None,
        "started": driver.started if driver else manifest.created,
        "created": manifest.created,
        "folder": sweep.folder,
        "objective": manifest.metric,
        "mode": manifest.mode,
        "rounds": manifest.rounds,
        "seeds": manifest.seeds,
        "trials": {**json_results.counts(manifest, trials), "planned": planned},
        "joined": [{"process": one.pid, "machine": one.machine, "parallel": one.parallel} for one in others],
        "parallel": parallel_trials(sweep) or None,
        "seconds_left": _seconds_left(manifest, trials, planned, parallel_trials(sweep)) if going else None,
        "changes": [one.sentence for one in manifest.changes],
        "changes_made": [json_results.change(one) for one in manifest.changes],
        "trials_begun": [json_results.trial(one, manifest.metric) for one in trials if one.outcome is None],
        "failures": json_results.failures(trials, manifest.metric),
        "arms": [json_results.arm(one) for one in arms],
    }


def _seconds_left(
    manifest: SweepManifest, trials: Sequence[TrialRecord], planned: int | None, parallel: int
) -> float | None:
    """Return the estimated time until all planned trials have ended, from the rounds that are recorded."""
    from fedsweep.sweep.running.display import time_left

    time = TimeLeft(clock=lambda: 0.0)  # the moment at which each round ended is not recorded
    for trial in trials:
        for one in trial.history:
            if one.round:  # round 0 only evaluates
                time.add(one.seconds)
    return None if planned is None else time_left(time, trials, manifest.rounds, planned, parallel or 1)


def _show(console: Console, one: dict[str, Any]) -> None:
    ended, begun, planned = one["trials"]["ended"], one["trials"]["begun"], one["trials"]["planned"]
    name = f"{one['space']}@{one['id']}"
    if one["running"]:
        where = "" if one["machine"] == platform.node() else f" on {one['machine']}"
        who = f" (process {one['process']}{where})" if one["process"] else ""
        console.print(f"{name}: running{who}", soft_wrap=True)
        for other in one["joined"]:
            console.print(f"Joined by process {other['process']} on {other['machine']}", soft_wrap=True)
    else:
        more = planned is None or ended < planned
        hint = f"; `fedsweep tune {name} --resume` resumes it" if more else ""
        console.print(f"{name}: not running{hint}", soft_wrap=True)
    of = "" if planned is None else f" of {planned}"
    left = "" if one["seconds_left"] is None else f"; about {duration(one['seconds_left'])} left"
    parallel = one["parallel"] or 0  # 0: unknown, for example while the sweep starts
    word = "running" if begun <= parallel else "unfinished"  # trials of an earlier session may wait
    trials_have = f"{'trial' if ended == 1 and not of else 'trials'} {'has' if ended == 1 else 'have'}"
    console.print(f"{ended}{of} {trials_have} ended, {begun} {'are' if begun != 1 else 'is'} {word}{left}")
    for sentence in one["changes"]:
        console.print(sentence, soft_wrap=True)
    right = (Column(heading, justify="right") for heading in ("seed", "round", one["objective"]))
    trials = Table(Column(f"{word} trial", overflow="fold"), *right, box=None, pad_edge=False)
    for trial in one["trials_begun"][:MOST_RUNNING]:
        value, rounds = shown_value(one["objective"], trial["value"]), f"{trial['round']}/{one['rounds']}"
        trials.add_row(trial["label"], str(trial["seed"]), rounds, value)
    if more := one["trials_begun"][MOST_RUNNING:]:
        trials.add_row(f"... and {len(more)} more")
    if begun:
        console.print("", trials)
    if one["arms"]:
        console.print("", _arms(one))
    console.print()


def _arms(one: dict[str, Any]) -> Table:
    until, metric = any(arm["verdict"] for arm in one["arms"]), one["objective"]
    right = [Column(heading, justify="right") for heading in ("n", "mean", "difference")]
    table = Table(Column("arm", overflow="fold"), *right, "verdict" if until else "Holm p", box=None, pad_edge=False)
    for arm in one["arms"]:
        mean, difference = shown_value(metric, arm["mean"], "-"), _shown_difference(metric, arm["difference"])
        p = "-" if arm["p_holm"] is None else f"{arm['p_holm']:.3f}"
        judged = (arm["verdict"] or "-") if until else p
        table.add_row(arm["label"], str(arm["n"]), mean, "baseline" if arm["baseline"] else difference, judged)
    return table


def _shown_difference(metric: str, difference: float | None) -> str:
    if difference is None:
        return "-"
    return f"{100 * difference:+.2f} points" if is_accuracy(metric) else f"{difference:+.4f}"


def attach(sweep: SweepArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Show the live table of a sweep that another process runs, and its report once it has ended.

    Ctrl-C leaves the table, and the sweep goes on.

    Example: `fedsweep attach ablations/lora_rank`
    """
    found = Store.at(store).find(sweep)
    name = found.manifest().label
    if not is_running(found):
        raise UserError(f"no process is running sweep {name}; use `fedsweep report {name}` to see its results.")
    try:
        _follow(found)
    except KeyboardInterrupt:
        print(f"\nThe sweep goes on; `fedsweep attach {name}` shows it again.", file=sys.stderr)
        return
    with loading(progress_console(), "the report", "fedsweep.report"):
        from fedsweep.report import AblationTable, summarise
        from fedsweep.report.formats.terminal import TerminalTable
    manifest, trials = found.manifest(), found.trials()
    if any(trial.history for trial in trials):
        result_console().print(TerminalTable(AblationTable(manifest, summarise(manifest, trials))))
    if manifest.trials is not None and len(found.ended()) < manifest.trials:
        print(f"Stopped. To continue, run `fedsweep tune {name} --resume`.")


def _follow(sweep: SweepStore) -> None:
    """Show the live table of a sweep until no process runs it."""
    from fedsweep.sweep.running.display import LiveTable

    manifest, trials = sweep.manifest(), sweep.trials()
    done = [one for one in trials if one.outcome is not None]
    parallel = parallel_trials(sweep) or 1
    table = LiveTable(progress_console(), manifest.metric, manifest.rounds, _total(manifest, trials), done, parallel)
    with table.live:
        while True:
            going = is_running(sweep)
            manifest, trials = sweep.manifest(), sweep.trials()
            table.total = _total(manifest, trials)
            for key in table.trials.keys() - {one.plan.key for one in trials}:
                table.forget(key)  # its arm was dropped
            for trial in trials:
                known = table.trials.get(trial.plan.key)
                if known is None or len(known.history) != len(trial.history) or known.outcome != trial.outcome:
                    table.update(trial)
            table.notes = partial(list, [one.sentence for one in manifest.changes])
            if not going:
                return
            sleep(REFRESH_SECONDS)


def _total(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> int:
    return len(trials) if manifest.trials is None else manifest.trials
