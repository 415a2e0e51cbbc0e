"""HetLoRA: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models.

Yae Jee Cho, Luyang Liu, Zheng Xu, Aldi Fahrezi, Gauri Joshi. EMNLP 2024. Clients have LoRA adapters of unequal rank,
and client k has the rank r_k.

1. Truncation: client k receives the first r_k rows of A and columns of B.
2. Rank self-pruning: the client minimises F_k + lambda sum ||B[:, c:]|| ||A[c:, :]||, with the sum over its adapted
   layers and c = floor(gamma r_k). If training made this sum smaller, the client cuts its factors to the rank c before
   it sends them, and keeps this rank.
3. Aggregation: the server pads the factors with zeros to the full rank, and averages A and B with weights
   ||B_k A_k|| / sum_j ||B_j A_j||.

All norms are Frobenius norms.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks, state_as
from fedsweep.methods.capabilities import LoraRule, OwnMetrics
from fedsweep.models.client_rank import adapted_layers, cut, padded
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.models.lora import squared_norm
from fedsweep.models.names import names_within, rank_dim
from fedsweep.training.aggregation import layerwise_mean, pairs
from fedsweep.training.local_training import CohortTrainer, Objective, cross_entropy
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ServerState

MEAN_RANK = "lora/mean_rank"


@dataclass(frozen=True)
class HetLoRAState(ServerState):
    """The server's state with the current rank of each client; None for the full rank, `lora.rank`."""

    ranks: dict[ClientId, int | None] = field(default_factory=dict, kw_only=True)


