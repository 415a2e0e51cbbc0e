"""Estimate of a sweep's duration from one round measured on this machine."""

import math
import time
from itertools import islice

import torch

from fedsweep.federation.build_and_run import run
from fedsweep.sweep.cluster.cluster import HERE, Cluster, gpus_of, most_on_a_gpu
from fedsweep.sweep.cluster.gpus import Meter, meter
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL, side_by_side
from fedsweep.sweep.plan.plan import Plan

WORKER_START = 20.0  # seconds until Ray and a worker's imports are up, measured on two cores


def estimate(plan: Plan, side: int, cluster: Cluster = HERE) -> tuple[float, int]:
    """Run the untuned evaluation and one round; return the sweep's seconds and its number of trials side by side.

    That number is at most `side`, and lower if `gpus_per_trial` is auto and the measured memory allows fewer trials.
    """
    resources = plan.space.resources
    measure = meter(resources.device, 1.0) if resources.gpus_per_trial == "auto" else Meter()
    torch.set_num_threads(resources.threads)
    measure.start()
    begun = time.monotonic()
    untuned, first = islice(run(plan.resolve({}, plan.space.seeds[0]), resources.device), 2)
    build = time.monotonic() - begun - untuned.seconds - first.seconds
    trial = build + untuned.seconds + plan.base.federation.rounds * first.seconds
    if memory := measure.read():
        fit = side_by_side(memory[PEAK] + memory[BESIDE], memory[TOTAL], most_on_a_gpu(resources, cluster))
        side = min(side, fit * max(gpus_of(resources, cluster), 1))
    return WORKER_START + math.ceil(plan.num_trials / side) * trial, side
