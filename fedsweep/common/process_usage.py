"""Measurement of CPU, memory and GPU use, and the configuration of logical GPUs.

A logical GPU is simulated on the CPU. Ray assigns trials to it as to a real GPU, but the trials run on the CPU.
"""

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
    import pynvml  # from NVIDIA's nvidia-ml-py, an optional dependency
except ImportError:
    pynvml = None
MEGABYTE = 1e6
COUNT, SIZE = "FEDSWEEP_LOGICAL_GPUS", "FEDSWEEP_LOGICAL_GPU_GB"


def forget_peak() -> None:
    """Reset the peak memory that `resident_peak` returns. This has an effect only on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes.

    The peak is taken over the time since the process started or, on Linux, since the last call of `forget_peak`.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class LogicalGPUs:
    """The number of logical GPUs (simulated on the CPU), and the memory of each logical GPU in bytes."""

    count: int
    bytes: int


def logical_gpus() -> LogicalGPUs | None:
    """Return the logical GPUs that environment variables configure, or None if there are none.

    Raises:
        UserError: FEDSWEEP_LOGICAL_GPUS or FEDSWEEP_LOGICAL_GPU_GB is not valid.
    """
    count, size = os.environ.get(COUNT), os.environ.get(SIZE, "")
    if not count:
        return None
    if not count.isdecimal() or int(count) == 0:
        raise UserError(f"the environment variable {COUNT} must be an integer of at least 1, but it is {count}.")
    if not (each := gigabytes(size)) > 0:
        rule = f"if {COUNT} is set, {SIZE} must be a number greater than 0, the memory of each GPU in gigabytes"
        raise UserError(f"{rule}, but it is {size or 'not set'}.")
    return LogicalGPUs(int(count), int(each * 1e9))


class SystemMeter:
    """A meter for the CPU, memory and GPU use of this process and this machine.

    CPU use is averaged over the time since the last reading. Metrics whose names begin with `system/process_` describe
    this process, and all others describe the whole machine. GPUs are included if `pynvml` is installed. Their numbers
    in metric names, such as `gpu_0`, are those of NVIDIA's driver.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._gpus: list[Any] = []
        if pynvml is not None:
            with contextlib.suppress(pynvml.NVMLError):  # the machine has no driver
                pynvml.nvmlInit()
                for number in range(pynvml.nvmlDeviceGetCount()):
                    self._gpus.append(pynvml.nvmlDeviceGetHandleByIndex(number))
        psutil.cpu_percent()  # the first call starts the interval of the next one
        self._process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return the measured values in percent or in MB (10^6 bytes), keyed by their metric names in MLflow.

        The machine's CPU use is a percentage of all cores, and this process's CPU use is a percentage of one core.
        """
        memory = psutil.virtual_memory()
        found = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": 100 * memory.used / memory.total,
            "system/process_cpu_utilization_percentage": self._process.cpu_percent(),
            "system/process_memory_usage_megabytes": self._process.memory_info().rss / MEGABYTE,
        }
        for number, handle in enumerate(self._gpus):
            # A GPU slice (MIG) or a virtual machine's GPU may report neither, which should not make the trial fail.
            with contextlib.suppress(pynvml.NVMLError):
                taken = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[f"system/gpu_{number}_memory_usage_megabytes"] = taken.used / MEGABYTE
                found[f"system/gpu_{number}_memory_usage_percentage"] = 100 * taken.used / taken.total
            with contextlib.suppress(pynvml.NVMLError):
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle)
                found[f"system/gpu_{number}_utilization_percentage"] = float(busy.gpu)
        return found
