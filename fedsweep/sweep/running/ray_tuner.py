"""Sessions of Ray Tune, which run the unfinished trials of a plan.

This module imports Ray, which reads its environment variables on import. Call `prepare_environment` before you import
this module.
"""

import contextlib
import functools
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.tune.execution import class_cache
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from rich.console import Console

from fedsweep.common.paths import environment
from fedsweep.common.progress import waiting
from fedsweep.results import SweepStore, TrialPlan, TrialRecord
from fedsweep.results.records import TAKEN_FROM
from fedsweep.results.remote.mirror import SCRATCH
from fedsweep.results.steering import keep_planned
from fedsweep.sweep.cluster.cluster import concurrency, most_on_a_gpu
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.pruning.population_replacement import Generations
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.pruning.trial_rules import Medians, Rungs, StoppingScheduler
from fedsweep.sweep.pruning.trial_state import TrialState
from fedsweep.sweep.running.display import LiveTable
from fedsweep.sweep.running.lost_workers import as_lost_workers
from fedsweep.sweep.running.open_sweep import Prepared, mark_finished
from fedsweep.sweep.running.recording import Recording, WriteGuard
from fedsweep.sweep.running.shared_sweep import Following, OtherTrials
from fedsweep.sweep.running.steering import Steering
from fedsweep.sweep.running.time_estimate import side_by_side
from fedsweep.sweep.running.trainable import train
from fedsweep.sweep.running.watched import RayLostError, Watch, run_watched
from fedsweep.sweep.search.ray_searchers import (
    FolderSearcher,
    HalvedSamples,
    JointScheduler,
    JointSearch,
    PlannedSearch,
    SampledSearch,
)
from fedsweep.sweep.space.settings import compared_rounds, decides_jointly, pruning_note
from fedsweep.tracking import Recorder


@dataclass(frozen=True)
class SessionOutcome:
    """The outcome of one session, in which Ray Tune runs the unfinished trials of a sweep."""

    plan: Plan
    sweep: SweepStore
    recorder: Recorder | None
    """None if another process is, or was, the driver of the sweep, which writes to MLflow."""
    trials: list[TrialRecord]
    interrupted: bool
    """True if trials are left to run."""
    disk_full: bool = False
    """True if the session ended because the disk is full."""
    remote_error: str = ""
    """The reason why the remote store is incomplete; empty if it is complete."""
    lost: str = ""
    """The process of Ray whose end has ended the session; empty if there is none."""
    left: bool = False
    """True if this process has left a sweep whose driver is another process."""

    @property
    def stopped(self) -> bool:
        """True if trials are left to run, or if results could not be stored. No linked sweep follows in this case."""
        return self.interrupted or self.disk_full or bool(self.remote_error)


def retried(plan: Plan) -> bool:
    """Return whether a later session runs failed trials again: no later samples or seeds depend on the failures."""
    return plan.sampled is None and plan.space.until_decided is None


def decided_together(plan: Plan) -> bool:
    """Return whether the outcome of a trial depends on other trials."""
    return decides_jointly(plan.space.scheduler) or plan.space.until_decided is not None


