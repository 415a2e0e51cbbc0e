"""The number of GPUs of a machine, and the measurement of the GPU memory that trials use.

A logical GPU simulates a GPU with the CPU and main memory of a machine that has no real one. Ray schedules trials on it
as on a GPU, their memory is measured, and a trial that exceeds its share runs out of memory.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from fedsweep.common.process_usage import forget_peak, logical_gpus, resident_peak
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL

if TYPE_CHECKING:
    from fedsweep.federation.build_and_run import Device


def count_gpus() -> int:
    """Return the number of GPUs, real or logical, on which Ray can schedule trials."""
    if (logical := logical_gpus()) is not None:
        return logical.count
    import torch

    return torch.cuda.device_count()


class Meter:
    """The measurement of a trial's GPU memory. The base class is for trials on the CPU and measures nothing."""

    def start(self) -> None:
        """Discard earlier measurements, and limit the process to its share of the GPU."""

    def read(self) -> dict[str, int]:
        """Return the measured memory in bytes, by key of the trial's report.

        Raises:
            OutOfMemoryError: The trial used more memory than its share.
        """
        return {}

    def release(self) -> None:
        """Free unused memory, for the next trial in this process and for other trials on the GPU."""


class CUDAMeter(Meter):
    """The meter of the GPU that Ray made visible. torch's allocator raises an error if a trial exceeds its share."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus

    def start(self) -> None:
        """Limit the allocator to its share, so that other trials keep theirs, and start measuring."""
        import torch

        torch.cuda.set_per_process_memory_fraction(float(min(self.gpus, 1.0)))
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """Return the peak memory of torch's allocator, including cached blocks, and the GPU's total memory.

        If the trial has the GPU to itself, the result also contains the memory in use outside the allocator.
        """
        import torch

        # Outside the allocator are the CUDA context of each process, and other programs, counted as a precaution.
        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0) if self.gpus >= 1 else 0
        return {PEAK: int(torch.cuda.max_memory_reserved()), BESIDE: int(beside), TOTAL: int(total)}

    def release(self) -> None:
        """Free the allocator's unused memory.

        Call this after the last reference to the trial's tensors is gone, including the traceback of an error.
        """
        import torch

        gc.collect()
        torch.cuda.empty_cache()


class LogicalMeter(Meter):
    """The meter of a share of a logical GPU.

    It compares the peak memory of the whole worker process with the share after each round.
    """

    def __init__(self, gpus: float, total: int) -> None:
        self.gpus, self.total = gpus, total

    def start(self) -> None:
        """Start measuring."""
        forget_peak()

    def read(self) -> dict[str, int]:
        """Return the peak memory of the process, or raise OutOfMemoryError if it exceeds the share."""
        import torch

        peak, held = resident_peak(), min(self.gpus, 1.0) * self.total
        if peak > held:
            raise torch.OutOfMemoryError(
                f"the worker used {peak / 1e9:.2f} GB of memory, but its share is {held / 1e9:.2f} GB: "
                f"{min(self.gpus, 1.0):g} of a logical GPU of {self.total / 1e9:.2f} GB"
            )
        return {PEAK: peak, BESIDE: 0, TOTAL: self.total}

    def release(self) -> None:
        """Collect garbage. malloc decides when to return the memory to the system."""
        gc.collect()


def meter(device: Device, gpus: float) -> Meter:
    """Return the meter of a trial with a share `gpus` of a real or logical GPU."""
    if gpus > 0 and device == "cuda":
        return CUDAMeter(gpus)
    logical = logical_gpus() if gpus > 0 else None
    return LogicalMeter(gpus, logical.bytes) if logical is not None else Meter()


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that a GPU ran out of memory, for a tensor or for CUDA's context and workspaces."""
    if not isinstance(error, RuntimeError):  # torch's own error is one; an ImportError may mean that torch is missing
        return False
    import torch

    known = isinstance(error, torch.OutOfMemoryError)
    return known or any(one in str(error) for one in ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED"))
