"""raFLoRA: rank-partitioned averaging of LoRA adapters of unequal rank (Wu et al., 2026, arXiv 2602.13486).

In FlexLoRA, components that only a few clients reach are divided by the weight of all clients in every round. The
energy of the server's adapter therefore concentrates on the smallest rank of a client (rank collapse). raFLoRA divides
the components at the ranks R_1 < ... < R_m that clients can have, into the partitions (0, R_1], (R_1, R_2], and so on.
Each partition (l, h] is averaged over the clients C_h whose rank reaches its upper end h (Eq. 8):

    W' = sum_h sum_{k in C_h} |D_k| B_k[:, l:h] A_k[l:h, :] / sum_{k in C_h} |D_k|  =  U S V^T

The server factors W' like FlexLoRA, and client k receives the first r_k components.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from numpy.random import Generator
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks
from fedsweep.methods.capabilities import LoraRule
from fedsweep.training.aggregation import factored_products, layerwise_mean, mean_product, weighed
from fedsweep.training.aggregation_rules import Weighed, partitions
from fedsweep.types import AdapterState, Client, ClientUpdate, ServerState


class RaFLoRA(FederatedMethod, LoraRule):
    """A method that averages each partition of the ranks over the clients whose rank reaches it.

    Client i holds its first L_i blocks. If all clients have the same rank, the method is the same as FlexLoRA.
    """

    name: Literal["raflora"] = "raflora"
    keeps_factors: ClassVar[bool] = False

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Average the products of each layer by rank partitions, and factor the sums of these means.

        The head is averaged like in FedAvg.
        """
        mean = layerwise_mean(state.adapter, updates, server.aggregation)
        sent = weighed(updates, server.aggregation.weight)
        product = partial(partitioned_product, ranks=server.ranks)
        return replace(state, adapter=mean | factored_products(state.adapter, sent, mean, server.ranks, product))


def partitioned_product(
    a: str, b: str, previous: AdapterState, sent: Sequence[Weighed], ranks: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Return two matrices whose product is the sum of the partitions' means, in double precision.

    A partition that no client of the cohort reaches keeps the server's previous components.

    Args:
        a: The name of a layer's factor A.
        b: The name of its factor B.
        previous: The server's tensors before the round, keyed by name.
        sent: The weight and the tensors of each client.
        ranks: All ranks that a client of the run can have; empty if all clients have the server's rank.

    Returns:
        Matrices of shapes (out, R) and (R, in), where R is the number of averaged components; None if no client sent
        the layer's factors.
    """
    holders = [(weight, adapter) for weight, adapter in sent if a in adapter]
    if not holders:
        return None
    parts = []
    for start, end in partitions(ranks or [len(previous[a])]):
        reached = [(weight, adapter) for weight, adapter in holders if len(adapter[a]) >= end] or [(1.0, previous)]
        part = [(weight, {a: one[a][start:end], b: one[b][:, start:end]}) for weight, one in reached]
        parts += [found] if (found := mean_product(a, b, previous, part)) else []
    return torch.cat([left for left, _ in parts], dim=1), torch.cat([right for _, right in parts])
