"""`FederatedMethod`, the base class of all federated methods, and the types and helpers that methods share."""

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from numpy.random import Generator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.image_sets import pool
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.lora import LoraConfig
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

Allocations = Mapping[ClientId, LayerAllocation]
OwnState = TypeVar("OwnState", bound=ServerState)


@dataclass(frozen=True)
class Needs:
    """The parts of a run that a method requires, such as LoRA adapters or synthetic images.

    Before a run, fedsweep checks that these parts are present.
    """

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
    lora: LoraConfig | None = None
    """The options of the adapters, with the full rank; None for a method without adapters."""
    proxy: Mapping[str, ImageSet] = field(default_factory=dict)
    """Real images that only the server has, keyed by domain; empty if `partition.proxy_share` is 0."""
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)
    """Synthetic images, keyed by domain; empty if `synthetic.name` is none."""
    ranks: tuple[int, ...] = ()
    """All ranks r_i of clients, in ascending order; empty if clients have no ranks of their own."""


class FederatedMethod(Config, ABC):
    """A federated method, with its hyperparameters as fields.

    A run calls the functions in the order in which this class defines them. By default, they implement FedAvg on the
    LoRA adapters and the head. A method overrides the functions in which it differs from these defaults. A method of
    fedsweep never inherits from another method, but it may inherit capabilities, such as personal models
    (`fedsweep.methods.capabilities`). A method of another package may also inherit from a method of fedsweep.
    """

    name: str

    @property
    def needs(self) -> Needs:
        """The parts of a run that the method requires; by default, only LoRA adapters in the backbone."""
        return Needs()

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the method cannot run with these settings.

        Args:
            capacities: For each client of one cohort, the number of blocks that fit on the client. The cohort is the
                one for which these numbers have the smallest sum.
            num_layers: The number of blocks of the backbone.
            aggregation: The settings for averaging the clients' updates.
        """

    def draws_blocks(self, depths: Collection[int], num_layers: int) -> bool:
        """Return whether `allocate` draws blocks at random, so that they depend on the seed; by default, it does not.

        Args:
            depths: All depths that a client can have.
            num_layers: The number of blocks of the backbone.
        """
        return False

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the method's own modules to the model, and choose the trainable weights.

        Args:
            model: The full model, which is changed in place.
            depths: The possible depths of clients, that is, the numbers of blocks that clients can hold.
            domains: The names of all domains that clients have.
            seed: The seed of the initial values of new modules.
        """

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the server's state before the first round."""
        return ServerState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state with which a round starts; by default, `state` itself.

        A method can, for example, train on the server before the clients start.
        """
        return state

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return the blocks that each client runs and trains in a round; by default, all blocks in `state.layers`."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the loss that a client minimises in round `round` of `rounds`; by default, the cross-entropy."""
        return cross_entropy

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients of a cohort and return their updates; by default, clients start from the global adapter."""
        objective = self.objective(trainer.round, trainer.rounds)
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], objective) for one in cohort])

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return the state after aggregation; by default, each tensor is averaged over the clients that trained it."""
        mean = layerwise_mean(state.adapter, updates, server.aggregation, ranks=server.ranks)
        return replace(state, adapter=mean)

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Return the state after the server's own training at the end of a round; by default, `state` itself."""
        return state

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits (batch, classes) of a batch of images.

        Args:
            state: The server's state.
            model: The model, into which the caller has loaded the global adapter, or a client's adapter if `personal`
                is true.
            images: The images to classify.
            personal: Whether to predict with a client's own model instead of the global model.
            domain: The domain of the images, or None if the domain is unknown or is not the domain of any client.
        """
        return cast(Tensor, model(images, state.layers))


def synthetic_of(domain: str, synthetic: Mapping[str, ImageSet]) -> ImageSet:
    """Return the synthetic images of one domain, or those of all domains if `domain` is `POOL`.

    Args:
        domain: The name of the domain, or `POOL` for a client whose images come from all domains.
        synthetic: The synthetic images, keyed by domain.

    Raises:
        ValueError: There are no synthetic images.
    """
    if not synthetic:
        raise ValueError("there are no synthetic images")
    return synthetic[domain] if domain in synthetic else pool(list(synthetic.values()))


def state_as(kind: type[OwnState], state: ServerState) -> OwnState:
    """Return `state` if it is of type `kind`; raise TypeError if it is the state of another method."""
    if not isinstance(state, kind):
        raise TypeError(
            f"this method needs a state of type {kind.__name__}, but the state is of type {type(state).__name__}"
        )
    return state


def first_blocks(cohort: Sequence[Client]) -> Allocations:
    """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client.

    This is the standard split by depth (FedRA, Section 3.1).
    """
    return {client.id: LayerAllocation.of(tuple(range(client.capacity))) for client in cohort}


def with_ranks(allocations: Allocations, cohort: Sequence[Client]) -> Allocations:
    """Return the allocations in which each client has its own rank, unless the method has chosen another one."""
    ranks = {client.id: client.rank for client in cohort}
    return {
        client: row if row.rank is not None or ranks[client] is None else replace(row, rank=ranks[client])
        for client, row in allocations.items()
    }
