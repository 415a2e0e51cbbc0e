"""Functions that compute the number of parallel trials, and estimate the duration of a sweep from single rounds."""

from __future__ import annotations

import math
import platform
import statistics
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation, federate
from fedsweep.results import Store, SweepStore
from fedsweep.results.arms import is_accuracy
from fedsweep.results.declared_comparisons import baselines, family_of
from fedsweep.sweep.cluster import packing
from fedsweep.sweep.cluster.cluster import HERE, Cluster, concurrency, gpus_of, most_on_a_gpu, processor
from fedsweep.sweep.cluster.gpus import meter
from fedsweep.sweep.plan.plan import Plan
from fedsweep.training.precision import arithmetic
from fedsweep.types import RoundResult

if TYPE_CHECKING:
    from fedsweep.report.expected_seeds import Forecast

WORKER_START = 12.0  # seconds until Ray has started and a worker has imported its modules, measured on two cores

NO_EFFECT = ("seed", "federation.rounds", "optimizer.lr", "optimizer.momentum", "optimizer.weight_decay")
"""Dotted names of hyperparameters that do not affect the duration of a round."""


def side_by_side(plan: Plan, cluster: Cluster = HERE) -> int:
    """Return how many trials run in parallel. The setting `search.in_flight` of a TPE search is an upper limit."""
    fit, search = concurrency(plan.space.resources, cluster), plan.space.search
    return min(fit, search.in_flight) if search.name == "tpe" else fit


SPREADS = (0.5, 1.0, 2.0)
"""Standard deviations of the paired differences for which seeds are forecast, as multiples of the smallest effect."""


def seed_forecasts(plan: Plan) -> dict[float | None, dict[str, Forecast]]:
    """Return the forecasts of a sweep with seeds until decided; an empty dict for other sweeps.

    The spread of the differences is not known before the sweep, so there are forecasts for several spreads.

    Returns:
        A dict from standard deviation of the paired differences, in the unit of `seeds.smallest_effect`, to forecasts
        (see `expected_seeds`). Without a smallest effect, the standard deviation does not matter and is None.
    """
    if (until := plan.space.until_decided) is None:
        return {}
    from fedsweep.report.expected_seeds import expected_seeds  # imports the report: only if it is needed
    from fedsweep.report.sequential_tests import SequentialRule

    metric, against = plan.space.goal.metric, baselines(plan.arms, plan.space.baseline)
    pairs = [(one.arm, one.against) for one in family_of(plan.space.comparisons, plan.arms, metric, against)]
    if not pairs:
        return {}
    others = {two for one, two in against.items() if one != two}
    rule = SequentialRule(until.at_least, until.at_most, until.smallest_effect)
    if until.smallest_effect is None:
        return {None: expected_seeds(rule, pairs, 1.0, others)}
    spreads = [until.smallest_effect * times for times in SPREADS]
    return {spread: expected_seeds(rule, pairs, spread, others) for spread in spreads}


def seed_forecast_lines(plan: Plan) -> list[str]:
    """Return the forecasts of a sweep with seeds until decided as lines; an empty list for other sweeps."""
    lines, metric = list[str](), plan.space.goal.metric
    against, comparisons = baselines(plan.arms, plan.space.baseline), plan.space.comparisons
    of_family = f" with {len(family_of(comparisons, plan.arms, metric, against))} comparisons" if comparisons else ""
    for spread, found in seed_forecasts(plan).items():
        if spread is None:
            one = found["no difference"]
            more = "" if one.baseline is None else f", {one.baseline:.1f} of the baseline"
            return [f"Expected seeds{of_family} without any difference: {one.seeds:.1f} per arm{more}."]
        if not lines:
            named = "" if found["no difference"].baseline is None else " (and of the baseline)"
            arms = f"per arm{named}{of_family}"
            lines = [f"Expected seeds {arms}, by the standard deviation (sd) of the paired differences:"]
        parts = [
            f"{one.seeds:.1f}{'' if one.baseline is None else f' ({one.baseline:.1f})'} with {name}"
            for name, one in found.items()
        ]
        lines.append(f"  sd {spread:g}{' points' * is_accuracy(metric)}: {', '.join(parts)}")
    return lines


