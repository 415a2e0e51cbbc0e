"""Functions that open the folder of a new or resumed sweep, lock it, and clean it up after a session was killed."""

from __future__ import annotations

import contextlib
import datetime
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.files import LockedError, locked
from fedsweep.common.progress import waiting
from fedsweep.results import Outcome, Store, SweepManifest, SweepStore, TrialRecord
from fedsweep.results.folders import is_hidden
from fedsweep.results.records import PLUGINS
from fedsweep.results.remote.mirror import SCRATCH
from fedsweep.results.steering import DRIVER, JOINED, is_running, joined
from fedsweep.results.trial_lock import TAKEN
from fedsweep.sweep.cluster.cluster import HERE, Cluster, processor
from fedsweep.sweep.cluster.node_requirements import Arrival
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.reuse import ReusedTrials, all_reusable
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.running.shared_sweep import planning
from fedsweep.tracking import Destination, check_writable
from fedsweep.tracking.sweep_description import git_commit
from fedsweep.training.round_metrics import titles_of

if TYPE_CHECKING:
    from fedsweep.sweep.running.tune import TuneOptions

CAUSES = {
    "definition": "its YAML files or overrides have",
    "engine": "fedsweep's code has",
    PLUGINS: "its plug-ins have",
    "data": "its data or weights have",
    "packages": "the installed packages have",
}
"""Subjects of the error message about a sweep that cannot be resumed, by the digest that differs."""


@dataclass(frozen=True)
class Prepared:
    """A checked plan, the store for its results, its MLflow destination, and the machines for its trials."""

    plan: Plan
    store: Store
    destination: Destination
    cluster: Cluster
    arrival: Arrival | None
    """The check that each worker makes before its first trial; None without a cluster."""


def opened(
    ready: Prepared,
    options: TuneOptions,
    console: Console,
    held: contextlib.ExitStack,
    connect: Callable[[], object],
) -> tuple[SweepStore, bool]:
    """Create or resume a sweep, lock it, and return it with the answer whether this process is its driver.

    Args:
        ready: The checked plan.
        options: The options of `tune`.
        console: The console for progress messages.
        held: The stack at whose end the sweep is unlocked.
        connect: A function that connects to Ray. It is called if trials may be left to run, before a folder is created
            or an MLflow run is opened, so that nothing stays open if Ray does not start.
    """
    plan, store, resumed = ready.plan, ready.store, options.resumed
    if resumed is None:
        check_new(plan, store)
        with waiting(console, "Looking for earlier trials"):
            trials_to_run = anything_new(plan, store, options.fresh)
        if trials_to_run:
            connect()
        sweep = new_sweep(plan, store, options.fresh, ready.cluster)
        ready.destination.relocate()  # before the sweep is locked
        held.enter_context(exclusively(sweep))
        return sweep, True
    sweep, is_driver = resumed_sweep(plan, store, resumed), True
    if not (options.join and is_running(sweep)):
        ready.destination.relocate()
    try:
        held.enter_context(exclusively(sweep))
    except LockedError:
        if not options.join:
            raise
        is_driver = False
    resumed_sweep(plan, store, sweep)  # another process may have changed it until now
    if is_driver and anything_left(plan, sweep):  # otherwise, `join` looks what is left
        connect()
    return sweep, is_driver


def check_new(plan: Plan, store: Store) -> None:
    """Raise UserError if no new sweep can be created.

    The reason is that the store is read-only, or that the search cannot learn from the sweep that `search.warm_start`
    names.
    """
    check_writable(store.root)
    store.check_writable()
    warm_start.collect(plan, store)


def anything_new(plan: Plan, store: Store, fresh: bool = False) -> bool:
    """Return whether a new sweep may have trials to run, because it cannot reuse all of them from earlier sweeps.

    With seeds until decided, only the seeds of open comparisons are considered.
    """
    started = _manifest(plan, fresh)
    if (until := plan.space.until_decided) is not None:
        return bool(SeedState(plan, until, ReusedTrials(store, started), plan.grid()).wanted())
    return not all_reusable(plan, store, started)


