"""Functions and classes that count a machine's GPUs and measure the GPU memory of trials.

A logical GPU simulates a GPU on a machine without one. Ray schedules trials on it as on a real GPU, but the trials use
the CPU and main memory. A trial that exceeds its share of the memory ends with an out-of-memory error.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from fedsweep.common.process_usage import forget_peak, logical_gpus, resident_peak
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL

if TYPE_CHECKING:
    from fedsweep.federation.build_and_run import Device


def count_gpus() -> int:
    """Return the number of this machine's GPUs, or of logical (simulated) GPUs if the environment defines them."""
    if (logical := logical_gpus()) is not None:
        return logical.count
    import torch

    return torch.cuda.device_count()


class Meter:
    """A meter that measures the GPU memory of a trial.

    This base class is for trials on the CPU and measures nothing.
    """

    def start(self) -> None:
        """Discard earlier measurements, and limit this process to the trial's share of the GPU's memory."""

    def read(self) -> dict[str, int]:
        """Return the peak memory of the trial, other memory in use on the GPU, and the GPU's total memory, in bytes.

        The keys are `memory/peak`, `memory/beside` and `memory/total`. This base class returns an empty dict.

        Raises:
            OutOfMemoryError: The trial used more memory than its share.
        """
        return {}

    def release(self) -> None:
        """Free unused memory for the next trial in this process and for other trials on the GPU."""


class CUDAMeter(Meter):
    """The meter for a trial on a real GPU. torch's allocator raises an error if the trial exceeds its share."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus

    def start(self) -> None:
        """Limit torch's allocator to the trial's share of the memory, and reset the measured peak."""
        import torch

        torch.cuda.set_per_process_memory_fraction(float(min(self.gpus, 1.0)))
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """Return the peak memory of torch's allocator, including cached blocks, and the GPU's total memory, in bytes.

        Memory in use outside the allocator is measured only if the trial has the GPU to itself. Otherwise, it is
        reported as 0.
        """
        import torch

        # Outside the allocator are the CUDA contexts of all processes. Other programs are counted as a precaution.
        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0) if self.gpus >= 1 else 0
        return {PEAK: int(torch.cuda.max_memory_reserved()), BESIDE: int(beside), TOTAL: int(total)}

    def release(self) -> None:
        """Free the unused memory of torch's allocator.

        Call this method only when nothing refers to the trial's tensors any more. If the trial raised an error, the
        traceback of the error must be gone, too, because it refers to the tensors.
        """
        import torch

        gc.collect()
        torch.cuda.empty_cache()


class LogicalMeter(Meter):
    """The meter for a trial on a share of a logical GPU, which simulates a GPU on the CPU.

    After each round, the meter compares the peak memory of the worker process with the trial's share of the memory.
    """

    def __init__(self, gpus: float, total: int) -> None:
        self.gpus, self.total = gpus, total

    def start(self) -> None:
        """Reset the measured peak memory of the process."""
        forget_peak()

    def read(self) -> dict[str, int]:
        """Return the peak memory of the process and the total memory of the logical GPU, in bytes.

        Raises:
            OutOfMemoryError: The peak memory exceeds the trial's share.
        """
        import torch

        peak, held = resident_peak(), min(self.gpus, 1.0) * self.total
        if peak > held:
            raise torch.OutOfMemoryError(
                f"the worker used {peak / 1e9:.2f} GB of memory, but its share is {held / 1e9:.2f} GB: "
                f"{min(self.gpus, 1.0):g} of a logical GPU of {self.total / 1e9:.2f} GB"
            )
        return {PEAK: peak, BESIDE: 0, TOTAL: self.total}

    def release(self) -> None:
        """Run the garbage collector.

        The C library decides when the freed memory is returned to the operating system.
        """
        gc.collect()


def meter(device: Device, gpus: float) -> Meter:
    """Return the memory meter of a trial.

    `gpus` is the trial's share of a real or logical (simulated) GPU, or 0 for none.
    """
    if gpus > 0 and device == "cuda":
        return CUDAMeter(gpus)
    logical = logical_gpus() if gpus > 0 else None
    return LogicalMeter(gpus, logical.bytes) if logical is not None else Meter()


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that a GPU ran out of memory.

    The function recognises torch's `OutOfMemoryError` and error messages of CUDA and its libraries.
    """
    if not isinstance(error, RuntimeError):  # as torch's own error is; after an ImportError, torch may be missing
        return False
    import torch

    known = isinstance(error, torch.OutOfMemoryError)
    return known or any(one in str(error) for one in ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED"))
