"""CPU, memory and GPU use of this process and machine, and logical GPUs. No torch."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedsweep.common.errors import UserError
from fedsweep.common.paths import gigabytes

try:
    import pynvml  # with NVIDIA's nvidia-ml-py, which not every machine has
except ImportError:
    pynvml = None
MEGABYTE = 1e6
COUNT, SIZE = "FEDSWEEP_LOGICAL_GPUS", "FEDSWEEP_LOGICAL_GPU_GB"


def forget_peak() -> None:
    """Reset `resident_peak` on Linux; elsewhere it stays the peak of the process's whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """Return this process's peak resident memory since `forget_peak`, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class LogicalGPUs:
    """`count` logical GPUs of `bytes` bytes each."""

    count: int
    bytes: int


def logical_gpus() -> LogicalGPUs | None:
    """Return the logical GPUs that the environment asks for, or None; raise UserError for invalid numbers."""
    count, size = os.environ.get(COUNT), os.environ.get(SIZE, "")
    if not count:
        return None
    if not count.isdecimal() or int(count) == 0:
        raise UserError(f"the environment's {COUNT} must be a whole number from 1 on, but it is {count}.")
    if not (each := gigabytes(size)) > 0:
        rule = f"needs the gigabytes of each in {SIZE}, a number above 0"
        raise UserError(f"{COUNT} {rule}, but it is {size or 'not set'}.")
    return LogicalGPUs(int(count), int(each * 1e9))


class SystemMeter:
    """Use of the machine since the last reading: `system/process_...` of this process, all else of the whole machine.

    GPUs are included if `pynvml` is installed, numbered as the driver numbers them.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._gpus: list[Any] = []
        if pynvml is not None:
            with contextlib.suppress(pynvml.NVMLError):  # a machine without a driver
                pynvml.nvmlInit()
                for number in range(pynvml.nvmlDeviceGetCount()):
                    self._gpus.append(pynvml.nvmlDeviceGetHandleByIndex(number))
        psutil.cpu_percent()  # the first call of each begins a span
        self._process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return metrics under MLflow's names: percent of all cores (of one for the process), MB of 10^6 bytes."""
        memory = psutil.virtual_memory()
        found = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": 100 * memory.used / memory.total,
            "system/process_cpu_utilization_percentage": self._process.cpu_percent(),
            "system/process_memory_usage_megabytes": self._process.memory_info().rss / MEGABYTE,
        }
        for number, handle in enumerate(self._gpus):
            # A slice of a GPU, or one of a virtual machine, may tell neither: no reason for a trial to fail.
            with contextlib.suppress(pynvml.NVMLError):
                taken = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[f"system/gpu_{number}_memory_usage_megabytes"] = taken.used / MEGABYTE
                found[f"system/gpu_{number}_memory_usage_percentage"] = 100 * taken.used / taken.total
            with contextlib.suppress(pynvml.NVMLError):
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle)
                found[f"system/gpu_{number}_utilization_percentage"] = float(busy.gpu)
        return found
