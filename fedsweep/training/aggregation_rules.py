"""The rules that combine the clients' tensors on the server: the weighted mean, and the rules of other packages.

Other installed packages add rules with entry points in the group `fedsweep.aggregation`. Their classes inherit from
`TensorRule` or `AggregationRule`, and are selected with `aggregation.rule`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from fedsweep.common import plugins
from fedsweep.common.config import Config
from fedsweep.models.names import rank_dim
from fedsweep.types import AdapterState

Weighed = tuple[float, AdapterState]
"""The weight of a client before the weights are divided by their sum, and the tensors that the client sent."""


class AggregationRule(Config, ABC):
    """The base class of rules that combine the clients' tensors, with the options of a rule as fields."""

    if TYPE_CHECKING:
        name: str

    @abstractmethod
    def aggregate(self, previous: AdapterState, sent: Sequence[Weighed]) -> AdapterState:
        """Return the server's new tensors, without changing or sharing any of the arguments' tensors.

        A client sends only the tensors that it trained. A tensor that no client sent must keep its value. The result
        must contain exactly the tensors of `previous`.

        Args:
            previous: The server's tensors before the round, keyed by name.
            sent: The weight and the tensors of each client, ordered by client id. The result may depend on this order.
                With `federation.ranks`, clients send LoRA's factors at their own ranks. Only rules that inherit from
                `TensorRule` are used then.
        """


class TensorRule(AggregationRule):
    """The base class of rules that combine each tensor on its own, such as the mean or the median."""

    @abstractmethod
    def combine(self, shares: Tensor, tensors: Tensor) -> Tensor:
        """Return the server's new value (...) of one tensor.

        Args:
            shares: The weight of each of the K clients that sent the tensor, divided by their sum, float64 (K,).
            tensors: The values that these clients sent, in the same order, (K, ...).
        """

    def aggregate(self, previous: AdapterState, sent: Sequence[Weighed]) -> AdapterState:
        """Combine each tensor over the clients that sent it; a tensor that no client sent keeps its value.

        If clients have unequal ranks, the same holds for each row of LoRA's factors A and each column of B.
        """
        found: AdapterState = {}
        for name, old in previous.items():
            if unequal(name, old, sent):
                found[name] = self._by_rank(name, old, sent)
            else:
                values = of_senders(name, sent)
                found[name] = self.combine(*values) if values else old.clone()
        return found

    def _by_rank(self, name: str, old: Tensor, sent: Sequence[Weighed]) -> Tensor:
        """Combine the rows of a factor A, or the columns of a factor B, over the clients whose rank reaches them."""
        dim, new = cast(int, rank_dim(name)), old.clone()
        for start, end in partitions(adapter[name].shape[dim] for _, adapter in sent if name in adapter):
            part = [
                (weight, {name: adapter[name].narrow(dim, start, end - start)})
                for weight, adapter in sent
                if name in adapter and adapter[name].shape[dim] >= end
            ]
            if values := of_senders(name, part):
                new.narrow(dim, start, end - start).copy_(self.combine(*values))
        return new


class Mean(TensorRule):
    """The weighted mean of the clients' tensors (FedRA v1, Eq. 3)."""

    name: Literal["mean"] = "mean"

    def combine(self, shares: Tensor, tensors: Tensor) -> Tensor:
        """Return the sum of the tensors, each multiplied by its client's share."""
        return (scale(shares, tensors.ndim).to(tensors.dtype) * tensors).sum(0)


@cache
def aggregation_rules() -> tuple[type[AggregationRule], ...]:
    """Return the classes of all rules: the mean, and those of other installed packages."""
    others = plugins.load("aggregation", AggregationRule, [plugins.name_of(Mean)])  # type: ignore[type-abstract]
    return (Mean, *others)


def of_senders(name: str, sent: Sequence[Weighed]) -> tuple[Tensor, Tensor] | None:
    """Return the shares and the tensors of the K clients that sent the tensor `name`, or None if no client sent it.

    The shares (K,) are the clients' weights, divided by their sum. The tensors are stacked to (K, ...). All clients are
    handled in a few operations, because an operation for each client would take longer than its arithmetic.
    """
    holders = [(weight, adapter[name]) for weight, adapter in sent if name in adapter]
    if not holders:
        return None
    total = sum(weight for weight, _ in holders)
    tensors = torch.stack([tensor for _, tensor in holders])
    shares = [weight / total if total else 1 / len(holders) for weight, _ in holders]
    return torch.tensor(shares, dtype=torch.float64).to(tensors.device), tensors


def unequal(name: str, full: Tensor, sent: Sequence[Weighed]) -> bool:
    """Return whether a client sent a tensor with a smaller rank than that of the server's tensor `full`."""
    shapes = {adapter[name].shape for _, adapter in sent if name in adapter}
    return bool(shapes) and shapes != {full.shape}


def partitions(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the bounds of the ranges of rows that the same clients reach, given the clients' ranks.

    >>> partitions([4, 8, 4, 16])
    [(0, 4), (4, 8), (8, 16)]
    """
    return list(pairwise([0, *sorted(set(ranks))]))


def scale(shares: Tensor, ndim: int) -> Tensor:
    """Return the shares (K,) with further dimensions of size 1, so that they multiply tensors of `ndim` dimensions."""
    return shares.view(-1, *[1] * (ndim - 1))
