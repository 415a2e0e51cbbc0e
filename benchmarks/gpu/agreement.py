"""Runs of several methods on the CPU and on the GPU with the same seed, and the differences between their metrics."""

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import Device, run
from fedsweep.federation.run_config import RunConfig

ROUNDS = 3
TOLERANCE = {"accuracy": 0.02, "loss": 0.02}
"""The largest accepted difference of an accuracy (between 0 and 1), and the largest relative difference of a loss."""

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_large": ("fedra_digits", {"method": {"name": "all_large"}}),
    "all_large, dropout": ("fedra_digits", {"method": {"name": "all_large"}, "lora.dropout": 0.1}),
    "fedra": ("fedra_digits", {}),
    "fedra, FedDyn": ("fedra_digits", {"base_optimizer": {"name": "feddyn", "alpha": 0.1}}),
    "fedra, product_svd": ("fedra_digits", {"aggregation.lora": "product_svd"}),
    "inclusivefl": ("fedra_digits", {"method": {"name": "inclusivefl"}}),
    "depthfl": ("fedra_digits", {"method": {"name": "depthfl"}}),
    "fedbrick": ("fedbrick_digits", {}),
    "fedms": ("fedms_digits", {"method.global_rounds": 2}),
    "fedag": ("fedag_digits", {}),
}
"""The experiment of each run, and the hyperparameters that the run changes. FedMS runs two rounds of its first stage
and one round of its second stage."""


@dataclass(frozen=True)
class Played:
    """The metrics of all rounds of a run, its final adapter on the CPU, and the seconds of its last round."""

    metrics: list[dict[str, float]]
    adapter: dict[str, Tensor]
    seconds: float


def play(name: str, device: Device, rounds: int) -> Played:
    """Execute the run `name` on a device, with one CPU thread."""
    torch.set_num_threads(1)
    experiment, changes = RUNS[name]
    config = RunConfig.of(read_yaml(find("experiments", experiment)), experiment)
    metrics = []
    for result in run(config.override({**changes, "federation.rounds": rounds}, "benchmark"), device):
        metrics.append(dict(result.metrics))
    adapter = {key: tensor.detach().cpu() for key, tensor in result.state.adapter.items()}
    return Played(metrics, adapter, result.seconds)


@contextmanager
def caching(gigabytes: float) -> Iterator[None]:
    """Use a new activation cache of this size until the `with` statement ends."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FEDSWEEP_CACHE": folder, "FEDSWEEP_CACHE_GB": f"{gigabytes:g}"}
        yield


def differences(one: Played, other: Played) -> dict[str, float]:
    """Return the largest difference of an accuracy, of a loss (relative) and of the final adapter (relative)."""
    accuracy = loss = 0.0
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        for name in ours.keys() & theirs.keys():
            gap = abs(ours[name] - theirs[name])
            if name.startswith("accuracy/"):
                accuracy = max(accuracy, gap)
            elif name.startswith("loss/"):
                loss = max(loss, gap / max(abs(theirs[name]), 1e-12))
    gaps = [(one.adapter[name] - other.adapter[name]).double().norm().item() for name in other.adapter]
    norms = [tensor.double().norm().item() for tensor in other.adapter.values()]
    return {"accuracy": accuracy, "loss": loss, "adapter": math.hypot(*gaps) / math.hypot(*norms)}


def names_of(played: Played) -> list[list[str]]:
    """Return the names of the metrics of each round."""
    return [sorted(metrics) for metrics in played.metrics]


def equal(one: Played, other: Played) -> bool:
    """Return whether two runs have the same metrics in all rounds and bit-identical final adapters."""
    same = one.adapter.keys() == other.adapter.keys()
    same = same and all(torch.equal(one.adapter[name], other.adapter[name]) for name in one.adapter)
    return same and one.metrics == other.metrics


def measure(device: Device, quick: bool) -> tuple[list[dict[str, Any]], bool]:
    """Compare all runs; return a row for each run, and whether the runs agree within the tolerance."""
    rounds, names, rows = 1 if quick else ROUNDS, list(RUNS), []
    workers = max(min((os.cpu_count() or 1) - 1, len(names)), 1)
    with caching(0), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        on_cpu = {name: pool.submit(play, name, "cpu", rounds) for name in names}
        for name in names:
            begun = time.perf_counter()
            first, second = (play(name, device, rounds) for _ in range(2))
            with caching(10):
                cached = play(name, device, rounds)
            os.environ["FEDSWEEP_CACHE_GB"] = "0"
            rows.append(
                {
                    "run": name,
                    "difference": differences(first, on_cpu[name].result()),
                    "same_names": names_of(first) == names_of(on_cpu[name].result()),
                    "equal_bits_again": equal(first, second),
                    "difference_cached": differences(cached, first),
                    "accuracy": first.metrics[-1]["accuracy/mean"],
                    "accuracy_cpu": on_cpu[name].result().metrics[-1]["accuracy/mean"],
                    "seconds_per_round": round(second.seconds, 3),
                    "seconds": round(time.perf_counter() - begun, 1),
                }
            )
    show(rows)
    return rows, all(accepted(row) for row in rows)


def accepted(row: dict[str, Any]) -> bool:
    """Return whether a run on the GPU agrees with the run on the CPU, and is the same if it is repeated."""
    close = all(row["difference"][name] <= limit for name, limit in TOLERANCE.items())
    return bool(close and row["same_names"] and row["equal_bits_again"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of all runs."""
    table = Table(
        "run", "accuracy", "Δ accuracy", "Δ loss", "Δ adapter", "repeated", "Δ adapter, cached", "s per round"
    )
    for row in rows:
        gaps = row["difference"]
        table.add_row(
            row["run"],
            f"{row['accuracy']:.4f}",
            f"{gaps['accuracy']:.1e}",
            f"{gaps['loss']:.1e}",
            f"{gaps['adapter']:.1e}",
            "bit-identical" if row["equal_bits_again"] else "differs",
            f"{row['difference_cached']['adapter']:.1e}",
            f"{row['seconds_per_round']:.2f}",
        )
    Console(width=120).print(table)
