"""The contract of a federated method: a frozen record of hyperparameters and functions from state to state."""

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from numpy.random import Generator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.partition import pool
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

Allocations = Mapping[ClientId, LayerAllocation]
OwnState = TypeVar("OwnState", bound=ServerState)


@dataclass(frozen=True)
class Needs:
    """A method's requirements, which are checked before a run."""

    lora: bool = True
    """Adapters in the backbone; without them, `prepare` chooses what is trained besides the head."""
    text: bool = False
    """A text encoder in the backbone."""
    head: bool = False
    """A linear classifier in the backbone."""
    validation: bool = False
    """Images that clients hold out of their training."""
    proxy: bool = False
    """Images of the server's own."""
    synthetic: bool = False
    """Synthetic images on the server."""


@dataclass(frozen=True)
class Server:
    """The server's constants and data sets, which do not change during a run."""

    num_layers: int
    aggregation: AggregationConfig
    depths: tuple[int, ...]
    """All L_i that a client can have, ascending."""
    proxy: Mapping[str, ImageSet] = field(default_factory=dict)
    """Images by domain that the server holds and no client has; empty unless `partition.proxy_share` asks for them."""
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)
    """Images by domain that a generator made; empty unless `synthetic` names one."""


class FederatedMethod(Config, ABC):
    """A federated method: hyperparameters as fields, and verbs in the order of a round.

    A method overrides the verbs in which it differs from FedAvg on LoRA and head. It never inherits from another
    method, but may inherit capabilities (`fedsweep.methods.capabilities`).
    """

    name: str

    @property
    def needs(self) -> Needs:
        """The method's requirements."""
        return Needs()

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError for a combination that is impossible in the smallest cohort, which has these capacities."""

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the modules that the method trains besides LoRA and head, for all possible `depths` and `domains`."""

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the state before the first round."""
        return ServerState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state that the server sends, by default after no training of its own."""
        return state

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return the blocks that each client runs and trains in this round: by default, all of the server's."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the loss that a client minimises in round `round` of `rounds`: by default, cross-entropy."""
        return cross_entropy

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients and return their updates: by default, from the global adapter on the objective."""
        objective = self.objective(trainer.round, trainer.rounds)
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], objective) for one in cohort])

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return the state after the updates: by default, each tensor is averaged over the clients that trained it."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state after the server's own training, if any."""
        return state

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return logits (batch, classes). `model` holds the global adapter, or with `personal` a client's own.

        `domain` is the images' domain, if it is known and one of the clients'.
        """
        return cast(Tensor, model(images, state.layers))


def synthetic_of(domain: str, synthetic: Mapping[str, ImageSet]) -> ImageSet:
    """Return a domain's synthetic images, or those of all domains for a pool's client; raise ValueError without any."""
    if not synthetic:
        raise ValueError("there are no synthetic images")
    return synthetic[domain] if domain in synthetic else pool(list(synthetic.values()))


def state_as(kind: type[OwnState], state: ServerState) -> OwnState:
    """Return the state if it is of this kind, or else raise TypeError: it is another method's."""
    if not isinstance(state, kind):
        raise TypeError(f"this method goes on from a {kind.__name__}, not from a {type(state).__name__}")
    return state


def first_blocks(cohort: Sequence[Client]) -> Allocations:
    """Return each client's first L_i blocks: the standard depth-based split (FedRA, Section 3.1)."""
    return {client.id: LayerAllocation.of(tuple(range(client.capacity))) for client in cohort}