def anything_left(plan: Plan, sweep: SweepStore) -> bool:
    """Return whether a resumed sweep may have trials to run (see `anything_new`)."""
    if (until := plan.space.until_decided) is not None:
        return bool(SeedState(plan, until, sweep, plan.grid()).wanted())
    return sweep.any_left()


def new_sweep(plan: Plan, store: Store, fresh: bool = False, cluster: Cluster = HERE) -> SweepStore:
    """Create the folder of a new sweep, and return the folder.

    Args:
        plan: The plan of the sweep.
        store: The results folder.
        fresh: Whether the sweep reuses no trials of earlier sweeps.
        cluster: The machines of the sweep.

    Raises:
        UserError: The search cannot learn from the sweep that `search.warm_start` names.
    """
    known = warm_start.collect(plan, store)
    manifest = _manifest(plan, fresh, cluster)
    sweep = store.sweep(plan.name, manifest.id)
    warm_start.keep(known, sweep)
    sweep.create(manifest, plan.files)
    return sweep


def resumed_sweep(plan: Plan, store: Store, sweep: SweepStore) -> SweepStore:
    """Return `sweep` after checking that it can be resumed.

    Raises:
        UserError: The sweep's definition, code, data or packages have changed, or the store is read-only.
    """
    check_writable(store.root)
    store.check_writable()
    started, digests = sweep.manifest(), plan.digests()
    for part, changed in CAUSES.items():
        if started.digests.get(part) != digests.get(part):
            raise UserError(
                f"sweep {started.id} of {plan.name} cannot be resumed because {changed} changed since the sweep was "
                "started; undo the change, or start a new sweep."
            )
    return sweep


def _manifest(plan: Plan, fresh: bool, cluster: Cluster = HERE) -> SweepManifest:
    now, space, base = datetime.datetime.now(datetime.UTC), plan.space, plan.base
    tuning = stage if (stage := plan.request.stage) is not None and stage.name == "tuning" else None
    axes = {**space.space, **(space.tune_each.space if tuning is not None and space.tune_each is not None else {})}
    configs = [config for _, config in plan.configs]  # arms may use other domains than the experiment
    return SweepManifest(
        id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=plan.name,
        experiment=space.experiment,
        created=now.isoformat(),
        metric=space.goal.metric,
        mode=space.goal.mode,
        against=space.goal.against,
        rounds=base.federation.rounds,
        varied=(*space.names, *(tuning.names if tuning is not None else ())),
        baseline=space.baseline if tuning is None else None,
        comparisons=space.comparisons,
        reference=plan.reference if tuning is None else None,
        seeds=space.planned_seeds,
        seed_streams=None if base.seed_streams == "all" else base.seed_streams,
        until_decided=space.until_decided,
        trials=None if space.scheduler.name == "pbt" or space.until_decided else plan.num_trials,
        scheduler=space.scheduler.name,
        search=space.search.name,
        domains=tuple(dict.fromkeys(name for one in (base, *configs) for name in one.data.domains)),
        titles={name: title for one in (base, *configs) for name, title in titles_of(one.evaluation.metrics).items()},
        columns=space.columns,
        logarithmic=tuple(key for key, axis in axes.items() if axis.loguniform or axis.loginteger),
        overrides=dict(plan.request.overrides),
        options=dict(plan.request.options),
        machine=platform.node() or None if cluster.is_local else None,
        digests=plan.digests(),
        version=metadata.version("fedsweep"),
        commit=git_commit(),
        processor=processor(space.resources),
        device=space.resources.device,
        fresh=fresh,
    )


