"""What a federated method is: a frozen record of hyperparameters and pure functions, state in and state out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.partition.base import pool
from fedsweep.models import BackboneConfig
from fedsweep.models.feature_reader import Reader
from fedsweep.models.layered import Images, LayeredModel, Step
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

Allocations = Mapping[ClientId, LayerAllocation]
OwnState = TypeVar("OwnState", bound=ServerState)


@dataclass(frozen=True)
class Server:
    """What the server brings to a round beside its state."""

    num_layers: int
    aggregation: AggregationConfig
    depths: tuple[int, ...]
    """All L_i that a client can have, ascending."""
    proxy: Mapping[str, ImageSet] = field(default_factory=dict)
    """Images by domain that the server holds and no client has; empty unless `partition.proxy_share` asks for them."""
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)
    """Images by domain that a generator made; empty unless `synthetic` names one."""


class FederatedMethod(Config, ABC):
    """A method's fields are its hyperparameters; a method never inherits from another, it composes verbs."""

    name: str
    uses_lora: ClassVar[bool] = True
    """Whether adapters are inserted; else the method says in `prepare` what is trained beside the head."""
    needs_text: ClassVar[bool] = False
    """Whether the backbone must have a text encoder."""
    needs_head: ClassVar[bool] = False
    """Whether the backbone must have a linear classifier."""
    needs_validation: ClassVar[bool] = False
    """Whether clients are steered by images that they hold out of their training."""
    shares_model: ClassVar[bool] = True
    """Whether clients train copies of one global model; else there is no mean of them to correct or compare with."""

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Refuse an impossible combination before anything runs. `capacities` are those of the smallest cohort.

        Raises:
            ValueError: a sentence naming the rule and the values.
        """

    @property
    def needs_proxy(self) -> bool:
        """Whether the server trains on images of its own."""
        return False

    @property
    def needs_synthetic(self) -> bool:
        """Whether the server trains on synthetic images."""
        return False

    def fingerprint(self) -> str | None:
        """What pins the content of weights that the method brings along; None for none.

        Raises:
            UserError: they are not there.
        """
        return None

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Load what the method brings along, as a run on this backbone and these classes will.

        Raises:
            UserError: it is not there, or does not fit.
        """

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

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Of the server's tensors, those that a client gets at the beginning of a round."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Of an adapter's tensors, those that a client trains and sends back."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def trained_names(self, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Of an adapter's tensors, those that a client trains, sent or not."""
        return self.sent_names(names, row)

    def stages(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Where clients do different things in a run of so many rounds: a state of each stage, by what it is called."""
        return {"": state}

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

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """What the server trains by itself, after it has aggregated."""
        return state

    def sent_to(self, state: ServerState, client: ClientId) -> AdapterState:
        """The values that a client gets at the beginning of a round, and others."""
        return state.adapter

    def adapter_of(self, state: ServerState, client: ClientId | None = None) -> AdapterState:
        """The adapter of a client's own model; of the global one without a client, or where there are no others."""
        return state.adapter

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """How many of the first blocks nobody trains in that model now: what leaves them can be kept."""
        return 0

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """What the method's clients know of images before their own model sees them: by set, rows for its images."""
        return {name: {} for name in sets}

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """What the server's own frozen model, if it has one, makes of images: rows (n, ...) by name."""
        return {}

    def predict(
        self,
        state: ServerState,
        model: LayeredModel,
        images: Images,
        client: Client | None = None,
        domain: str | None = None,
    ) -> Tensor:
        """Logits (batch, classes) of images; `model` holds the adapter of the client, or of the state.

        `domain` is that of the images where it is known and one of the clients'.
        """
        logits: Tensor = model(images, state.layers)
        return logits

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """What the global model, or a client's own, predicts with beside its backbone, LoRA and head; None for nothing.

        In words, for the sentence that refuses to export it. `depths` are all that a client can have.
        """
        return None

    def metrics(self, clients: Iterable[ClientId]) -> list[str]:
        """Names of what `measured` reports."""
        return []

    def measured(
        self, state: ServerState, clients: Iterable[ClientId], updates: Sequence[ClientUpdate]
    ) -> dict[str, float]:
        """What only this method has to say of a round, from the state after it."""
        return {}


@torch.no_grad()
def predicted(
    method: FederatedMethod,
    state: ServerState,
    reader: Reader,
    images: ImageSet,
    client: Client | None = None,
    side_inputs: Mapping[str, Tensor] | None = None,
    domain: str | None = None,
) -> Tensor:
    """Logits (n, classes) of a whole image set, by the client's model or the global one, which the reader's holds."""
    model, owner = reader.model, client.id if client else None
    steps = method.num_frozen_blocks(state, owner)
    if client is None and side_inputs is None:
        side_inputs = method.server_features(reader, images)
    if not steps and not side_inputs:
        views = images.batches(reader.batch_size)
        return torch.cat([method.predict(state, model, pixels, client, domain) for pixels, _ in views])
    prefix = reader.prefix(state.layers, steps, method.adapter_of(state, owner)) if steps else None
    parts = torch.split(torch.arange(len(images)), reader.batch_size)
    batches = (reader.batch(images, index, prefix, steps, side_inputs or {}) for index in parts)
    return torch.cat([method.predict(state, model, batch, client, domain) for batch in batches])


def synthetic_of(domain: str, synthetic: Mapping[str, ImageSet]) -> ImageSet:
    """The synthetic images of a client's domain; those of all, where its images come from all.

    Raises:
        ValueError: there are none.
    """
    if not synthetic:
        raise ValueError("there are no synthetic images")
    return synthetic[domain] if domain in synthetic else pool(list(synthetic.values()))


def state_as(kind: type[OwnState], state: ServerState) -> OwnState:
    """The state as one of a method's own kind.

    Raises:
        TypeError: it is another method's.
    """
    if not isinstance(state, kind):
        raise TypeError(f"this method goes on from a {kind.__name__}, not from a {type(state).__name__}")
    return state


def first_blocks(cohort: Sequence[Client]) -> dict[ClientId, LayerAllocation]:
    """Each client's first L_i blocks: the standard depth-based split (FedRA, Section 3.1)."""
    return {client.id: LayerAllocation.of(tuple(range(client.capacity))) for client in cohort}
