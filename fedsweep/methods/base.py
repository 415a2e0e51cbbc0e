"""The interface of a federated method: an immutable set of hyperparameters, and functions that return new states."""

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
    """The requirements of a method, which are checked before a run."""

    lora: bool = True
    """LoRA adapters in the backbone. Without them, `prepare` chooses which parameters are trained."""
    text: bool = False
    """A text encoder in the backbone."""
    head: bool = False
    """A linear classifier in the backbone."""
    validation: bool = False
    """Images that clients hold out from training."""
    proxy: bool = False
    """Real images on the server that no client has."""
    synthetic: bool = False
    """Synthetic images on the server."""


@dataclass(frozen=True)
class Server:
    """The server's constants and data sets, which do not change during a run."""

    num_layers: int
    aggregation: AggregationConfig
    depths: tuple[int, ...]
    """All depths L_i that a client can have, in ascending order."""
    proxy: Mapping[str, ImageSet] = field(default_factory=dict)
    """Real images that only the server has, by domain; empty if `partition.proxy_share` is 0."""
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)
    """Synthetic images, by domain; empty if `synthetic.name` is none."""


class FederatedMethod(Config, ABC):
    """A federated method: its fields are hyperparameters, and its functions are listed in the order of their calls.

    A method overrides the functions in which it differs from FedAvg on LoRA adapters and head. It never inherits from
    another method, but it may inherit capabilities (`fedsweep.methods.capabilities`).
    """

    name: str

    @property
    def needs(self) -> Needs:
        """The method's requirements."""
        return Needs()

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the method cannot run with these settings.

        Args:
            capacities: The depths L_i of the clients in the possible cohort with the smallest total depth.
            num_layers: The number of blocks of the backbone.
            aggregation: The aggregation of the clients' updates.
        """

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the modules that the method trains besides LoRA and head, for all possible `depths` and `domains`."""

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the state before the first round."""
        return ServerState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state that the server sends to the clients: by default, `state` itself."""
        return state

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return the blocks that each client runs and trains in this round: by default, all blocks of the server."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the loss that a client minimises in round `round` of `rounds`: by default, cross-entropy."""
        return cross_entropy

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients and return their updates: by default, they start from the global adapter."""
        objective = self.objective(trainer.round, trainer.rounds)
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], objective) for one in cohort])

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return the aggregated state: by default, each tensor is averaged over the clients that trained it."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state after the server's own training: by default, `state` itself."""
        return state

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return logits (batch, classes).

        Args:
            state: The server's state.
            model: The model, into which the global adapter is loaded, or with `personal` the adapter of a client.
            images: The images to classify.
            personal: Whether a client's own model predicts, instead of the global model.
            domain: The domain of the images if it is known and a client has it, or else None.
        """
        return cast(Tensor, model(images, state.layers))


def synthetic_of(domain: str, synthetic: Mapping[str, ImageSet]) -> ImageSet:
    """Return the synthetic images of one domain; raise ValueError if there are no synthetic images at all.

    A client with images of all domains has the domain `POOL`. For this domain, return the images of all domains.
    """
    if not synthetic:
        raise ValueError("there are no synthetic images")
    return synthetic[domain] if domain in synthetic else pool(list(synthetic.values()))


def state_as(kind: type[OwnState], state: ServerState) -> OwnState:
    """Return `state` if it is of the type `kind`; raise TypeError if it belongs to another method."""
    if not isinstance(state, kind):
        raise TypeError(f"this method needs a state of type {kind.__name__}, but it is of type {type(state).__name__}")
    return state


def first_blocks(cohort: Sequence[Client]) -> Allocations:
    """Allocate the first L_i blocks to each client: the standard depth-based split (FedRA, Section 3.1)."""
    return {client.id: LayerAllocation.of(tuple(range(client.capacity))) for client in cohort}
