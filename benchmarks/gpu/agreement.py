"""Runs of several methods on the CPU and on the GPU with the same seed, and the differences between their metrics."""

import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
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
    """The metrics of all rounds of a run, and its final adapter on the CPU."""

    metrics: list[dict[str, float]]
    adapter: dict[str, Tensor]


def play(name: str, device: Device, rounds: int, cache: float = 0.0) -> Played:
    """Execute the run `name` on a device, with one CPU thread and a new activation cache of `cache` GB."""
    torch.set_num_threads(1)
    experiment, changes = RUNS[name]
    config = RunConfig.of(read_yaml(find("experiments", experiment)), experiment)
    metrics = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FEDSWEEP_CACHE": folder, "FEDSWEEP_CACHE_GB": f"{cache:g}"}
        for result in run(config.override({**changes, "federation.rounds": rounds}, "benchmark"), device):
            metrics.append(dict(result.metrics))
    return Played(metrics, {key: tensor.detach().cpu() for key, tensor in result.state.adapter.items()})


def play_three_times(name: str, device: Device, rounds: int) -> tuple[Played, Played, Played]:
    """Execute the run `name` twice without an activation cache and once with it."""
    return play(name, device, rounds), play(name, device, rounds), play(name, device, rounds, cache=10)


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


def measure(device: Device, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the differences of each run. Two thirds of the cores execute runs on the CPU, and one third on the GPU."""
    rounds, cores = 1 if quick else ROUNDS, os.cpu_count() or 1
    names = ("fedra",) if quick else tuple(RUNS)
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(max(cores // 3, 1), spawn) as near,
        ProcessPoolExecutor(max(cores * 2 // 3, 1), spawn) as far,
    ):
        on_cpu = {name: far.submit(play, name, "cpu", rounds) for name in names}
        on_device = {name: near.submit(play_three_times, name, device, rounds) for name in names}
        for name in names:
            reference, (first, second, cached) = on_cpu[name].result(), on_device[name].result()
            yield {
                "run": name,
                "difference": differences(first, reference),
                "same_names": names_of(first) == names_of(reference),
                "equal_bits_again": equal(first, second),
                "difference_cached": differences(cached, first),
                "accuracy": first.metrics[-1]["accuracy/mean"],
                "accuracy_cpu": reference.metrics[-1]["accuracy/mean"],
            }


def accepted(row: dict[str, Any]) -> bool:
    """Return whether a run on the GPU agrees with the run on the CPU, and is the same if it is repeated."""
    close = all(row["difference"][name] <= limit for name, limit in TOLERANCE.items())
    return bool(close and row["same_names"] and row["equal_bits_again"])


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all runs."""
    found = Table("run", "accuracy", "Δ accuracy", "Δ loss", "Δ adapter", "repeated", "Δ adapter, cached")
    for row in rows:
        gaps = row["difference"]
        found.add_row(
            row["run"],
            f"{row['accuracy']:.4f}",
            *(f"{gaps[name]:.1e}" for name in ("accuracy", "loss", "adapter")),
            "bit-identical" if row["equal_bits_again"] else "differs",
            f"{row['difference_cached']['adapter']:.1e}",
        )
    return found
