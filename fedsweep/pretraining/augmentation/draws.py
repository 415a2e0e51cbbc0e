"""The random numbers of an augmentation, one set per image."""

import torch
from torch import Tensor


class Draws:
    """Random numbers for `count` images.

    They are drawn on the CPU and then moved, so that a GPU augments as the CPU does.
    """

    def __init__(self, count: int, generator: torch.Generator, device: torch.device) -> None:
        self.count, self.generator, self.device = count, generator, device

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """(count, *shape) between `low` and `high`."""
        share = torch.rand(self.count, *shape, generator=self.generator).to(self.device, non_blocking=True)
        return low + (high - low) * share

    def normal(self, *shape: int) -> Tensor:
        """(count, *shape), standard normal."""
        return torch.randn(self.count, *shape, generator=self.generator).to(self.device, non_blocking=True)

    def sometimes(self, probability: float) -> Tensor:
        """Which images something happens to: boolean (count, 1, 1, 1)."""
        return self.uniform(0, 1, 1, 1, 1) < probability
