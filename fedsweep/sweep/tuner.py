"""Assembles Ray Tune around a plan and runs it. Resume is a new Tuner over the plan less what is done."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joblib import cpu_count
from rich.console import Console

from fedsweep.errors import DivergenceError, UserError
from fedsweep.lock import held
from fedsweep.paths import environment
from fedsweep.store import Outcome, Store, SweepManifest, SweepStore, TrialRecord
from fedsweep.sweep.display import LiveTable
from fedsweep.sweep.plan import Plan
from fedsweep.sweep.space import Resources
from fedsweep.tracking import Recorder, check_writable

if TYPE_CHECKING:
    from fedsweep.sweep.recording import Recording

RAY_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Under `uv run`, Ray would copy the working directory, prepared images and all, and start each worker in the copy.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True)
class SweepResult:
    """How a session of a sweep ended."""

    sweep: SweepStore
    recorder: Recorder
    trials: list[TrialRecord]
    interrupted: bool


def check_resources(resources: Resources) -> None:
    """Refuse what would make Ray wait for ever in silence.

    Raises:
        UserError: a fraction above one that is not whole, or more than the machine has.
    """
    gpus, cpus = resources.gpus_per_trial, resources.cpus_per_trial
    if gpus > 1 and gpus != int(gpus):
        raise UserError(f"`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is {gpus:g}.")
    if gpus > 0:
        import torch

        if gpus > (seen := torch.cuda.device_count()):
            raise UserError(
                f"`gpus_per_trial` is {gpus:g}, but this machine has {seen} GPUs that Ray could hand out; "
                "`--gpus-per-trial 0` would run on the CPU."
            )
    if cpus > (cores := available_cpus()):
        raise UserError(f"`cpus_per_trial` is {cpus:g}, but this machine has {cores} cores.")


def available_cpus() -> int:
    """Cores that this process may use, a container's quota respected."""
    return int(cpu_count())


def concurrency(resources: Resources) -> int:
    """Trials that fit side by side on this machine."""
    slots = int(available_cpus() / resources.cpus_per_trial)
    if resources.gpus_per_trial > 0:
        import torch

        gpus, share = torch.cuda.device_count(), resources.gpus_per_trial
        slots = min(slots, gpus * int(1 / share) if share <= 1 else int(gpus / share))
    return max(slots, 1)


def open_sweep(plan: Plan, store: Store, resume: bool, sweep_id: str | None) -> SweepStore:
    """A new sweep's folder, or that of the one to go on with.

    Raises:
        UserError: there is nothing to resume, or its definition, the engine or the data changed since.
    """
    if resume:
        sweep = store.find(plan.name, sweep_id)
        started = sweep.manifest()
        for what, digest in plan.digests().items():
            if started.digests[what] != digest:
                changed = {
                    "definition": "its YAML files or overrides have",
                    "engine": "fedsweep's engine has",
                    "data": "its data or weights have",
                    "packages": "the installed packages have",
                }
                raise UserError(
                    f"sweep {started.id} of {plan.name} cannot be resumed because {changed[what]} changed since; "
                    "start a new sweep, or undo the change."
                )
        check_writable(store.root)
        return sweep
    check_writable(store.root)
    now = datetime.datetime.now(datetime.UTC)
    manifest = SweepManifest(
        id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=plan.name,
        experiment=plan.space.experiment,
        created=now.isoformat(),
        metric=plan.space.objective.metric,
        mode=plan.space.objective.mode,
        rounds=plan.base.federation.rounds,
        varied=tuple(plan.space.names),
        baseline=plan.space.baseline,
        reference=plan.reference,
        seeds=plan.space.seeds,
        scheduler=plan.space.scheduler.name,
        search=plan.space.search.name,
        domains=plan.base.data.domains,
        overrides=plan.changes["overrides"],
        options=plan.changes["options"],
        digests=plan.digests(),
    )
    sweep = store.sweep(plan.name, manifest.id)
    sweep.create(manifest, plan.files)
    return sweep


