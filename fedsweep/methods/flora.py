"""FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations.

Ziyao Wang, Zheyu Shen, Yexiao He, Guoheng Sun, Hongyi Wang, Lingjuan Lyu, Ang Li. NeurIPS 2024. In each round, every
client begins with new factors: A is random, and B is zero. The server stacks the factors of all clients of the cohort.
The product of the stacked factors is the exact weighted mean of the clients' changes:

    B' = [p_1 B_1 | p_2 B_2 | ...],  A' = [A_1; A_2; ...],  B' A' = sum_i p_i B_i A_i,  W <- W + s B' A'

Here A_i and B_i are the factors of client i, p_i is the client's weight, and s is the server's scaling, in which the
clients send B_i. The server sends the stack to all clients, also to those outside the cohort. Each client adds the
change to its frozen weights and discards its factors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from numpy.random import Generator

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks, state_as
from fedsweep.methods.capabilities import LoraRule, Messages
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import add_folds, effective_scaling, initial_a
from fedsweep.models.names import is_folded, names_within, rank_dim
from fedsweep.training.aggregation import layerwise_mean, mean_product, pairs, weighed
from fedsweep.training.folding import fold
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, LayerAllocation, ServerState


@dataclass(frozen=True)
class FLoRAState(ServerState):
    """The server's state, including the stack that the server sends at the beginning of the next round.

    Attributes:
        stack: For each layer that the latest cohort trained, the stacked factors A' (R, in) and B' (out, R), keyed by
            the names of the layer's factors. R is the sum of the ranks of the clients that trained the layer.
    """

    stack: AdapterState = field(default_factory=dict)


class FLoRA(FederatedMethod, LoraRule, Messages):
    """A method that adds the exact mean of the clients' LoRA products to the frozen weights in each round.

    Each client holds the first L_i blocks, where L_i is the number of blocks that fit on client i.
    """

    name: Literal["flora"] = "flora"
    folds: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = False
    remember_cohort: ClassVar[bool] = True

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Let the server fold changes into the frozen weights of the adapted layers."""
        add_folds(model)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FLoRAState:
        """Return the initial state, which has no stack."""
        return FLoRAState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Draw new factors A for the layers in the stack; their factors B are already zero.

        The values depend only on the seed, the round and the tensor's name, so the clients draw them without receiving
        them. A layer that no client trained in the latest round still has unused factors, and keeps them.
        """
        state = state_as(FLoRAState, state)
        fresh = {
            a: initial_a(state.adapter[a], trainer.seed, "fresh adapter", trainer.round, a)
            for a, _ in pairs(state.stack)
        }
        return replace(state, adapter=state.adapter | fresh)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Stack the clients' factors, fold s B' A' into the frozen weights, and set the factors B to zero.

        The head is averaged. Layers that no client trained do not change.
        """
        state = state_as(FLoRAState, state)
        adapter = layerwise_mean(state.adapter, updates, server.aggregation)
        ordered = weighed(updates, server.aggregation.weight)
        stack: AdapterState = {}
        for a, b in pairs(state.adapter):
            if (found := mean_product(a, b, state.adapter, ordered)) is not None:
                stack[b], stack[a] = (part.to(adapter[a].dtype) for part in found)
                adapter[a], adapter[b] = state.adapter[a].clone(), torch.zeros_like(adapter[b])
        changed = fold(state.adapter, stack, effective_scaling(server.lora))
        return replace(state, adapter=adapter | changed, stack=stack)

    def broadcast(self, state: ServerState) -> AdapterState:
        """Return the stack of the latest round, which all clients add to their frozen weights."""
        return state_as(FLoRAState, state).stack

    def received(self, state: ServerState, client: ClientId, row: LayerAllocation) -> AdapterState:
        """Return the tensors that a client of the cohort needs besides the stack, which are those of the head."""
        names = names_within(state.adapter, row.held, row.excluded_prefixes)
        return {name: state.adapter[name] for name in names if rank_dim(name) is None and not is_folded(name)}
