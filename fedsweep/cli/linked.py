"""The output of `fedsweep tune` for a search space whose arms are tuned one by one (`tune_each`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table

from fedsweep.cli import output
from fedsweep.common.progress import duration
from fedsweep.results.arms import shown_setting

if TYPE_CHECKING:
    from rich.console import Console

    from fedsweep.sweep import TuneOptions
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.running.finish import SweepResult
    from fedsweep.sweep.running.open_sweep import Prepared

WHAT = {
    "tuning": "every arm with every sample",
    "common": "the arms without tuning",
    "tuned": "each arm with its chosen values",
}
"""The trials of each of the linked sweeps."""
COLUMNS = ("trials", "seeds", "number", "estimated time")


def run_linked(
    options: TuneOptions, console: Console, ended: Callable[[SweepResult], object] = lambda result: None
) -> None:
    """Run the linked sweeps of a search space, and print the result of each.

    Raise SystemExit with the exit status of the first sweep that failed. Samples that failed are not chosen, and do not
    count as a failure. Files that could not be uploaded count as a failure of any sweep.

    `ended` is called with the result of each sweep.
    """
    from fedsweep.sweep.running.linked_sweeps import linked_sweeps
    from fedsweep.tracking import Destination

    status = 0

    def show_result(result: SweepResult) -> None:
        nonlocal status
        ended(result)
        stage, session = result.session.plan.request.stage, result.session
        server = Destination.of_sweep(options.results.root, result.folder, options.mlflow).server
        try:
            output.show_sweep(result, output.page_command(options.store, server))
        except SystemExit:
            if session.stopped or result.disk_full:
                raise
            tuning, unsent = stage is not None and stage.name == "tuning", session.sweep.remote.unsent
            only_samples = tuning and result.report_error is None and not unsent
            status = status or (0 if only_samples else result.status)
        output.result_console().print()

    linked_sweeps(options, console, lambda report: output.result_console().print(report.renderable), show_result)
    if status:
        raise SystemExit(status)


def show_linked_plan(options: TuneOptions, console: Console) -> None:
    """Print the arms of a search space, the samples that all of them try, and the trials and time of each sweep.

    Linked sweeps that are resumed are first checked as by a resume.
    """
    from fedsweep.sweep.running.linked_sweeps import planned_sweeps
    from fedsweep.sweep.running.tune import rehearsed

    sweeps = planned_sweeps(options)
    check_others(sweeps, console)
    with rehearsed(sweeps[1], console) as ready:
        from fedsweep.sweep.plan.plan import Plan

        plans = [Plan.of(one.request) for one in sweeps]
        _show(ready, plans)


def check_others(sweeps: Sequence[TuneOptions], console: Console) -> None:
    """Check the tuning sweep and, if it is resumed, the sweep of the tuned arms, before a dry run of the middle sweep.

    Print warnings about the arms, which are printed only for the first of the linked sweeps.

    Raises:
        UserError: One of the sweeps cannot run.
    """
    from fedsweep.sweep.running.tune import rehearsed

    tuning, _, tuned = sweeps
    for one in (tuning, *([tuned] if tuned.resume else [])):
        with rehearsed(one, console):
            pass


def _show(ready: Prepared, plans: list[Plan]) -> None:
    console, common, stage = output.result_console(), ready.plan, plans[0].request.stage
    space, rounds = common.space, common.base.federation.rounds
    if stage is None or space.tune_each is None:
        raise ValueError(f"{common.request.where} has no `tune_each`")
    around = space.baseline if space.design == "one_factor" else None
    console.print(output.plan_table(common.name, space.space, common.arms, around))
    samples = Table("sample", *stage.names, title="Samples of every arm", title_justify="left")
    samples.add_row("0", *["the untuned value"] * len(stage.names))
    for number, one in enumerate(stage.drawn, 1):
        samples.add_row(str(number), *(shown_setting(one[name]) for name in stage.names))
    console.print(samples)
    side, batch, source = one_trial(ready)
    bound = "at most " * (space.until_decided is not None)
    table, total, trials = Table(Column("sweep", overflow="fold"), *COLUMNS), 0.0, 0
    for plan in plans:
        seconds = planned_seconds(plan, side, batch)
        own, most = plan.request.stage, bound if plan is not plans[0] else ""
        what = WHAT[own.name] if own is not None else ""
        table.add_row(
            plan.name, what, output.seeds_in_words(plan), f"{most}{plan.num_trials}", f"{most}{duration(seconds)}"
        )
        total, trials = total + seconds, trials + plan.num_trials
    console.print(table)
    console.print(
        f"{bound.capitalize()}{trials} trials of {space.experiment} with {rounds} round{'s' * (rounds > 1)} each "
        f"({trials * rounds} rounds in all), {side} in parallel.\n"
        f"Tuned by {plans[0].space.goal.metric}. Trials that an earlier sweep has finished are reused."
    )
    output.show_plan_notes(console, common)
    console.print(f"Estimated time: {bound}{duration(total)}, {source}.")


def one_trial(ready: Prepared) -> tuple[int, float, str]:
    """Return the number of trials in parallel, the seconds of one trial, and the source of this estimate."""
    from fedsweep.sweep.running import time_estimate

    plan, cluster = ready.plan, ready.cluster
    most = time_estimate.side_by_side(plan, cluster)
    seconds, fit, source = output.estimated_time(plan, ready.store, most, cluster)
    side = most if fit is None else fit
    return side, (seconds - time_estimate.WORKER_START) / math.ceil(plan.num_trials / side), source


def planned_seconds(plan: Plan, side: int, batch: float) -> float:
    """Return the estimated seconds of a sweep whose trials take `batch` seconds, with `side` of them in parallel."""
    from fedsweep.sweep.running.time_estimate import WORKER_START

    return WORKER_START + math.ceil(plan.num_trials / side) * batch
