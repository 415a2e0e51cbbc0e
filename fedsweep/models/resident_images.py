"""Copies of image tensors on a GPU, from which batches are gathered without the host's memory."""

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsweep.types import ImageSet

SHARE = 1 / 32
"""The largest share of a trial's GPU memory that its images take."""


@dataclass
class ResidentImages:
    """The image tensors of a run that have a copy on the GPU, each copied when a batch first needs it.

    A tensor for which too little memory is left has no copy; its batches are gathered by the host.

    Attributes:
        device: The device of the copies.
        left: The number of bytes that further copies may take.
    """

    device: torch.device
    left: int
    _copies: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device) -> "ResidentImages | None":
        """Return the images for a model on `device`, or None on a CPU, whose batches need no copies."""
        if device.type != "cuda":
            return None
        own = torch.cuda.get_per_process_memory_fraction(device)  # several trials can share a GPU
        return cls(device, int(SHARE * own * torch.cuda.get_device_properties(device).total_memory))

    def take(self, images: ImageSet, index: Tensor) -> Tensor:
        """Return the images (k, 3, height, width) of the examples at `index` (k,) on the GPU.

        The GPU gathers them if all tensors that contain these images have a copy there, and otherwise the host.
        """
        places, parts = images.places(index), list[Tensor]()
        for part, _, own in places:
            copied = self._copy(part)
            if copied is None:
                return self._sent(images.take(index)[0])
            parts.append(copied.index_select(0, own.to(self.device, non_blocking=True)))
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([here for _, here, _ in places]).argsort()
        return torch.cat(parts).index_select(0, order.to(self.device, non_blocking=True))

    def _sent(self, batch: Tensor) -> Tensor:
        """Return a copy of a batch on the GPU. The host does not wait for it, because it leaves page-locked memory."""
        locked = batch.pin_memory() if self.device.type == "cuda" else batch
        return locked.to(self.device, non_blocking=True)

    def _copy(self, part: Tensor) -> Tensor | None:
        if (key := part.data_ptr()) not in self._copies:
            copied = None
            if part.nbytes <= self.left:
                with contextlib.suppress(torch.OutOfMemoryError):  # the copy only saves time
                    copied = part.to(self.device, non_blocking=True)
                    self.left -= part.nbytes
            self._copies[key] = part, copied  # with the host's tensor, so that no other tensor takes its address
        return self._copies[key][1]
