"""How long a sweep will take, from one round measured on this machine."""

import math
import time
from itertools import islice

import torch

from fedsweep.play import Device, run
from fedsweep.sweep.plan import Plan

WORKER_START = 20.0  # seconds until Ray and a worker's imports are up, measured on two cores


def estimate_seconds(plan: Plan, side_by_side: int) -> float:
    """Seconds for all trials, every one to its last round: the untuned evaluation and one real round are played."""
    torch.set_num_threads(max(int(plan.space.resources.cpus_per_trial), 1))
    begun = time.monotonic()
    device: Device = "cuda" if plan.space.resources.gpus_per_trial > 0 else "cpu"
    untuned, first = islice(run(plan.resolve({}, plan.space.seeds[0]), device), 2)
    build = time.monotonic() - begun - untuned.seconds - first.seconds
    trial = build + untuned.seconds + plan.base.federation.rounds * first.seconds
    return WORKER_START + math.ceil(plan.num_trials / side_by_side) * trial