def run_session(
    ready: Prepared, sweep: SweepStore, console: Console, recorder: Recorder | None, steering: Steering | Following
) -> SessionOutcome:
    """Run the unfinished trials of a sweep until they have ended, the sweep is stopped, or a change is granted."""
    plan, rounds, scheduler = ready.plan, ready.plan.base.federation.rounds, ready.plan.space.scheduler
    if known := warm_start.read(sweep):
        console.print(known.note(rounds))
    until, together, writes = plan.space.until_decided, decided_together(plan), WriteGuard()
    with waiting(console, "Looking for earlier trials"):
        reuse = Reuse(ready.store, sweep, compared_rounds(scheduler, rounds))
        planned = None if plan.sampled else [*plan.grid()]
        if planned is not None and recorder is not None:
            for place, one in enumerate(planned):
                with steering.planning():
                    planned[place] = reuse.give(one, together=together)
        trials = sweep.trials()
    done = [trial for trial in trials if trial.outcome is not None]
    parallel = side_by_side(plan, ready.cluster)
    known_plans = {one.key: one for one in (*(planned or ()), *(trial.plan for trial in done))}
    for note in _notes(ready, sum(TAKEN_FROM in one.marks for one in known_plans.values()), parallel):
        console.print(note)
    display = LiveTable(console, plan.space.goal.metric, rounds, plan.num_trials, done, parallel)
    packing = Packing(
        plan.space.resources.gpus,
        most_on_a_gpu(plan.space.resources, ready.cluster),
        sweep,
        [trial.plan for trial in trials],
        apart=plan.sampled is None,
        writing=writes.catching,
        tell=console.print,
    )
    state: ArmState | TrialState | Generations | SeedState | None = None
    if until is not None:
        state = SeedState(plan, until, sweep, planned or ())
        display.total, display.notes = state.planned, state.open_comparisons
        if recorder is not None:
            keep_planned(sweep, state.planned)
    elif scheduler.name == "pbt":
        state = Generations(plan, sweep)
    elif scheduler.name == "arms":
        state = ArmState(plan, scheduler, sweep, planned or ())
    elif scheduler.name == "asha":
        state = TrialState(plan, scheduler, sweep, planned or [trial.plan for trial in trials])
    others = OtherTrials(sweep, present=recorder is None)
    recording = Recording(
        sweep, recorder, display, rounds, reuse, writes, packing, state, retried(plan), steering=steering, others=others
    )
    with display.live:
        lost = _run_trials(ready, recording, planned, trials)
    keys = [trial.plan.key for trial in sweep.trials()]
    trials = [recording.shown(key) for key in keys if state is None or key in state.plans]
    interrupted = _any_left(plan, recording, trials)
    steering.interrupted = recording.stop.asked
    changing = steering.paused and not recording.stop.asked and not lost
    for trial in trials:
        if trial.outcome is None and not changing and recorder is not None and trial.plan.key not in others.taken:
            recorder.interrupt(trial)
    interrupted = interrupted and not changing
    return SessionOutcome(plan, sweep, recorder, trials, interrupted, writes.disk_full, writes.remote_error, lost)


def _notes(ready: Prepared, reused: int, parallel: int) -> Iterator[str]:
    """Yield sentences for the start of a session: reused trials, idle workers, and the reproducibility of pruning."""
    plan, search = ready.plan, ready.plan.space.search
    if reused:
        are = "is" if reused == 1 else "are"
        found = f"{reused} of {plan.num_trials} trials {are} reused from earlier sweeps"
        yield f"{found}; add `--fresh` to run all trials again."
    if search.name == "tpe" and parallel < (fit := concurrency(plan.space.resources, ready.cluster)):
        yield f"At most {parallel} of {fit} possible trials run in parallel, as `search.in_flight` allows."
    if (note := pruning_note(plan.space.scheduler)) is not None:
        yield note


def _run_trials(
    ready: Prepared, recording: Recording, planned: Sequence[TrialPlan] | None, trials: Sequence[TrialRecord]
) -> str:
    """Run the trials, record their outcomes, and return the process of Ray that was lost, if any."""
    sweep, writes, lost = recording.sweep, recording.writes, ""
    recording.decide()
    recording.sync_all()
    try:
        if _any_left(ready.plan, recording, trials):
            watch = Watch(ready.cluster)
            body = functools.partial(_tune, ready, recording, planned)
            run_watched(body, recording.stop, watch.lost, recording.display.stop, recording.steering.look)
    except RayLostError as error:
        lost = str(error)
    except KeyboardInterrupt:  # a second one
        pass
    if (summary := recording.packing.summary()) is not None:
        recording.display.console.print(summary)
    with writes.catching():
        sweep.remote.pull()
    recording.look_again()
    with writes.catching():
        recording.decide() if recording.state else mark_finished(sweep, recording.rounds)
    recording.sync_all()
    with writes.catching():
        sweep.remote.push(needed=True)
    return lost


