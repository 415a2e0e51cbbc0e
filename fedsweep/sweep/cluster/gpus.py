"""GPUs of a machine, and meters of the memory that a trial takes of its share.

A logical GPU is a part of this machine's memory and processor, which Ray assigns like a GPU. Trials on it compute on
the CPU, and run out of memory if they exceed their share.
"""

import gc
from typing import Literal

import torch

from fedsweep.common.process_usage import forget_peak, logical_gpus, resident_peak
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL


def count_gpus() -> int:
    """Return the number of real or logical GPUs that Ray can assign."""
    if (logical := logical_gpus()) is not None:
        return logical.count
    return torch.cuda.device_count()


class Meter:
    """Meter of a trial's GPU memory; the base class, for a trial on the CPU, measures nothing."""

    def start(self) -> None:
        """Forget earlier measurements, and limit the process to its share."""

    def read(self) -> dict[str, int]:
        """Return the memory entries of a report, in bytes; on a logical GPU, raise torch.OutOfMemoryError itself."""
        return {}

    def release(self) -> None:
        """Free unused memory for the next trial in this process and for other processes."""


class CUDAMeter(Meter):
    """Meter of the device that Ray made visible; torch's allocator raises if a trial exceeds its share."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus

    def start(self) -> None:
        """Limit the allocator to its share of the device, and reset its peak."""
        torch.cuda.set_per_process_memory_fraction(float(min(self.gpus, 1.0)))
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """Return the allocator's peak, including cached blocks; for a whole GPU, also the memory outside the allocator.

        That is the CUDA context of each process and, as a precaution counted for each trial, other programs' memory.
        """
        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0) if self.gpus >= 1 else 0
        return {PEAK: int(torch.cuda.max_memory_reserved()), BESIDE: int(beside), TOTAL: int(total)}

    def release(self) -> None:
        """Empty the allocator's cache; an error's traceback must be gone, because it holds the trial's tensors."""
        gc.collect()
        torch.cuda.empty_cache()


class LogicalMeter(Meter):
    """Meter of a share of a logical GPU: the worker's resident memory, compared with the share after each round."""

    def __init__(self, gpus: float, total: int) -> None:
        self.gpus, self.total = gpus, total

    def start(self) -> None:
        """Reset the peak of the process."""
        forget_peak()

    def read(self) -> dict[str, int]:
        """Return the peak, or raise torch.OutOfMemoryError if it exceeds the share."""
        peak, held = resident_peak(), min(self.gpus, 1.0) * self.total
        if peak > held:
            raise torch.OutOfMemoryError(
                f"the worker took {peak / 1e9:.2f} GB, but it has {held / 1e9:.2f} GB: {min(self.gpus, 1.0):g} of a "
                f"logical GPU of {self.total / 1e9:.2f} GB"
            )
        return {PEAK: peak, BESIDE: 0, TOTAL: self.total}

    def release(self) -> None:
        """Collect garbage."""
        gc.collect()


def meter(device: Literal["cpu", "cuda"], gpus: float) -> Meter:
    """Return the meter of a trial with `gpus` of a GPU, real or logical."""
    if gpus > 0 and device == "cuda":
        return CUDAMeter(gpus)
    logical = logical_gpus() if gpus > 0 else None
    return LogicalMeter(gpus, logical.bytes) if logical is not None else Meter()


def ran_out(error: BaseException) -> bool:
    """Return whether the GPU had too little memory for a tensor or for CUDA's context and workspaces."""
    texts = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return told or isinstance(error, torch.OutOfMemoryError)
