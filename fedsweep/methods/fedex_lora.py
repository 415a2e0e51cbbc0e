"""FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models.

Raghav Singhal, Kaustubh Ponkshe, Praneeth Vepakomma. ACL 2025. The server averages the clients' factors A_i and B_i.
The product of the means differs from the mean of the products. The server folds the difference, the residual, into the
frozen weights:

    A' = sum_i p_i A_i,  B' = sum_i p_i B_i,  W <- W + s (sum_i p_i B_i A_i - B' A')

Here p_i is the weight of client i, and s is the server's scaling, in which the clients send B_i. The next round begins
with the factors A' and B', so the new model is W + s sum_i p_i B_i A_i, with the weights W before the round.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from numpy.random import Generator

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks, state_as
from fedsweep.methods.capabilities import LoraRule, Messages
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import add_folds, effective_scaling
from fedsweep.models.names import folded_name
from fedsweep.training.aggregation import pairs, weighed
from fedsweep.training.aggregation_rules import Mean
from fedsweep.training.folding import fold, residual_factors
from fedsweep.types import AdapterState, Client, ClientUpdate, ServerState


@dataclass(frozen=True)
class FedExState(ServerState):
    """The server's state, including the residual that the server sends at the beginning of the next round.

    Attributes:
        residual: For each layer, either two factors of the residual, keyed by the names of the layer's factors, or the
            residual times s, keyed by the name of the layer's folded change (`fedsweep.training.folding`). A layer
            whose residual is zero, because one client trained all rows of its factors, is not listed.
    """

    residual: AdapterState = field(default_factory=dict)


class FedExLoRA(FederatedMethod, LoraRule, Messages):
    """A method that averages LoRA's factors and adds the error of their product to the frozen weights.

    Each client holds the first L_i blocks, where L_i is the number of blocks that fit on client i.
    """

    name: Literal["fedex_lora"] = "fedex_lora"
    folds: ClassVar[bool] = True
    remember_cohort: ClassVar[bool] = True

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Let the server fold changes into the frozen weights of the adapted layers."""
        add_folds(model)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedExState:
        """Return the initial state, which has no residual."""
        return FedExState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Average the factors and the head, and fold the residual times s into the frozen weights.

        The residual is computed from the factors in which it is sent, or sent as a matrix if that has fewer values.
        """
        ordered, scaling = weighed(updates, server.aggregation.weight), effective_scaling(server.lora)
        mean = Mean().aggregate(state.adapter, ordered)
        residual: AdapterState = {}
        for a, b in pairs(state.adapter):
            if (found := residual_factors(a, b, mean, ordered)) is None:
                continue
            left, right = found
            if left.numel() + right.numel() < len(left) * right.shape[1]:
                residual[b], residual[a] = left.to(mean[b].dtype), right.to(mean[a].dtype)
            else:
                residual[folded_name(a)] = (scaling * left @ right).to(mean[b].dtype)
        changed = fold(state.adapter, residual, scaling)
        return replace(state_as(FedExState, state), adapter=mean | changed, residual=residual)

    def broadcast(self, state: ServerState) -> AdapterState:
        """Return the residual of the latest round, which all clients add to their frozen weights."""
        return state_as(FedExState, state).residual
