"""The coordinate-wise median of the clients' tensors, which a minority of malicious clients can hardly move."""

from typing import Literal

from torch import Tensor

from fedsweep.training.aggregation_rules import TensorRule


class Median(TensorRule):
    """The coordinate-wise median, in which all clients have the same weight (Yin et al., 2018)."""

    name: Literal["median"] = "median"

    def combine(self, shares: Tensor, tensors: Tensor) -> Tensor:
        """Return the median of each value over the clients; of an even number, the mean of the two middle values."""
        ordered, count = tensors.sort(0).values, len(tensors)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