def run_sweep(
    plan: Plan, store: Store, console: Console, *, resume: bool = False, sweep_id: str | None = None
) -> SweepResult:
    """Run what is left of a plan on Ray Tune; the store and MLflow hold every round when this returns.

    Raises:
        UserError: the machine, the store or the sweep does not allow it; nothing was started.
    """
    check_resources(plan.space.resources)
    plan.preflight()
    sweep = open_sweep(plan, store, resume, sweep_id)
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    from fedsweep.sweep.recording import Recording  # imports ray, which reads them: not for what is refused

    rounds = plan.base.federation.rounds
    with _alone(sweep):
        tidy(sweep, rounds, retry=plan.sampled is None)
        recorder = Recorder(store, plan.name)
        recorder.open_sweep(sweep.manifest(), sweep.folder)
        done = [trial for trial in sweep.trials() if trial.outcome is not None]
        with LiveTable(console, plan.space.objective.metric, rounds, plan.num_trials, done) as display:
            recording = Recording(sweep, recorder, display, rounds)
            recording.sync_all()
            # Ray ends quietly on the first Ctrl-C; a second one, or one while Ray starts, ends up here.
            with contextlib.suppress(KeyboardInterrupt):
                if len(done) < plan.num_trials:
                    with _ray():
                        _tune(plan, sweep, recording, {trial.plan.key for trial in done})
            settle(sweep, rounds)
            recording.sync_all()
        trials = sweep.trials()
        unfinished = [trial for trial in trials if trial.outcome is None]
        for trial in unfinished:
            recorder.interrupt(trial)
    return SweepResult(sweep, recorder, trials, len(trials) - len(unfinished) < plan.num_trials)


@contextlib.contextmanager
def _alone(sweep: SweepStore) -> Iterator[None]:
    taken = f"sweep {sweep.folder.name} is being run by another process; wait for it or end it."
    with held(sweep.folder / ".lock", taken):
        yield


def tidy(sweep: SweepStore, rounds: int, retry: bool) -> None:
    """Clear what a killed session left behind, and with `retry` reopen failures that another attempt may mend.

    A diverged trial diverges again; a worker that ran out of memory, or a full disk, may not be met again. In a
    sampled search a failure stays one, because the search has gone on from it.
    """
    shutil.rmtree(sweep.folder / "ray", ignore_errors=True)
    for torn in (sweep.folder / "trials").glob("*/.*"):
        torn.unlink()
    settle(sweep, rounds)
    for trial in sweep.trials() if retry else ():
        error = trial.outcome.error if trial.outcome else None
        if error is not None and DivergenceError.__name__ not in error:
            sweep.trial(trial.plan.key).reopen()


def settle(sweep: SweepStore, rounds: int) -> None:
    """Mark trials as finished that have all their rounds on disk, but whose session ended before it could say so."""
    for trial in sweep.trials():
        if trial.outcome is None and trial.last_round >= rounds:
            sweep.trial(trial.plan.key).end(Outcome(outcome="finished", round=trial.last_round))


def _tune(plan: Plan, sweep: SweepStore, recording: Recording, done: set[str]) -> None:
    """One Tuner over what is not done."""
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler

    from fedsweep.sweep.rungs import Rungs, RungScheduler
    from fedsweep.sweep.search import PlannedSearch, SampledSearch
    from fedsweep.sweep.trial import train

    resources, asha = plan.space.resources, plan.space.scheduler
    search = (
        PlannedSearch([trial for trial in plan.grid() if trial.key not in done], recording.announce)
        if plan.sampled is None
        else SampledSearch(plan, sweep, recording.announce)
    )
    scheduler = (
        FIFOScheduler()
        if asha.name == "none"
        else RungScheduler(Rungs(asha, plan.base.federation.rounds, sweep.folder / "rungs.jsonl"), plan.space.objective)
    )
    trainable = tune.with_parameters(
        train,
        sweep=str(sweep.folder),
        threads=max(int(resources.cpus_per_trial), 1),
        device="cuda" if resources.gpus_per_trial > 0 else "cpu",
        environment=environment(),
    )
    scratch = sweep.folder / "ray"
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": resources.cpus_per_trial, "gpu": resources.gpus_per_trial}),
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler,
            num_samples=-1,
            max_concurrent_trials=concurrency(resources),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=secrets.token_hex(4), storage_path=str(scratch), callbacks=[recording], verbose=0
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # Ray's own bookkeeping; the truth is in trials/


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """A quiet local Ray for the time of the sweep."""
    import ray

    ray.init(
        address="local",
        num_cpus=available_cpus(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=True,
    )
    for noisy in ("ray.tune", "ray.tune.execution.tune_controller", "ray.tune.tune"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()
