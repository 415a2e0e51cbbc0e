"""The sessions of a sweep: of its driver, and of a process that takes part in a sweep whose driver is another process.

This module imports Ray (see `ray_tuner`).
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from fedsweep.common.files import LockedError
from fedsweep.common.progress import waiting
from fedsweep.results import SweepStore
from fedsweep.results.steering import driving, taking_part
from fedsweep.sweep.running.open_sweep import Prepared, anything_left, clear_leftovers, exclusively
from fedsweep.sweep.running.ray_tuner import SessionOutcome, decided_together, retried, run_session
from fedsweep.sweep.running.shared_sweep import LOOK_SECONDS, Following
from fedsweep.sweep.running.steering import Steering, as_dropped, plan_of, set_aside
from fedsweep.sweep.running.time_estimate import side_by_side
from fedsweep.tracking import Recorder


def run(
    ready: Prepared, sweep: SweepStore, console: Console, held: contextlib.ExitStack, retry: bool = True
) -> SessionOutcome:
    """Run the unfinished trials of a sweep, and return the outcome of the session. This process is the sweep's driver.

    If another process asks for a change, such as further seeds, the change is applied and the session continues.

    Args:
        ready: The checked plan.
        sweep: The sweep, whose lock this process holds.
        console: The console for progress messages.
        held: The stack at whose end this process is no longer the driver.
        retry: Whether failed trials run again.
    """
    recorder = Recorder(ready.store, ready.plan.name, ready.destination)
    held.enter_context(driving(sweep, side_by_side(ready.plan, ready.cluster)))
    while True:
        steering = Steering(ready.plan, sweep)
        _clean(ready, sweep, console, recorder, retry)
        outcome = run_session(ready, sweep, console, recorder, steering)
        if outcome.stopped or steering.interrupted:
            if steering.record_stop():
                recorder.open_sweep(sweep.manifest(), sweep.folder)
            return outcome
        steering.look()
        if not steering.paused:
            return outcome
        for sentence in steering.apply():
            console.print(sentence, soft_wrap=True)
        ready = replace(ready, plan=steering.plan)


def join(
    ready: Prepared, sweep: SweepStore, console: Console, held: contextlib.ExitStack, connect: Callable[[], object]
) -> SessionOutcome:
    """Run trials of a sweep whose driver is another process, and return the outcome of the session.

    If the driver ends while trials are left, or is killed before it has written the report, this process becomes the
    driver. Otherwise, this process waits for the end of the driver.

    Args:
        ready: The checked plan.
        sweep: The sweep.
        console: The console for progress messages.
        held: The stack at whose end this process is no longer the driver.
        connect: A function that connects to Ray, unless this process is connected. It is called before trials run.
    """
    known = len(sweep.manifest().changes)
    with taking_part(sweep, side_by_side(ready.plan, ready.cluster)), contextlib.ExitStack() as leading:
        while True:
            following = Following(ready.plan, sweep, known)
            if anything_left(ready.plan, sweep):
                connect()
            outcome = run_session(ready, sweep, console, None, following)
            if following.interrupted or outcome.disk_full or (outcome.lost and outcome.interrupted):
                return replace(outcome, interrupted=True, left=True)
            nothing_left = not outcome.interrupted and not following.paused
            try:
                with waiting(console, "Waiting for the process that writes the report", always=nothing_left):
                    killed = _lead(sweep, leading, wait=nothing_left)
            except KeyboardInterrupt:
                return replace(outcome, interrupted=True, left=True)
            changes = following.changes()
            known += len(changes)
            if any(one.kind == "stopped" for one in changes):
                return replace(outcome, interrupted=True, left=True)
            if nothing_left and not killed and not changes:
                return outcome
            if changes or following.outdated:
                ready = replace(ready, plan=plan_of(sweep.manifest()).on(ready.plan.space.resources))
            if killed is not None:
                break
        held.enter_context(leading.pop_all())
    console.print("The process that ran the sweep has ended, so this process continues.", soft_wrap=True)
    if anything_left(ready.plan, sweep):
        connect()
    return run(ready, sweep, console, held, retry=False)


def _lead(sweep: SweepStore, held: contextlib.ExitStack, wait: bool) -> bool | None:
    """Become the driver of a sweep, and return whether the former driver was killed.

    The result is None if another process is the driver. If `wait` is true, wait until it has ended.
    """
    while True:
        try:
            return held.enter_context(exclusively(sweep))
        except LockedError:
            if not wait:
                time.sleep(LOOK_SECONDS)
                return None


def _clean(ready: Prepared, sweep: SweepStore, console: Console, recorder: Recorder, retry: bool) -> None:
    """Remove what earlier sessions have left, and open the runs of the sweep in MLflow."""
    plan, rounds = ready.plan, ready.plan.base.federation.rounds
    if sweep.manifest().changes:
        set_aside(plan, sweep)
    clear_leftovers(sweep, rounds, retry=retry and retried(plan), together=decided_together(plan))
    sweep.show(plan.space.columns, asked="columns" in plan.request.options)
    with waiting(console, "Looking for MLflow's runs"):
        recorder.open_sweep(sweep.manifest(), sweep.folder)
        for dropped in sweep.dropped().values():
            recorder.sync(as_dropped(dropped.read()))
        sweep.remote.push()