def estimate(plan: Plan, side: int, cluster: Cluster = HERE) -> tuple[float, int]:
    """Estimate the duration of a sweep by running one round of its experiment on this machine.

    Args:
        plan: The plan of the sweep.
        side: Largest number of trials in parallel.
        cluster: The machines of the sweep.

    Returns:
        The duration of the sweep in seconds, and its number of trials in parallel. This number is lower than `side` if
        the option `gpus_per_trial` is `auto` and the measured memory allows fewer trials.
    """
    resources = plan.space.resources
    measure = meter(resources.device, 1.0 if resources.gpus == "auto" else 0.0)
    torch.set_num_threads(resources.threads)
    measure.start()
    begun = time.monotonic()
    federation = build(plan.resolve({}, plan.space.planned_seeds[0]), resources.device)
    _, first = islice(federate(federation), 2)
    once = time.monotonic() - begun - first.seconds  # building, and the evaluation of the untuned model
    last = federation.config.rounds
    some, whole = (_evaluation_seconds(federation, first, round) for round in (min(1, last - 1), last))
    training = max(0.0, first.seconds - (whole if last == 1 else some) * federation.evaluates(1))
    trial = once + last * training + some * sum(map(federation.evaluates, range(1, last))) + whole
    if memory := measure.read():
        taken, most = memory[packing.PEAK] + memory[packing.BESIDE], most_on_a_gpu(resources, cluster)
        fit = packing.side_by_side(taken, memory[packing.TOTAL], most)
        side = min(side, fit * max(gpus_of(resources, cluster), 1))
    return WORKER_START + math.ceil(plan.num_trials / side) * trial, side


def _evaluation_seconds(federation: Federation, result: RoundResult, round: int) -> float:
    begun = time.monotonic()
    with arithmetic(federation.precision, federation.model.mean.device):
        federation.evaluate(result.state, round)
    return time.monotonic() - begun


def from_records(plan: Plan, store: Store, side: int, cluster: Cluster = HERE) -> tuple[float, str] | None:
    """Estimate the duration of a sweep from recorded rounds of the same experiment on this machine.

    A round counts if its trial had the same data, model, method and number of local steps, and if its sweep ran on the
    same processor with the same number of threads and the same code.

    Args:
        plan: The plan of the sweep.
        store: The results folder.
        side: The number of trials in parallel.
        cluster: The machines of the sweep.

    Returns:
        The duration of the sweep in seconds, and the id of the newest sweep with such rounds. The result is None if
        there is no such sweep, or if the memory of a trial on a GPU must be measured anyway.
    """
    resources, here = plan.space.resources, platform.node()
    if not cluster.is_local or resources.gpus == "auto" or not here:
        return None
    same = _affecting(plan.resolve({}, plan.space.planned_seeds[0]).model_dump(mode="json"))
    place = here, processor(resources), plan.engine_digest
    for sweep in reversed(store.sweeps()):
        manifest = sweep.manifest()
        comparable = place == (manifest.machine, manifest.processor, manifest.digests.get("engine"))
        if comparable and (trials := _durations(sweep, same, plan.base.federation.rounds)):
            return WORKER_START + math.ceil(plan.num_trials / side) * statistics.median(trials), manifest.id
    return None


def _affecting(config: dict[str, Any]) -> dict[str, Json]:
    return {name: value for name, value in flat(config).items() if name not in NO_EFFECT}


def _durations(sweep: SweepStore, same: dict[str, Json], rounds: int) -> list[float]:
    """Return the estimated durations of `rounds` rounds, one for each comparable trial of an earlier sweep.

    Args:
        sweep: The earlier sweep.
        same: The hyperparameters of a comparable trial that affect the duration of a round.
        rounds: The number of rounds after round 0.
    """
    found = []
    for key in sweep.ended():
        try:
            trial = sweep.trial(key).read()
        except UserError:  # a resume of that sweep reports the damage
            continue
        seconds = [one.seconds for one in trial.history]
        if len(seconds) > 1 and _affecting(trial.plan.config) == same:
            found.append(seconds[0] + rounds * statistics.fmean(seconds[1:]))
    return found
