"""The GPUs of a machine, what a trial may have of one, and what it takes. Without any, logical ones can stand in.

A logical GPU is a share of this machine's processor and memory under the name of a GPU: Ray hands it out, trials that
share it are measured, and what takes too much of it runs out of memory. It computes on the CPU.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Protocol

from fedsweep.common.process_usage import forget_peak, logical_gpus, resident_peak
from fedsweep.sweep.cluster.packing import BESIDE, PEAK, TOTAL

if TYPE_CHECKING:
    from fedsweep.federation.run import Device


def count_gpus() -> int:
    """GPUs that Ray could hand out."""
    if (logical := logical_gpus()) is not None:
        return logical.count
    import torch

    return torch.cuda.device_count()


class Meter(Protocol):
    """What a trial takes of the GPU that it was given."""

    def start(self) -> None:
        """Forget what was taken before, and hold the process to its share."""

    def read(self) -> dict[str, int]:
        """The report's keys about memory.

        Raises:
            torch.OutOfMemoryError: it is more than the trial was given, and no one but the meter would notice.
        """

    def release(self) -> None:
        """Give back what is not in use, for the next trial in this process and for its neighbours."""


class NoMeter:
    """Of a trial on a CPU."""

    def start(self) -> None:
        """Nothing is held."""

    def read(self) -> dict[str, int]:
        """Nothing is measured."""
        return {}

    def release(self) -> None:
        """Nothing is given back."""


class CUDAMeter:
    """Of the device that Ray made visible. torch's allocator refuses what goes beyond the share."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus

    def start(self) -> None:
        """Hold the allocator to its share, which the neighbours' memory depends on, and measure from here on."""
        import torch

        torch.cuda.set_per_process_memory_fraction(float(min(self.gpus, 1.0)))
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """The allocator's peak, cached blocks included; on a GPU without neighbours, also what lies outside it.

        That is the CUDA context, which each process has, and what other programs hold. To count the latter for each
        trial too is to be careful.
        """
        import torch

        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0) if self.gpus >= 1 else 0
        return {PEAK: int(torch.cuda.max_memory_reserved()), BESIDE: int(beside), TOTAL: int(total)}

    def release(self) -> None:
        """After the trial's last reference is gone: an error's traceback holds its tensors."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()


class LogicalMeter:
    """Of a share of a logical GPU: the memory of the whole worker process, compared after each round."""

    def __init__(self, gpus: float, total: int) -> None:
        self.gpus, self.total = gpus, total

    def start(self) -> None:
        """Measure from here on."""
        forget_peak()

    def read(self) -> dict[str, int]:
        """The peak, if the share holds it."""
        import torch

        peak, held = resident_peak(), min(self.gpus, 1.0) * self.total
        if peak > held:
            raise torch.OutOfMemoryError(
                f"the worker took {peak / 1e9:.2f} GB, but it has {held / 1e9:.2f} GB: {min(self.gpus, 1.0):g} of a "
                f"logical GPU of {self.total / 1e9:.2f} GB"
            )
        return {PEAK: peak, BESIDE: 0, TOTAL: self.total}

    def release(self) -> None:
        """What is collected, malloc gives back as it sees fit."""
        gc.collect()


def meter(device: Device, gpus: float) -> Meter:
    """That of a trial with so much of a GPU, real or logical."""
    if gpus <= 0:
        return NoMeter()
    if device == "cuda":
        return CUDAMeter(gpus)
    logical = logical_gpus()
    return LogicalMeter(gpus, logical.bytes) if logical is not None else NoMeter()


def ran_out(error: BaseException) -> bool:
    """Whether memory of a GPU did not suffice: for a tensor, or for CUDA's own context and workspaces."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and ("CUDA error: out of memory" in told or "_STATUS_ALLOC_FAILED" in told)
