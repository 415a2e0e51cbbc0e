"""Compare the memory of runs with 60 clients and with 6 clients, each of which holds only one model in memory.

    uv run python benchmarks/many_clients.py
    uv run python benchmarks/many_clients.py --rounds 3 --out benchmarks/results/NAME.json

Both runs use experiments/fedra_digits.yaml with one client per domain in each round. In one run, the images of each
domain are split over ten clients. In the other run, one client has all images of a domain. Each run has its own process
with one thread. The table shows medians over repetitions.

Small clients have batches of many different sizes, and oneDNN caches a kernel for each size. Set
ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 to measure without this cache.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_config import RunConfig

CLIENTS_PER_DOMAIN = (1, 10)


def play(clients_per_domain: int, rounds: int) -> dict[str, float]:
    """Run the experiment in this process; return the numbers of clients, and the memory and model size in MiB."""
    partition = {"name": "feature_label_skew", "clients_per_domain": clients_per_domain}
    changes = {"partition": partition, "federation.clients_per_round": "one_per_domain", "federation.rounds": rounds}
    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "fedra_digits")
    federation = build(config.override(changes, "the benchmark"))
    built = high_water()
    for result in federate(federation):
        adapter = result.state.adapter
    return {
        "clients": len(federation.clients),
        "cohort": len(federation.cohort(1)),
        "built_mib": built,
        "peak_mib": high_water(),
        "model_mib": _mib(federation.model.state_dict()),
        "adapter_mib": _mib(adapter),
    }


def _mib(tensors: dict[str, torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors.values()) / 2**20


def high_water() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def main() -> None:
    """Run both experiments, print a table and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.play:
        print(json.dumps(play(given.play, given.rounds)))
        return
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in CLIENTS_PER_DOMAIN}
    for _ in range(given.repeats):
        for count, found in runs.items():
            command = [sys.executable, __file__, "--rounds", str(given.rounds), "--play", str(count)]
            found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    few, many = ({name: statistics.median(one[name] for one in found) for name in found[0]} for found in runs.values())
    table = Table("clients", "in a round", "before round 0", "peak", "model", "adapters and head", title="MiB")
    for run in (few, many):
        sizes = (f"{run[name]:.2f}" for name in ("built_mib", "peak_mib", "model_mib", "adapter_mib"))
        table.add_row(str(run["clients"]), str(run["cohort"]), *sizes)
    out = Console(highlight=False)
    out.print(table)
    difference = {name: many[name] - few[name] for name in ("built_mib", "peak_mib")}
    spread = max(
        max(one["peak_mib"] for one in found) - min(one["peak_mib"] for one in found) for found in runs.values()
    )
    out.print(
        f"{many['clients'] - few['clients']:.0f} more clients: {difference['built_mib']:+.1f} MiB before round 0, "
        f"{difference['peak_mib']:+.1f} MiB at the peak (repetitions differ by up to {spread:.1f} MiB)"
    )
    figures: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.machine()}, one thread",
        "versions": {name: version(name) for name in ("torch", "timm", "peft", "fedsweep")},
        "rounds": given.rounds,
        "repeats": given.repeats,
        "runs": [few, many],
        "difference": difference,
        "spread_mib": spread,
    }
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
