"""The clients whose images are in the current forward pass, with their LoRA factors and dropout masks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsweep.models.names import is_statistic

LEVELS = 2**16


class DropoutMasks:
    """A stream of dropout masks, which depends only on a seed.

    On a CPU, torch draws masks so slowly that they take a sixth of a training step with LoRA's usual dropout. NumPy's
    SFC64 generator needs a tenth of that time.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._cuda: torch.Generator | None = None

    @cached_property
    def _bits(self) -> np.random.SFC64:  # only when a mask is drawn, because most sessions draw none
        return np.random.SFC64(self._seed)

    def next(self, like: Tensor, rate: float) -> Tensor:
        """Return the next mask, in the shape of `like` and on its device.

        An entry is 0 with the probability p, which is `rate` rounded to a multiple of 2^-16, and otherwise 1 / (1 - p).
        """
        dropped = round(rate * LEVELS)
        scale = LEVELS / (LEVELS - dropped)
        if like.is_cuda:
            if self._cuda is None:
                self._cuda = torch.Generator(like.device).manual_seed(self._seed)
            return torch.empty_like(like).bernoulli_(1 / scale, generator=self._cuda).mul_(scale)
        draws = self._bits.random_raw(math.ceil(like.numel() / 4)).view(np.uint16)[: like.numel()]
        mask = np.multiply(draws >= dropped, scale, dtype=np.float32)
        return torch.from_numpy(mask).view(like.shape).to(like.device, like.dtype, non_blocking=True)


@dataclass(frozen=True)
class Segment:
    """The part of a batch that belongs to one client.

    Attributes:
        images: The number of the client's images.
        tensors: The client's trained tensors, keyed by name; a tensor that is missing has the value in the model.
        masks: The dropout masks of the client's local session.
        scaling: The scaling of the client's adapters; None for the scaling of the model.
    """

    images: int
    tensors: Mapping[str, Tensor]
    masks: DropoutMasks
    scaling: float | None = None


@dataclass
class Session:
    """The local sessions that train on the model at the moment.

    A model and its adapted layers share this object. If `segments` is empty, the forward pass uses the tensors in the
    model. Otherwise, the images of the batch belong to several clients, in the order of the segments. `masks` are the
    dropout masks of a single client; if they are None, torch's global generator draws the masks.
    """

    segments: Sequence[Segment] = field(default_factory=tuple)
    masks: DropoutMasks | None = None

    @contextmanager
    def drawing(self, masks: DropoutMasks) -> Iterator[None]:
        """Draw dropout masks from `masks` until the `with` statement ends."""
        self.masks = masks
        try:
            yield
        finally:
            self.masks = None

    @contextmanager
    def joined(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Apply the tensors of each client to the client's part of the batch until the `with` statement ends."""
        self.segments = segments
        try:
            yield
        finally:
            self.segments = ()


@contextmanager
def training_only(parameters: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[None]:
    """Let only the tensors in `names` require gradients until the `with` statement ends."""
    wanted = set(names)
    before = {name: one.requires_grad for name, one in parameters.items()}
    try:
        for name, one in parameters.items():
            one.requires_grad_(name in wanted and not is_statistic(name))
        yield
    finally:
        for name, one in parameters.items():
            one.requires_grad_(before[name])
