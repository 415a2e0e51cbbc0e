"""Functions that compute the number of parallel trials, and estimate the duration of a sweep from one round."""

import math
import time
from itertools import islice

import torch

from fedsweep.federation.build_and_run import run
from fedsweep.sweep.cluster import packing
from fedsweep.sweep.cluster.cluster import HERE, Cluster, concurrency, gpus_of, most_on_a_gpu
from fedsweep.sweep.cluster.gpus import meter
from fedsweep.sweep.plan.plan import Plan

WORKER_START = 20.0  # seconds until Ray has started and a worker has imported its modules, measured on two cores


def side_by_side(plan: Plan, cluster: Cluster = HERE) -> int:
    """Return how many trials run in parallel. The setting `search.in_flight` of a TPE search is an upper limit."""
    fit, search = concurrency(plan.space.resources, cluster), plan.space.search
    return min(fit, search.in_flight) if search.name == "tpe" else fit


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
    untuned, first = islice(run(plan.resolve({}, plan.space.seeds[0]), resources.device), 2)
    build = time.monotonic() - begun - untuned.seconds - first.seconds
    trial = build + untuned.seconds + plan.base.federation.rounds * first.seconds
    if memory := measure.read():
        taken, most = memory[packing.PEAK] + memory[packing.BESIDE], most_on_a_gpu(resources, cluster)
        fit = packing.side_by_side(taken, memory[packing.TOTAL], most)
        side = min(side, fit * max(gpus_of(resources, cluster), 1))
    return WORKER_START + math.ceil(plan.num_trials / side) * trial, side
