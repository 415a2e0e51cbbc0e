"""What a federated method is: a frozen record of hyperparameters and pure functions, state in and state out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedsweep.aggregation import AggregationConfig
from fedsweep.config import Config
from fedsweep.models.layered import LayeredModel
from fedsweep.training import CohortTrainer, LocalTask, Objective
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

Allocations = Mapping[ClientId, LayerAllocation]


@dataclass(frozen=True)
class Server:
    """What the server brings to a round beside its state."""

    num_layers: int
    aggregation: AggregationConfig
    depths: tuple[int, ...]
    """All L_i that a client can have, ascending."""
    proxy: Mapping[str, ImageSet] = field(default_factory=dict)
    """Images by domain that the server holds and no client has; empty unless `partition.proxy_share` asks for them."""


class FederatedMethod(Config, ABC):
    """A method's fields are its hyperparameters; a method never inherits from another, it composes verbs."""

    name: str

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Refuse an impossible combination before anything runs. `capacities` are those of the smallest cohort.

        Raises:
            ValueError: a sentence naming the rule and the values.
        """

    def prepare(self, model: LayeredModel, depths: Collection[int], seed: int) -> None:
        """Add what the method trains beside LoRA and head. `depths` are all L_i that a client can have."""

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """State before the first round."""
        return ServerState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    @abstractmethod
    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """The blocks that each client of the cohort runs and trains in this round."""

    @abstractmethod
    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """What the clients send back."""

    @abstractmethod
    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """The state after the round."""

    def predict(self, state: ServerState, model: LayeredModel, images: Tensor, client: Client | None = None) -> Tensor:
        """Logits (batch, classes) of uint8 images; `model` holds the state's adapter."""
        logits: Tensor = model(images, state.layers)
        return logits


def first_blocks(cohort: Sequence[Client]) -> dict[ClientId, LayerAllocation]:
    """Each client's first L_i blocks: the standard depth-based split (FedRA, Section 3.1)."""
    return {client.id: LayerAllocation.of(tuple(range(client.capacity))) for client in cohort}


def same_start(
    adapter: AdapterState, cohort: Sequence[Client], allocations: Allocations, objective: Objective
) -> list[LocalTask]:
    """One task per client, all from the global adapter with the same objective."""
    return [LocalTask(client, adapter, allocations[client.id], objective) for client in cohort]
