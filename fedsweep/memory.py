"""Main memory that this process has held at most."""

import contextlib
import resource
import sys
from pathlib import Path


def forget_peak() -> None:
    """Measure from here on. Linux forgets the peak when asked to; elsewhere it is that of the process's whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """Bytes of memory that this process has held at most, since that was forgotten."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
