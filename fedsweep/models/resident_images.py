"""Copies of image tensors on a GPU, from which batches are gathered without the host's memory."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsweep.types import ImageSet

SHARE = 1 / 32
"""The largest share of a GPU's memory that a trial's images take; several trials can share a GPU."""


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
        return cls(device, int(SHARE * torch.cuda.get_device_properties(device).total_memory))

    def take(self, images: ImageSet, index: Tensor) -> Tensor:
        """Return the images (k, 3, height, width) of the examples at `index` (k,).

        The result is on the GPU if all tensors that contain these images have a copy there, and otherwise on the CPU.
        """
        places = images.places(index)
        parts: list[Tensor] = []
        for part, _, own in places:
            copied = self._copy(part)
            if copied is None:
                return images.take(index)[0]
            parts.append(copied.index_select(0, own.to(self.device, non_blocking=True)))
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([here for _, here, _ in places]).argsort()
        return torch.cat(parts).index_select(0, order.to(self.device, non_blocking=True))

    def _copy(self, part: Tensor) -> Tensor | None:
        if (key := part.data_ptr()) not in self._copies:
            fits = part.nbytes <= self.left
            self.left -= part.nbytes * fits
            # The host's tensor is kept too, so that no other tensor can take its address.
            self._copies[key] = part, part.to(self.device, non_blocking=True) if fits else None
        return self._copies[key][1]
