"""Ray Tune around a plan. Resume is a new Tuner over the trials that have not ended."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.paths import environment
from fedsweep.results import Store, SweepStore, TrialPlan, TrialRecord
from fedsweep.results.provenance import TAKEN_FROM
from fedsweep.results.remote.mirror import SCRATCH
from fedsweep.sweep.cluster.cluster import HERE, LOCAL, Cluster, check_resources, concurrency, most_on_a_gpu
from fedsweep.sweep.cluster.node_requirements import Arrival
from fedsweep.sweep.cluster.nodes import make_ready
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.cluster.ray_session import opened, prepare_environment, ray_session
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.pruning.population_state import Generations
from fedsweep.sweep.running.display import LiveTable
from fedsweep.sweep.running.open_sweep import alone, open_sweep, settle, tidy
from fedsweep.tracking import Destination, Recorder, check_server

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import Searcher

    from fedsweep.sweep.running.recording import Recording


def joint_state_of(plan: Plan, sweep: SweepStore, planned: Sequence[TrialPlan] | None) -> ArmState | Generations | None:
    """Return the state of arms that are halved together, or of a population; None for other schedulers."""
    if plan.space.scheduler.name == "pbt":
        return Generations(plan, sweep)
    if planned is None or plan.space.scheduler.name != "arms":
        return None
    objective, rounds = plan.space.objective, plan.base.federation.rounds
    return ArmState(planned, sweep, plan.space.scheduler, objective.metric, objective.mode, rounds, plan.space.baseline)


def packing_of(plan: Plan, sweep: SweepStore, recording: Recording, cluster: Cluster) -> Packing:
    """What trials take of a GPU, from what this sweep has seen of them by now."""
    resources, apart = plan.space.resources, plan.sampled is None
    known = [trial.plan for trial in sweep.trials()]
    packing = Packing(resources.gpus_per_trial, most_on_a_gpu(resources, cluster), sweep, known, apart=apart)
    packing.keep = recording.keep
    return packing


def search_of(
    plan: Plan, sweep: SweepStore, recording: Recording, planned: Sequence[TrialPlan] | None, packing: Packing
) -> Searcher:
    """What hands out trials."""
    from fedsweep.sweep.search.ray_searchers import ArmSearch, PlannedSearch, PopulationSearch, SampledSearch

    if isinstance(recording.joint, Generations):
        return PopulationSearch(recording.joint, recording.announce, packing)
    if planned is None:
        return SampledSearch(plan, sweep, recording.announce, packing)
    if recording.joint is not None:
        return ArmSearch(recording.joint, recording.announce, packing)
    left = [trial for trial in planned if sweep.trial(trial.key).outcome() is None]
    return PlannedSearch(sweep, left, plan.base.federation.rounds, recording.announce, packing)


def scheduler_of(plan: Plan, sweep: SweepStore, recording: Recording) -> TrialScheduler:
    """What stops them."""
    from ray.tune.schedulers import FIFOScheduler

    from fedsweep.sweep.pruning.single_trials import Medians, Rungs, StoppingScheduler
    from fedsweep.sweep.search.ray_searchers import ArmScheduler

    chosen, log, space = plan.space.scheduler, sweep.folder / "decisions.jsonl", plan.space
    if isinstance(recording.joint, ArmState):
        return ArmScheduler(recording.joint)
    match chosen.name:
        case "asha":
            rungs = Rungs(chosen, plan.base.federation.rounds, log, sweep.remote)
            return StoppingScheduler(rungs, space.objective, chosen.per)
        case "median":
            return StoppingScheduler(Medians(chosen, log, sweep.remote), space.objective, chosen.per)
    return FIFOScheduler()


@dataclass(frozen=True)
class SweepResult:
    """How a session of a sweep ended."""

    sweep: SweepStore
    recorder: Recorder
    trials: list[TrialRecord]
    interrupted: bool
    full: bool
    """Whether it was interrupted because no more could be written."""
    away: str = ""
    """Why a store elsewhere does not have everything, or empty."""


def run_sweep(
    plan: Plan,
    store: Store,
    console: Console,
    *,
    resume: bool = False,
    sweep_id: str | None = None,
    fresh: bool = False,
    address: str = LOCAL,
    at_once: int | None = None,
    destination: Destination | None = None,
) -> SweepResult:
    """Run what is left of a plan on Ray Tune; the store holds every round when this returns, MLflow soon.

    Raises:
        UserError: the machine or the cluster, the store, MLflow's server or the sweep does not allow it; nothing was
            started.
    """
    destination = destination or Destination.of(store.root)
    with opened(address, at_once) as cluster:
        check_resources(plan.space.resources, cluster)
        plan.preflight()
        try:
            check_server(destination, plan.name)
        except UserError as error:
            if not resume:
                raise
            console.print(f"{error} What it lacks is brought to it once it answers.", style="yellow")
        arrival = make_ready(cluster, plan, store, console)
        sweep = open_sweep(plan, store, resume, sweep_id, fresh)
        prepare_environment(cluster)
        with alone(sweep):
            return _play(plan, store, sweep, console, cluster, arrival, destination)


def _play(
    plan: Plan,
    store: Store,
    sweep: SweepStore,
    console: Console,
    cluster: Cluster,
    arrival: Arrival | None,
    destination: Destination,
) -> SweepResult:
    """Take what is there, run what is left, and put down how it ended."""
    from fedsweep.sweep.running.recording import Recording  # imports ray, which reads the environment

    rounds, together = plan.base.federation.rounds, plan.space.scheduler.name == "arms"
    if known := warm_start.read(sweep):
        console.print(known.note(rounds))
    tidy(sweep, rounds, retry=plan.sampled is None, judged=together)
    sweep.show(plan.space.columns, asked="columns" in plan.changes["options"])
    recorder = Recorder(store, plan.name, destination)
    recorder.open_sweep(sweep.manifest(), sweep.folder)
    sweep.remote.push()
    reuse = Reuse(store, sweep)
    planned = None if plan.sampled else [reuse.give(trial, judged=together) for trial in plan.grid()]
    done = [trial for trial in sweep.trials() if trial.outcome is not None]
    if taken := sum(TAKEN_FROM in trial.plan.marks for trial in done):
        console.print(f"{taken} of {plan.num_trials} trials are taken from earlier sweeps; --fresh runs all anew.")
    with LiveTable(console, plan.space.objective.metric, rounds, plan.num_trials, done) as display:
        recording = Recording(sweep, recorder, display, rounds, reuse)
        recording.joint = joint_state_of(plan, sweep, planned)
        recording.packing = packing = packing_of(plan, sweep, recording, cluster)
        recording.decide()
        recording.sync_all()
        # Ray ends quietly on the first Ctrl-C; a second one, or one while Ray starts, ends up here.
        with contextlib.suppress(KeyboardInterrupt):
            if _left(plan, recording, done):
                with ray_session(cluster):
                    searcher = search_of(plan, sweep, recording, planned, packing)
                    _tune(plan, sweep, recording, searcher, cluster, arrival)
        if (summary := packing.summary()) is not None:
            console.print(summary)
        with recording.until_full():
            sweep.remote.pull()
        recording.decide() if recording.joint else settle(sweep, rounds)
        recording.sync_all()
        with recording.until_full():
            sweep.remote.push(needed=True)
    trials = [recording.shown(trial.plan.key) for trial in sweep.trials()]
    unfinished = [trial for trial in trials if trial.outcome is None]
    for trial in unfinished:
        recorder.interrupt(trial)
    ended = [trial for trial in trials if trial.outcome is not None]
    return SweepResult(sweep, recorder, trials, _left(plan, recording, ended), recording.full, recording.away)


def _left(plan: Plan, recording: Recording, ended: Sequence[TrialRecord]) -> bool:
    """Whether there is anything to run yet. How many trials a population has shows only on the way."""
    if isinstance(recording.joint, Generations):
        return bool(recording.joint.wanted())
    return len(ended) < plan.num_trials


def _tune(
    plan: Plan,
    sweep: SweepStore,
    recording: Recording,
    searcher: Searcher,
    cluster: Cluster,
    arrival: Arrival | None,
) -> None:
    """One Tuner over what is not done."""
    from ray import tune

    from fedsweep.sweep.running.recording import WhenFull
    from fedsweep.sweep.running.trainable import train

    resources = plan.space.resources

    def request(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": resources.cpus_per_trial, "GPU": config["gpus"]}])

    trainable = tune.with_parameters(
        train,
        sweep=str(sweep.folder),
        threads=resources.threads,
        device=resources.device,
        environment=environment(),
        arrival=arrival,
        elsewhere=sweep.remote.place,
        system_metrics=resources.system_metrics,
    )
    shared = sweep.remote.place if not cluster.is_local else None  # Ray looks for a file of its own from each node
    scratch = sweep.folder / SCRATCH
    tuner = tune.Tuner(
        tune.with_resources(trainable, request),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler_of(plan, sweep, recording),
            num_samples=-1,
            max_concurrent_trials=side_by_side(plan, cluster),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=secrets.token_hex(4),
            storage_path=f"{shared.base}/{SCRATCH}" if shared else str(scratch),
            storage_filesystem=shared.filesystem if shared else None,
            callbacks=[recording],
            stop=WhenFull(recording),
            failure_config=tune.FailureConfig(max_failures=0),  # `Recording` counts, and searchers hand out again
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # Ray's own bookkeeping; the truth is in trials/
        sweep.remote.clear(SCRATCH)


def side_by_side(plan: Plan, cluster: Cluster = HERE) -> int:
    """Trials that run at once: those that fit, and of samples no more than may be out."""
    fit = concurrency(plan.space.resources, cluster)
    return min(fit, plan.space.search.in_flight) if plan.space.search.name == "tpe" else fit
