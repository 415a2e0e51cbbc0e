"""The date, the machine and the versions of packages that benchmarks write beside their measurements."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(*packages: str) -> dict[str, Any]:
    """Return the date, the machine, the number of torch's threads, and the versions of Python and of `packages`."""
    import torch

    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {_processor()}",
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def write(path: Path | None, packages: Sequence[str], **measured: Any) -> None:
    """Write measurements and their provenance to a JSON file, or do nothing if `path` is None."""
    if path:
        script = Path(sys.argv[0])
        module = script.parent.name if script.stem == "__main__" else script.stem
        given = ["DIR" if os.sep in one else one for one in sys.argv[1:]]  # results name no path of a machine
        command = " ".join(["python", "-m", f"benchmarks.{module}", *given])
        content = {**provenance(*packages), "command": command.split(" --out")[0], **measured}
        path.write_text(json.dumps(content, indent=2) + "\n")


def _processor() -> str:
    """Return the name of the processor, or its architecture if the system does not tell the name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
