"""What a federated method is: a frozen record of hyperparameters and pure functions, state in and state out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedsweep.aggregation import AggregationConfig
from fedsweep.config import Config
from fedsweep.models.layered import LayeredModel, Step, names_within
from fedsweep.training import CohortTrainer, LocalTask, Objective
from fedsweep.types import Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

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

    @property
    def needs_proxy(self) -> bool:
        """Whether the server trains on images of its own."""
        return False

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add what the method trains beside LoRA and head. `depths` and `domains` are all that a client can have."""

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """State before the first round."""
        return ServerState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """What the server does before it sends anything."""
        return state

    @abstractmethod
    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """The blocks that each client of the cohort runs and trains in this round."""

    @abstractmethod
    def objective(self, round: int, rounds: int) -> Objective:
        """What a client minimises on its walk, in this of so many rounds."""

    def absent_heads(self, state: ServerState, depth: int, num_layers: int) -> tuple[str, ...]:
        """Prefixes of the heads' names that a client with a walk of so many steps does not have."""
        return ()

    def sent_names(self, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Of an adapter's tensors, those that a client trains and sends back."""
        return names_within(names, row.trained, row.without)

    @property
    def has_stand_ins(self) -> bool:
        """Whether clients walk something in place of the blocks that they do not hold."""
        return False

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """By block, what the client walks in place of one that it does not hold. It skips a block without."""
        return {}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """What the clients send back: each has trained its blocks and heads from the global adapter."""
        objective = self.objective(trainer.round, trainer.rounds)
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], objective) for one in cohort])

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
