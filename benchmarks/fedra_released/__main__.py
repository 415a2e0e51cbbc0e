"""FedRA's released code and fedsweep side by side on the CPU: the same numbers after a round, time and memory.

    git clone https://github.com/leondada/FedRA DIR
    uv run python -m benchmarks.fedra_released --code DIR
    uv run python -m benchmarks.fedra_released --code DIR --out benchmarks/results/NAME.json

ViT-Ti/16 at 224 px with random weights, six clients of 12 to 3 blocks. Agreement: two rounds from the same adapters and
heads, with the same allocations and the same images in the same batches; fedsweep does what the released code does and
the paper does not say (LoRA in the patch embedding, uniform weights, the cap on local steps; DepthFL's places of heads,
ramp and one last head for all). Dropout is off there, for its masks cannot be matched. The exit status is 1 where a
tensor differs by more than the tolerance, or did not move. Speed and memory: FedRA with dropout as released, all sides
in turn at every client, on one thread; memory in a process of its own.
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

from . import agreement, timing
from .released import COMPARISONS, SOURCES, without_cuda
from .setting import SETTINGS, TOLERANCE

console = Console(stderr=True, highlight=False)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--code", type=Path, required=True, help="a clone of the authors' repository")
    made.add_argument("--repeats", type=int, default=3, help="timed rounds of each side; 0 for agreement alone")
    made.add_argument("--out", type=Path)
    made.add_argument("--peak-of", choices=["nothing", *timing.SIDES], help=argparse.SUPPRESS)
    return made


def compare(code: Path) -> dict[str, list[agreement.Groups]]:
    """The agreement of every method."""
    compared = {}
    for name, comparison in COMPARISONS.items():
        with console.status(f"agreement: {name}"):
            compared[name] = agreement.agreement(code, comparison)
    return compared


def measure(code: Path, repeats: int) -> dict[str, Any]:
    """Times and memory."""
    return {"cpu": timing.time_in_turn(code, repeats, console), "peak_mib": timing.memory(code)}


def provenance(code: Path, repeats: int) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.machine()}, one thread",
        "versions": {name: version(name) for name in ("torch", "timm", "peft", "fedsweep")},
        "code_sha256": hashlib.sha256(b"".join((code / name).read_bytes() for name in SOURCES)).hexdigest(),
        "settings": SETTINGS | {"repeats": repeats},
    }


def main() -> None:
    """Compare, time, measure, print, and write the figures."""
    command = parser()
    given = command.parse_args()
    torch.set_num_threads(1)
    code = given.code.resolve()
    if missing := [name for name in SOURCES if not (code / name).is_file()]:
        command.error(f"--code {given.code} has no {', '.join(missing)}")
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
        console.print(f"The two sides differ by more than {TOLERANCE:g}, or a tensor did not move.")
        sys.exit(1)


if __name__ == "__main__":
    main()