class HetLoRA(FederatedMethod, LoraRule, OwnMetrics):
    """A method whose clients prune their own ranks; the server pads the factors with zeros and averages them.

    Client i holds its first L_i blocks.
    """

    name: Literal["hetlora"] = "hetlora"
    weights: Literal["products", "samples"] = Field(
        "products",
        description="weights of clients in the averages of A and B. `products`: the norm of the client's products B A; "
        "`samples`: those of `aggregation.weights`",
    )
    gamma: float = Field(
        0.99,
        gt=0,
        le=1,
        description="share of a client's rank that pruning keeps, rounded down to a whole rank; 1: no pruning",
    )
    penalty: float = Field(
        0.001, ge=0, description="weight of the regulariser that makes the components to prune small; 0: none"
    )
    least_rank: int = Field(1, gt=0, description="rank below which a client does not prune its adapters")

    @property
    def changes_ranks(self) -> bool:
        """True if clients prune their ranks."""
        return self.gamma < 1

    def pruned(self, rank: int) -> int:
        """Return the rank to which a client of rank `rank` prunes its adapters.

        >>> [HetLoRA(gamma=0.5, least_rank=3).pruned(rank) for rank in (16, 7, 5, 3, 2)]
        [8, 3, 3, 3, 2]
        """
        return min(rank, max(self.least_rank, math.floor(self.gamma * rank + 1e-9)))

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> HetLoRAState:
        """Return the initial state, in which each client has the rank that `federation.ranks` lists."""
        ranks = {client.id: client.rank for client in clients}
        return HetLoRAState(adapter=model.adapter(), layers=tuple(range(server.num_layers)), ranks=ranks)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, with adapters of the client's current rank."""
        ranks = state_as(HetLoRAState, state).ranks
        return {client: replace(row, rank=ranks[client]) for client, row in first_blocks(cohort).items()}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the client's loss: the cross-entropy plus the regulariser (step 2)."""
        if self.gamma == 1 or self.penalty == 0:
            return cross_entropy  # so that clients can train together

        layers_of = cache(adapted_layers)  # listed once, and not in every step

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            layers, factors = layers_of(model), dict[str, Tensor]()
            for name in names_within(layers, [step for step in walk if isinstance(step, int)]):
                factors[f"{name}.lora_A.default.weight"] = layers[name].lora_A["default"].weight
                factors[f"{name}.lora_B.default.weight"] = layers[name].lora_B["default"].weight
            return cross_entropy(model, images, labels, walk) + self.penalty * self.tail(factors)

        return objective

    def tail(self, factors: AdapterState) -> Tensor:
        """Return sum ||B[:, c:]|| ||A[c:, :]|| over the adapted layers, where c is the rank after pruning.

        Args:
            factors: The client's factors A and B at its rank. All layers of a client have the same rank.
        """
        found = []
        for a, b in pairs(factors):
            kept = self.pruned(len(factors[a]))
            norms = [torch.linalg.vector_norm(one) for one in (factors[b][:, kept:], factors[a][kept:])]
            found.append(norms[0] * norms[1])
        return torch.stack(found).sum()

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients, and cut the factors of clients that prune their rank (step 2)."""
        updates = super().local_updates(state, cohort, allocations, trainer)
        if self.gamma == 1 or trainer.counts_only:
            return updates
        return [self._cut(state, update) for update in updates]

    def _cut(self, state: ServerState, update: ClientUpdate) -> ClientUpdate:
        """Return the update at the smaller rank if the components to prune became smaller in training."""
        row, rank = update.allocation, rank_of(update.adapter)
        kept = self.pruned(rank)
        before = cut({name: state.adapter[name] for name in update.adapter}, row.rank)
        if kept == rank or self.tail(_factors(update.adapter)) >= self.tail(_factors(before)):
            return update
        adapter = {name: one.clone() for name, one in cut(update.adapter, kept).items()}
        return replace(update, adapter=adapter, allocation=replace(row, rank=kept))

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> HetLoRAState:
        """Average the factors, padded with zeros, and learn the clients' ranks from their shapes (step 3).

        A component that no client of the cohort reaches keeps its values if a client outside the cohort reaches it.
        """
        own = state_as(HetLoRAState, state)
        learned = {update.client: rank_of(update.adapter) for update in updates} if self.gamma < 1 else {}
        ranks, full = own.ranks | learned, rank_of(own.adapter)
        factors, sent = _factors(own.adapter), [replace(one, adapter=_factors(one.adapter)) for one in updates]
        filled = [replace(one, adapter=padded(one.adapter, factors)) for one in sent]
        weigh = product_norm if self.weights == "products" else server.aggregation.weight
        mean = layerwise_mean(factors, filled, server.aggregation, weigh)
        largest = max(full if rank is None else rank for rank in ranks.values())
        for name, dim in ((name, rank_dim(name) or 0) for name in mean):
            reached = max((one.adapter[name].shape[dim] for one in sent if name in one.adapter), default=full)
            if reached < largest:
                kept = (dim, reached, largest - reached)
                mean[name].narrow(*kept).copy_(factors[name].narrow(*kept))
        others = layerwise_mean(
            _others(own.adapter),
            [replace(one, adapter=_others(one.adapter)) for one in updates],
            server.aggregation,
        )
        return replace(own, adapter={name: (mean | others)[name] for name in own.adapter}, ranks=ranks)

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the name of the metric that HetLoRA adds, the mean rank of the cohort after the round."""
        return [MEAN_RANK]

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean rank of the adapters that the clients of the cohort sent."""
        return {MEAN_RANK: sum(rank_of(update.adapter) for update in updates) / len(updates)}


def rank_of(adapter: AdapterState) -> int:
    """Return the rank of the LoRA factors among the tensors of a client or the server."""
    return next(len(tensor) for name, tensor in adapter.items() if rank_dim(name) == 0)


def product_norm(update: ClientUpdate) -> float:
    """Return ||B A||, the norm of a client's products over all its adapted layers."""
    a_and_b = [[update.adapter[name].flatten(1).double() for name in pair] for pair in pairs(update.adapter)]
    return math.sqrt(sum(squared_norm(b, a) for a, b in a_and_b))


def _factors(adapter: AdapterState) -> AdapterState:
    return {name: tensor for name, tensor in adapter.items() if rank_dim(name) is not None}


def _others(adapter: AdapterState) -> AdapterState:
    return {name: tensor for name, tensor in adapter.items() if rank_dim(name) is None}
