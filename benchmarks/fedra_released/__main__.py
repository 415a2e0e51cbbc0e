"""Compare FedRA's released code with fedsweep on the CPU: numerical agreement, time and memory.

    git clone https://github.com/leondada/FedRA DIR
    uv run python -m benchmarks.fedra_released --code DIR
    uv run python -m benchmarks.fedra_released --code DIR --out benchmarks/results/NAME.json

The model is ViT-Ti/16 at 224 px with random weights. Each of six clients holds between 3 and 12 of the 12 blocks.

Agreement: both programs run two rounds from the same adapters and heads, with the same allocations and batches. Dropout
is off, because its random masks cannot be matched. fedsweep follows the released code in these settings, which differ
from the paper or are missing in it:

- LoRA in the patch embedding
- equal weights of all clients in the aggregation
- a limit on the number of local steps
- for DepthFL: the blocks with heads, the ramp-up of the distillation loss, and one last head that all clients share

The exit code is 1 if a tensor differs by more than the tolerance, or has not changed during training.

Time and memory: FedRA runs with the released dropout, on one thread. The programs take turns at every step of a round.
The memory of each program is measured in a separate process. The images in memory are read from JPEG files separately.
The time of a whole run is put together from these parts, with the numbers of rounds and evaluations of the released
main loop.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import agreement, reading, timing
from .released import COMPARISONS, SOURCES, without_cuda
from .setting import SETTINGS, TOLERANCE

console = Console(stderr=True, highlight=False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--code", type=Path, required=True, help="clone of the authors' repository")
    made.add_argument(
        "--repeats", type=int, default=3, help="number of timed rounds of each program; 0 checks the agreement only"
    )
    made.add_argument("--out", type=Path)
    made.add_argument("--peak-of", choices=["nothing", *timing.SIDES], help=argparse.SUPPRESS)
    return made


def compare(code: Path) -> dict[str, list[agreement.Groups]]:
    """Return, for each method, the largest differences between the tensors of both programs after each round."""
    compared = {}
    for name, comparison in COMPARISONS.items():
        with console.status(f"agreement: {name}"):
            compared[name] = agreement.agreement(code, comparison)
    return compared


def measure(code: Path, repeats: int) -> dict[str, Any]:
    """Return the CPU times and the peak memory of the released code and of fedsweep."""
    cpu = timing.time_in_turn(code, repeats, console)
    with console.status("reading images"):
        read = reading.measure(code)
    whole = timing.whole_runs(cpu["median"], read)
    return {
        "cpu": cpu, "reading_ms_per_image": read, "whole_run_seconds": whole, "peak_mib": timing.memory(code)
    }  # fmt: skip


def provenance(code: Path, repeats: int) -> dict[str, Any]:
    """Return the date, machine, package versions and settings of the measurements."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.machine()}, one thread",
        "versions": {name: version(name) for name in ("torch", "timm", "peft", "fedsweep")},
        "code_sha256": hashlib.sha256(b"".join((code / name).read_bytes() for name in SOURCES)).hexdigest(),
        "settings": SETTINGS | {"repeats": repeats},
    }


def main() -> None:
    """Check the agreement, measure time and memory, and print or write the results."""
    command = parser()
    given = command.parse_args()
    torch.set_num_threads(1)
    code = given.code.resolve()
    if missing := [name for name in SOURCES if not (code / name).is_file()]:
        command.error(f"--code {given.code} does not contain {', '.join(missing)}")
    with without_cuda():
        if given.peak_of:
            print(timing.peak(given.peak_of, code))
            return
        compared = compare(code)
        timed = measure(code, given.repeats) if given.repeats else {}
    out = Console(highlight=False)
    out.print(agreement.table(compared))
    if timed:
        out.print(timing.table(timed))
    if given.out:
        figures = provenance(code, given.repeats) | {"agreement": compared} | timed
        given.out.write_text(json.dumps(figures, indent=2) + "\n")
    if not all(agreement.agree(groups) for rounds in compared.values() for groups in rounds):
        console.print(f"The two programs differ by more than {TOLERANCE:g}, or a tensor has not changed.")
        sys.exit(1)


if __name__ == "__main__":
    main()
