"""FlexLoRA: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources.

Jiamu Bai, Daoyuan Chen, Bingchen Qian, Liuyi Yao, Yaliang Li. NeurIPS 2024. Clients have LoRA adapters of unequal rank
r_i. The server averages the products of their factors, and factors the mean by a singular value decomposition:

    W' = sum_i |D_i| B_i A_i / sum_i |D_i|  =  U S V^T

In the next round, client i receives the best approximation of W' at its rank: the first r_i columns of U and V, and the
r_i largest singular values in S.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from numpy.random import Generator

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks
from fedsweep.methods.capabilities import LoraRule
from fedsweep.training.aggregation import factored_products, layerwise_mean, weighed
from fedsweep.types import Client, ClientUpdate, ServerState


class FlexLoRA(FederatedMethod, LoraRule):
    """A method that averages the products B A of clients with unequal ranks, and factors the mean by an SVD.

    Client i holds its first L_i blocks. If all clients have the rank `lora.rank` and hold all blocks, the method is the
    same as AllLarge with `aggregation.lora: product_svd`.
    """

    name: Literal["flexlora"] = "flexlora"
    keeps_factors: ClassVar[bool] = False

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Average the products B_i A_i of each layer over the clients that trained it, and factor the means.

        The mean of the factors themselves only decides the scale and the direction of the new factors. The head is
        averaged like in FedAvg.
        """
        mean = layerwise_mean(state.adapter, updates, server.aggregation)
        sent = weighed(updates, server.aggregation.weight)
        return replace(state, adapter=mean | factored_products(state.adapter, sent, mean, server.ranks))
