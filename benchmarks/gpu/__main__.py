"""Compare runs on a GPU with runs on the CPU, and measure throughput and sweeps whose trials share the GPU.

    uv run python -m benchmarks.gpu agreement throughput sharing --out benchmarks/results/NAME.json
    bash benchmarks/gpu.sh benchmarks/results/NAME.json

- `agreement` runs several methods on digits for three rounds with the same seed, once on the CPU and three times on the
  GPU. The table shows the largest differences of metrics over all rounds. Two of the runs on the GPU do without the
  activation cache and must be bit-identical; the third run fills the cache. Several runs are executed at once.
- `throughput` compares local training and evaluation with a plain PyTorch loop that does the same work.
- `sharing` runs a sweep repeatedly, with several shares of the GPU for each trial.

The three parts add each result to the same JSON file as soon as it is known. The exit code is 1 if a run on the GPU
differs from a run on the CPU by more than the tolerance, if two runs on the GPU differ, or if a trial fails.
"""

import argparse
import json
import os
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import agreement, sharing, throughput

PARTS = {"agreement": agreement, "throughput": throughput, "sharing": sharing}


def main() -> int:
    """Run the parts, print their tables and, with `--out`, add the results to a JSON file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only test this script")
    parser.add_argument("--quick", action="store_true", help="measure less: fewer runs, rounds, images and trials")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    good, console = True, Console(width=120)
    for part in given.parts:
        rows, begun = [], time.perf_counter()
        for row in PARTS[part].measure(given.device, given.quick):
            rows.append(row)
            print(f"{part}, after {time.perf_counter() - begun:.0f} s: {[*row.values()][:2]}", flush=True)
            if given.out:
                add(given.out, part, rows, given.device)
        console.print(PARTS[part].table(rows))
        good &= all(map(PARTS[part].accepted, rows))
    return 0 if good else 1


def add(path: Path, part: str, rows: list[dict[str, Any]], device: str) -> None:
    """Add the results of a part to the JSON file at `path`, with the date, the machine and versions of packages."""
    known = json.loads(path.read_text()) if path.exists() else {}
    facts: dict[str, Any] = {"date": date.today().isoformat(), "cores": os.cpu_count()}
    facts["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts["python"] = ".".join(map(str, sys.version_info[:3]))
    facts["versions"] = {package: version(package) for package in ("torch", "timm", "peft", "ray")}
    path.write_text(json.dumps({**known, **facts, part: rows}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