@contextlib.contextmanager
def exclusively(sweep: SweepStore) -> Iterator[bool]:
    """Lock the sweep for the duration of the block, and download its new files if the store is remote.

    Yields:
        Whether the process that ran the sweep before was killed.

    Raises:
        UserError: Another process is running the sweep.
    """
    name = f"sweep {sweep.folder.name}"
    busy = f"{name} is being run by another process; wait until that process ends, or stop it."
    with locked(sweep.folder / ".lock", busy), sweep.remote.exclusively(name):
        sweep.remote.pull(discard=True)
        killed = (sweep.folder / DRIVER).exists()
        (sweep.folder / DRIVER).unlink(missing_ok=True)
        try:
            yield killed
        finally:
            with contextlib.suppress(OSError):  # only a cache, and the disk may be full
                sweep.remote.save()


def clear_leftovers(sweep: SweepStore, rounds: int, retry: bool, together: bool = False) -> None:
    """Delete incomplete files of a killed session, mark complete trials as finished, and reopen failed trials.

    Ended trials whose recorded rounds or whose plan is missing are always reopened.

    Args:
        sweep: The sweep to resume.
        rounds: Number of rounds of a complete trial.
        retry: Whether failed trials are reopened so that they run again. A sampled search does not reopen them, because
            later samples depend on the failure. While other processes take part in the sweep, they are not reopened.
        together: Whether the outcome of a trial depends on other trials (see `decides_jointly`). If so, complete trials
            are not marked here, because they may have been pruned.

    Raises:
        UserError: The checkpoint of a trial that continues another trial is missing and cannot be copied again.
    """
    with planning(sweep):  # a process that joins the sweep meanwhile waits before it starts a trial
        alone = not joined(sweep)
        if alone:
            _clear_files(sweep)
        _reopen_trials(sweep, rounds, retry and alone, together)


def _clear_files(sweep: SweepStore) -> None:
    for name in (SCRATCH, JOINED):
        shutil.rmtree(sweep.folder / name, ignore_errors=True)
    sweep.remote.clear(SCRATCH)
    for torn in (sweep.folder / "trials").glob("*/.*"):
        # A folder such as `.ipynb_checkpoints` is not ours.
        if torn.is_file() and torn.name != TAKEN and not is_hidden(torn.parent):
            torn.unlink()


def _reopen_trials(sweep: SweepStore, rounds: int, retry: bool, together: bool) -> None:
    for outcome in (sweep.folder / "trials").glob("*/outcome.json"):
        if not (trial_folder := sweep.trial(outcome.parent.name)).planned and not is_hidden(outcome.parent):
            trial_folder.reopen()
    if not together:
        mark_finished(sweep, rounds)
    for trial in sweep.trials():
        store = sweep.trial(trial.plan.key)
        ended = trial.outcome or store.error()
        failed = ended is not None and ended.outcome == "failed"
        if (trial.missing or (failed and retry)) and not store.is_taken:
            store.reopen()
        _restore_start(sweep, trial)


def _restore_start(sweep: SweepStore, trial: TrialRecord) -> None:
    """Copy the checkpoint of the trial that `trial` continues, if the checkpoint of `trial` is missing.

    Raises:
        UserError: The other trial is no longer at the round from which `trial` continues.
    """
    start, store = trial.plan.start, sweep.trial(trial.plan.key)
    if start is None or store.checkpoint.exists():
        return
    try:
        store.begin_from(sweep.trial(start.key), start.round)
    except ValueError:
        raise UserError(
            f"sweep {sweep.folder.name} cannot be resumed because {store.checkpoint} is missing and trial {start.key}, "
            f"which this trial continues from round {start.round}, is no longer at this round; restore the file from a "
            "copy, or start a new sweep."
        ) from None


def mark_finished(sweep: SweepStore, rounds: int) -> None:
    """Record the outcome `finished` for each trial that an interrupted session left with all rounds but no outcome."""
    for trial in sweep.trials():
        if trial.outcome is None and trial.last_round >= rounds:
            sweep.trial(trial.plan.key).end(Outcome(outcome="finished", round=trial.last_round))
