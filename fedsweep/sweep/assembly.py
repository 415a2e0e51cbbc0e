"""What a plan chooses of a sweep's parts: what hands out trials, what stops them, what they take of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep.climb import Climb
from fedsweep.sweep.cluster import Cluster, most_on_a_gpu
from fedsweep.sweep.generations import Generations
from fedsweep.sweep.packing import Packing
from fedsweep.sweep.plan import Plan

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import Searcher

    from fedsweep.sweep.recording import Recording


def climb_of(plan: Plan, sweep: SweepStore, planned: Sequence[TrialPlan] | None) -> Climb | Generations | None:
    """What arms have climbed, where they climb together, or how far a population has come."""
    if plan.space.scheduler.name == "pbt":
        return Generations(plan, sweep)
    if planned is None or plan.space.scheduler.name != "arms":
        return None
    objective, rounds = plan.space.objective, plan.base.federation.rounds
    return Climb(planned, sweep, plan.space.scheduler, objective.metric, objective.mode, rounds, plan.space.baseline)


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
    from fedsweep.sweep.climbing import ClimbingSearch
    from fedsweep.sweep.planned import PlannedSearch
    from fedsweep.sweep.populating import PopulationSearch
    from fedsweep.sweep.search import SampledSearch

    if isinstance(recording.climb, Generations):
        return PopulationSearch(recording.climb, recording.announce, packing)
    if planned is None:
        return SampledSearch(plan, sweep, recording.announce, packing)
    if recording.climb is not None:
        return ClimbingSearch(recording.climb, recording.announce, packing)
    left = [trial for trial in planned if sweep.trial(trial.key).outcome() is None]
    return PlannedSearch(sweep, left, plan.base.federation.rounds, recording.announce, packing)


def scheduler_of(plan: Plan, sweep: SweepStore, recording: Recording) -> TrialScheduler:
    """What stops them."""
    from ray.tune.schedulers import FIFOScheduler

    from fedsweep.sweep.climbing import ClimbingScheduler
    from fedsweep.sweep.medians import Medians
    from fedsweep.sweep.rungs import Rungs, StoppingScheduler

    chosen, log, space = plan.space.scheduler, sweep.folder / "decisions.jsonl", plan.space
    if isinstance(recording.climb, Climb):
        return ClimbingScheduler(recording.climb)
    match chosen.name:
        case "asha":
            rungs = Rungs(chosen, plan.base.federation.rounds, log, sweep.remote)
            return StoppingScheduler(rungs, space.objective, chosen.per)
        case "median":
            return StoppingScheduler(Medians(chosen, log, sweep.remote), space.objective, chosen.per)
    return FIFOScheduler()