def _any_left(plan: Plan, recording: Recording, trials: Sequence[TrialRecord]) -> bool:
    """Return whether any trial is left to run.

    A population has no fixed number of trials, so only the trials of its current generation are considered. With seeds
    until decided, only the seeds of open comparisons are considered.
    """
    if isinstance(recording.state, Generations | SeedState):
        return bool(recording.state.wanted())
    return sum(trial.outcome is not None for trial in trials) < plan.num_trials


def _strategy(plan: Plan, recording: Recording, planned: Sequence[TrialPlan] | None) -> tuple[Searcher, TrialScheduler]:
    """Return the searcher, which selects the next trial, and the scheduler, which stops trials."""
    sweep, state, announce, packing = recording.sweep, recording.state, recording.announce, recording.packing
    if isinstance(state, TrialState) and planned is None:
        return HalvedSamples(plan, sweep, state, announce, packing), JointScheduler(state)
    if state is not None:
        scheduler = FIFOScheduler() if isinstance(state, Generations) else JointScheduler(state)
        return JointSearch(state, announce, packing), scheduler
    if planned is None:
        searcher: Searcher = SampledSearch(plan, sweep, announce, packing)
    else:
        searcher = PlannedSearch(sweep, planned, recording.rounds, announce, packing)
    chosen, objective, log = plan.space.scheduler, plan.space.goal, sweep.folder / "decisions.jsonl"
    if chosen.name == "asha_async":
        rungs = Rungs(chosen, recording.rounds, log, sweep.remote)
        return searcher, StoppingScheduler(rungs, objective, chosen.per)
    if chosen.name == "median":
        return searcher, StoppingScheduler(Medians(chosen, log, sweep.remote), objective, chosen.per)
    return searcher, FIFOScheduler()


def _tune(ready: Prepared, recording: Recording, planned: Sequence[TrialPlan] | None) -> None:
    plan, cluster, sweep, resources = ready.plan, ready.cluster, recording.sweep, ready.plan.space.resources

    def request(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": resources.cpus_per_trial, "GPU": config["gpus"]}])

    trainable = tune.with_parameters(
        train,
        sweep=str(sweep.folder),
        threads=resources.threads,
        device=resources.device,
        environment=environment(),
        arrival=ready.arrival,
        remote=sweep.remote.place,
        system_metrics=resources.system_metrics,
        compared=compared_rounds(plan.space.scheduler, recording.rounds),
    )
    shared = sweep.remote.place if not cluster.is_local else None  # each node reads a file of Ray from this place
    scratch, name = sweep.folder / SCRATCH, secrets.token_hex(4)
    searcher, scheduler = _strategy(plan, recording, planned)
    if isinstance(searcher, FolderSearcher):
        searcher.is_paused = lambda: recording.steering.paused or recording.stop.asked
        searcher.look, searcher.taken, recording.searcher = recording.look, recording.others.taken, searcher
    tuner = tune.Tuner(
        tune.with_resources(trainable, request),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=-1,
            max_concurrent_trials=side_by_side(plan, cluster),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=f"{shared.base}/{SCRATCH}" if shared else str(scratch),
            storage_filesystem=shared.filesystem if shared else None,
            callbacks=[recording],
            stop=recording,
            failure_config=tune.FailureConfig(max_failures=0),  # the searcher repeats trials of lost workers
            verbose=0,
        ),
    )
    try:
        with as_lost_workers(), _in_warm_workers():
            tuner.fit()
    finally:
        shutil.rmtree(scratch / name, ignore_errors=True)  # Ray's own bookkeeping; the records are in trials/
        with contextlib.suppress(OSError):  # another process uses it
            scratch.rmdir()
        sweep.remote.clear(SCRATCH)


@contextlib.contextmanager
def _in_warm_workers() -> Iterator[None]:
    """Let Ray Tune run trials in workers that have already imported their modules.

    Ray Tune sets an environment variable for PyTorch Lightning in the workers of trials. Ray would therefore start new
    workers for the trials, which takes several seconds.
    """
    patched: Any = class_cache
    original, patched.DEFAULT_ENV_VARS = patched.DEFAULT_ENV_VARS, {}
    try:
        yield
    finally:
        patched.DEFAULT_ENV_VARS = original
