"""Measure what the activation cache saves a sweep: the same trials with and without it.

    uv run python -m benchmarks.cache
    uv run python -m benchmarks.cache --trials 3 --rounds 2 --out benchmarks/results/NAME.json

Each sweep is a series of trials that differ in the learning rate. Without the cache, every trial computes the outputs
of frozen blocks itself. With the cache, the first trial writes them into an empty folder, and all trials read them.
Times are CPU seconds with one thread. The results must be identical, or the exit code is 1.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import run
from fedsweep.federation.run_config import RunConfig

from .recorded import write

SWEEPS = {"FedMS": ("fedms_digits", "fedms"), "LFFT": ("fedms_digits", "lfft"), "FedCLIP": ("fedms_digits", "fedclip"),
          "FedAG": ("fedag_digits", "fedag")}  # fmt: skip
"""For each sweep, the experiment and the method. The methods train no block, or only some blocks."""


def configs(experiment: str, method: str, trials: int, rounds: int) -> list[RunConfig]:
    """Return the configurations of the trials."""
    config = RunConfig.of(read_yaml(find("experiments", experiment)), experiment)
    changes: dict[str, Any] = {"federation.rounds": rounds}
    if config.method.name != method:
        changes["method"] = method
    elif method == "fedms":
        changes["method.global_rounds"] = rounds
    rates = [config.optimizer.lr * (1 + number) / trials for number in range(trials)]
    return [config.override({**changes, "optimizer.lr": rate}, "the benchmark") for rate in rates]


def play(trials: list[RunConfig]) -> tuple[list[float], list[list[dict[str, float]]]]:
    """Run trials one after another; return the CPU seconds of each trial and its metrics."""
    seconds, metrics = [], []
    for config in trials:
        begun = time.process_time()
        metrics.append([dict(result.metrics) for result in run(config)])
        seconds.append(time.process_time() - begun)
    return seconds, metrics


def measure(name: str, trials: int, rounds: int) -> dict[str, Any]:
    """Run a sweep without and with the cache, and return the times and the size of the cache."""
    series = configs(*SWEEPS[name], trials, rounds)
    play(series[:1])  # the first run of a process imports modules and reads files
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FEDSWEEP_CACHE": folder, "FEDSWEEP_CACHE_GB": "0"}
        without, expected = play(series)
        os.environ["FEDSWEEP_CACHE_GB"] = "10"
        cached, found = play(series)
        size = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
    return {
        "sweep": name,
        "seconds_without": round(sum(without), 2),
        "seconds_with": round(sum(cached), 2),
        "ratio": round(sum(without) / sum(cached), 2),
        "first_trial_ratio": round(without[0] / cached[0], 2),
        "cache_megabytes": round(size / 1e6, 1),
        "equal_bits": found == expected,
    }


def main() -> int:
    """Run the sweeps, print a table and, with `--out`, write a JSON file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*SWEEPS], default=[*SWEEPS])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["FEDSWEEP_CACHE_GB"] = "0"
    rows = [measure(name, given.trials, given.rounds) for name in track(given.only, "sweeps")]
    heads = ("sweep", "without, s", "with, s", "ratio", "ratio of the first trial", "cache, MB", "bit-identical")
    made = Table(*heads, title=f"{given.trials} trials with {given.rounds} rounds, CPU seconds")
    for row in rows:
        made.add_row(*map(str, row.values()))
    Console(width=120).print(made)
    write(given.out, ("torch", "transformers"), trials=given.trials, rounds=given.rounds, rows=rows)
    return 0 if all(row["equal_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
