"""The trainable: one communication round is one reported step."""

import os
from pathlib import Path
from typing import Any

from ray import tune

from fedsweep.store import SweepStore


def train(config: dict[str, Any], *, sweep: str, threads: int, device: str, environment: dict[str, str]) -> None:
    """Run the trial whose plan lies under `config["trial"]`, reporting each round once it is on disk.

    Heavy imports happen once per worker; Ray reuses workers between trials.
    """
    os.environ.update(environment)  # a worker has another working directory
    import torch

    from fedsweep.experiment import RunConfig
    from fedsweep.play import check_digests, run_durably

    torch.set_num_threads(threads)
    store = SweepStore(Path(sweep)).trial(config["trial"])
    plan = store.read().plan
    run = RunConfig.of(plan.config, f"trial {plan.key}")
    check_digests(run, plan.digests)
    try:
        for record in run_durably(run, store.checkpoint, device):  # type: ignore[arg-type]
            tune.report({**record.metrics, "round": record.round, "seconds": record.seconds})
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
