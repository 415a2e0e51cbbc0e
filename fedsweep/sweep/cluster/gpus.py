"""The GPUs of a machine, the share of a GPU that a trial may use, and the memory that the trial takes.

A logical GPU, for machines without a real one, is a share of this machine's processor and memory under the name of a
GPU: Ray hands it out, trials that share it are measured, and a trial that takes too much runs out of memory. It
computes on the CPU.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from fedsweep.common.process_usage import forget_peak, logical_gpus, resident_peak
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL

if TYPE_CHECKING:
    from fedsweep.federation.build_and_run import Device


def count_gpus() -> int:
    """Return the number of GPUs that Ray could hand out."""
    if (logical := logical_gpus()) is not None:
        return logical.count
    import torch

    return torch.cuda.device_count()


class Meter:
    """Meter of the GPU memory that a trial uses. This base class serves trials on a CPU and measures nothing."""

    def start(self) -> None:
        """Reset the measurements, and limit the process to its share of the GPU."""

    def read(self) -> dict[str, int]:
        """Return the report's keys about memory; raise OutOfMemoryError if it was more than the share."""
        return {}

    def release(self) -> None:
        """Free unused memory, for the next trial in this process and for other trials on the GPU."""


class CUDAMeter(Meter):
    """Meter of the device that Ray made visible. torch's allocator raises where a trial exceeds its share."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus

    def start(self) -> None:
        """Limit torch's allocator to the share, so that other trials on the GPU keep theirs, and start measuring."""
        import torch

        torch.cuda.set_per_process_memory_fraction(float(min(self.gpus, 1.0)))
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """Return the allocator's peak with cached blocks.

        On a GPU without other trials, include memory outside the allocator.
        """
        import torch

        # Outside it are the CUDA context, which each process has, and other programs, counted as a precaution.
        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0) if self.gpus >= 1 else 0
        return {PEAK: int(torch.cuda.max_memory_reserved()), BESIDE: int(beside), TOTAL: int(total)}

    def release(self) -> None:
        """Free cached memory.

        Call this after the last reference to the trial's tensors, for example in a traceback, is gone.
        """
        import torch

        gc.collect()
        torch.cuda.empty_cache()


class LogicalMeter(Meter):
    """Meter of a share of a logical GPU: the memory of the whole worker process, compared after each round."""

    def __init__(self, gpus: float, total: int) -> None:
        self.gpus, self.total = gpus, total

    def start(self) -> None:
        """Start measuring."""
        forget_peak()

    def read(self) -> dict[str, int]:
        """Return the peak, or raise OutOfMemoryError if it exceeds the share."""
        import torch

        peak, held = resident_peak(), min(self.gpus, 1.0) * self.total
        if peak > held:
            raise torch.OutOfMemoryError(
                f"the worker took {peak / 1e9:.2f} GB, but it has {held / 1e9:.2f} GB: {min(self.gpus, 1.0):g} of a "
                f"logical GPU of {self.total / 1e9:.2f} GB"
            )
        return {PEAK: peak, BESIDE: 0, TOTAL: self.total}

    def release(self) -> None:
        """Collect garbage. The C library decides when to return the memory to the system."""
        gc.collect()


def meter(device: Device, gpus: float) -> Meter:
    """Return the meter of the GPU memory of a trial that has the share `gpus` of a real or a logical GPU."""
    if gpus > 0 and device == "cuda":
        return CUDAMeter(gpus)
    logical = logical_gpus() if gpus > 0 else None
    return LogicalMeter(gpus, logical.bytes) if logical is not None else Meter()


def ran_out(error: BaseException) -> bool:
    """Return whether a GPU's memory did not suffice: for a tensor, or for CUDA's own context and workspaces."""
    if not isinstance(error, RuntimeError):  # torch's own is one; the error may be that torch cannot be imported
        return False
    import torch

    known = isinstance(error, torch.OutOfMemoryError)
    return known or any(one in str(error) for one in ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED"))
