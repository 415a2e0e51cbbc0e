"""Changes that the server folds into the frozen weights, and the factors of FedEx-LoRA's residual.

A message contains the changes of one round, in one of two forms for each adapted layer:

- two matrices B (out, k) and A (k, in) under the names of the layer's LoRA factors: the change is s B A
- a matrix (out, in) under the name of the layer's folded change: the change itself

The server and the clients compute the changes from the same message, so their weights are bit-identical.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsweep.models.names import folded_name, is_folded
from fedsweep.training.aggregation import pairs
from fedsweep.training.aggregation_rules import Weighed, partitions
from fedsweep.types import AdapterState


def fold(adapter: AdapterState, message: AdapterState, scaling: float) -> AdapterState:
    """Return the folded changes (out, in) after a message, for each layer in the message.

    The sums are computed in double precision and rounded to the type of the folded changes.

    Args:
        adapter: The tensors before the message, including the folded changes, keyed by name.
        message: The changes of one round, which may be empty.
        scaling: The server's scaling s of LoRA.
    """
    changes = {folded_name(a): scaling * (message[b].double() @ message[a].double()) for a, b in pairs(message)}
    changes |= {name: one.double() for name, one in message.items() if is_folded(name)}
    return {name: (adapter[name].double() + one).to(adapter[name].dtype) for name, one in changes.items()}


def residual_factors(a: str, b: str, mean: AdapterState, sent: Sequence[Weighed]) -> tuple[Tensor, Tensor] | None:
    """Return two matrices whose product is sum_i p_i B_i A_i - B' A', in double precision.

    The sum is taken over the clients that sent the layer, and p_i are their weights, divided by their sum. A' and B'
    are the means of the factors. If clients have unequal ranks, each row of A' and each column of B' is the mean over
    the clients whose rank reaches it.

    For the rows that all K clients reach, the product is a covariance, sum_i p_i (B_i - B') (A_i - A'). The sum of
    p_i (B_i - B') is zero, so the covariance equals the sum of p_i (B_i - B') (A_i - A_K) over the first K - 1 clients.
    If clients with the weight q in total do not reach a row, q B' A' is subtracted for this row. A row that no client
    reaches keeps its values, so q is 1; such rows are left out while B' is zero.

    Args:
        a: The name of a layer's factor A.
        b: The name of its factor B.
        mean: The means A' and B', keyed by name.
        sent: The weight and the tensors of each client.

    Returns:
        Matrices (out, k) and (k, in). For K clients of the full rank r, k is (K - 1) r. For unequal ranks, k is at most
        the sum of the clients' ranks and of the number of rows that no client reaches. None if k is 0.
    """
    holders = [(weight, adapter[a], adapter[b]) for weight, adapter in sent if a in adapter]
    total = sum(weight for weight, *_ in holders)
    lefts, rights, end = [], [], 0
    for start, end in partitions(len(up) for _, up, _ in holders):
        mean_a, mean_b = mean[a][start:end].double(), mean[b][:, start:end].double()
        reaching = [
            (weight / total if total else 1 / len(holders), up[start:end].double(), down[:, start:end].double())
            for weight, up, down in holders
            if len(up) >= end
        ]
        for share, up, down in reaching[:-1]:
            lefts.append(share * (down - mean_b))
            rights.append(up - reaching[-1][1])
        if len(reaching) < len(holders):
            lefts.append((sum(share for share, *_ in reaching) - 1) * mean_b)
            rights.append(mean_a)
    if holders and mean[b][:, end:].any():
        lefts.append(-mean[b][:, end:].double())
        rights.append(mean[a][end:].double())
    return (torch.cat(lefts, dim=1), torch.cat(rights)) if lefts else None
