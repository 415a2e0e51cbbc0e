"""Capabilities: optional base classes for methods with special features, such as personal models.

A method inherits from `FederatedMethod` and from its capabilities, and overrides their functions. If a method lacks a
capability, `of_method` returns an object with the default behaviour instead of the method. Callers therefore need not
check which capabilities a method has; they call, for example, `Messages.of_method(method).sent_names(...)`.

`FrozenEncoders` is not a capability. It is a base class for methods that keep both encoders of CLIP frozen.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Self

import torch
from numpy.random import Generator
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.models import BackboneConfig
from fedsweep.models.base import Reader
from fedsweep.models.client_rank import cut
from fedsweep.models.layered import Images, LayeredModel, Step
from fedsweep.models.names import names_within, not_folded
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState


class Capability:
    """The base class of all capabilities, which are optional features of methods."""

    @classmethod
    def of_method(cls, method: FederatedMethod) -> Self:
        """Return `method` if it has this capability; otherwise, return an object with the default behaviour."""
        return method if isinstance(method, cls) else cls()


class OwnWeights(Capability):
    """A base class for methods that load weights of their own or add tensors that must fit the backbone."""

    def fingerprint(self) -> str | None:
        """Return a string that identifies the method's own pre-trained weights, or None if it has none.

        Raises:
            UserError: The weights are missing.
        """
        return None

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Check before a run that the method's own weights and tensors fit the backbone and the classes.

        Raises:
            UserError: The weights are missing, or they do not fit the backbone or the classes.
        """


class Messages(Capability):
    """A base class for methods that choose which tensors the server and the clients send each other.

    By default, the server sends a client the tensors of the blocks that the client holds, and the client sends back the
    tensors of the blocks that it trains.
    """

    remember_cohort: ClassVar[bool] = False
    """True if the server's messages depend on the cohort of the previous round, so that the first round differs."""

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client with the allocation `row`.

        Changes that the server folded into frozen weights are not among them. A method sends each round's changes with
        `broadcast`.
        """
        held = names_within(state.adapter, row.held, row.excluded_prefixes)
        return not_folded(held)

    def received(self, state: ServerState, client: ClientId, row: LayerAllocation) -> AdapterState:
        """Return the tensors that the server sends to a client of the cohort with the allocation `row`.

        By default, they are the tensors named by `received_names`, cut to the client's rank.
        """
        return cut({name: state.adapter[name] for name in self.received_names(state, client, row)}, row.rank)

    def broadcast(self, state: ServerState) -> AdapterState:
        """Return the tensors that the server sends to every client of the run before a round; by default, none.

        Clients outside the cohort receive them too, because a later round needs them.
        """
        return {}

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` whose tensors are sent back by a client with the allocation `row`.

        By default, a client sends back every tensor that it trains.
        """
        return not_folded(names_within(names, row.trained, row.excluded_prefixes))

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` whose tensors are trained by a client with the allocation `row`.

        The subset includes the names of trained tensors that the client does not send back.
        """
        return self.sent_names(state, names, row)


class StandIns(Capability):
    """A base class for methods in which clients run stand-ins in place of missing blocks.

    A stand-in is a small module that imitates a block.
    """

    @property
    def has_stand_ins(self) -> bool:
        """True if, with these hyperparameters, clients run stand-ins in place of missing blocks."""
        return False

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the client's stand-ins, keyed by the number of the block that each of them can replace.

        A stand-in is a small module that imitates a block. If a block is missing and has no stand-in, the forward pass
        skips the block.
        """
        return {}


class PersonalModels(Capability):
    """A base class for methods in which each client has a personal model in addition to the global model."""

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the adapter of a client's personal model; by default, the global adapter."""
        return state.adapter


class SeparateModels(PersonalModels):
    """A base class for methods whose clients have separate models, which are never averaged into a global model.

    These methods cannot be combined with FedDyn (`base_optimizer: feddyn`), `evaluation.metrics` or t-SNE, all of
    which need an averaged model.
    """

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors that the server sends to a client in a round; by default, the global adapter."""
        return state.adapter


class DomainModels(Capability):
    """A base class for methods whose global model uses the domain of an image."""

    @property
    def uses_domains(self) -> bool:
        """True if predictions depend on the domain. Otherwise, all domains are predicted in one pass."""
        return False


class FrozenBlocks(Capability):
    """A base class for methods that freeze the lowest blocks.

    The outputs of these blocks are computed only once for each image.
    """

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of frozen blocks in a client's model, or in the global model if `client` is None."""
        return 0


class SideInputs(Capability):
    """A base class for methods whose models have side inputs.

    A side input is a value that a model uses in addition to the pixels of an image, such as the features that a frozen
    network computes for the image.
    """

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the side inputs of the clients' models for the images of each set in `sets`.

        A side input is a value that a model uses in addition to the pixels of an image.

        Args:
            state: The server's state.
            reader: The reader of image batches, which can compute the outputs of frozen networks.
            sets: The image sets, keyed by names that the caller chooses.

        Returns:
            A dict from each name in `sets` to the side inputs for that set. These are tensors (n, ...) for the n
            images, keyed by the names of the side inputs.
        """
        return {name: {} for name in sets}

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """Return the features (n, ...) that a frozen network of the server computes for n images, keyed by name.

        By default, the server has no such network, and the result is empty.
        """
        return {}


class Stages(Capability):
    """A base class for methods that run in several stages.

    In each stage, clients hold, train or send different tensors. A method overrides both functions or none.
    """

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state of the server for each stage of a run of `rounds` rounds, keyed by the name of the stage.

        `fedsweep counts` uses these states to list the clients' parameter counts in each stage.
        """
        return {"": state}

    def stage_of(self, state: ServerState) -> str:
        """Return the name of the stage to which a state belongs, a key of the dict that `stage_states` returns."""
        return ""


class UnequalRanks:
    """A base class for methods whose clients can have LoRA adapters of unequal rank (`federation.ranks`)."""


class LoraRule(UnequalRanks):
    """A base class for methods with a rule of their own for aggregating LoRA's factors.

    `lora/residual` then compares the mean of the clients' products B A with the result of the method's `aggregate`.
    `aggregation.lora` and `aggregation.rule` must have their defaults, because the method replaces them.
    """

    folds: ClassVar[bool] = False
    """True if the server folds changes into the frozen weights (`fedsweep.models.lora.add_folds`)."""
    keeps_factors: ClassVar[bool] = True
    """False if factors A and B of different rounds do not correspond, so that FedDyn cannot remember gradients."""

    @property
    def changes_ranks(self) -> bool:
        """True if the method itself changes the clients' ranks, so that `federation.ranks` must not be `dynamic`."""
        return False


class OwnMetrics(Capability):
    """A base class for methods that report additional metrics in each round."""

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the metrics that the method adds in a run with these clients."""
        return []

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the additional metrics of a round, given the round's updates and the state after the round."""
        return {}


class ExportObstacle(Capability):
    """A base class for methods whose models have parts that exported files cannot contain."""

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the model's parts that cannot be exported, or None if all parts can be exported.

        Args:
            depths: The possible depths of clients, that is, the numbers of blocks that clients can hold.
            num_layers: The number of blocks of the backbone.
            of_client: Whether a client's own model is exported instead of the global model.
        """
        return None


class FrozenEncoders(FederatedMethod, FrozenBlocks):
    """A base class for methods that keep both encoders of CLIP frozen and encode each image only once."""

    needs: ClassVar[Needs] = Needs(lora=False, text=True)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return allocations in which each client holds all blocks and trains none of them."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the total number of blocks, all of which are frozen."""
        return len(state.layers)


def adapter_of(method: FederatedMethod, state: ServerState, client: ClientId | None) -> AdapterState:
    """Return the adapter of a client's model, or the global adapter if `client` is None."""
    return state.adapter if client is None else PersonalModels.of_method(method).client_adapter(state, client)


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
    """Return the logits (n, classes) of the n images of a set.

    Args:
        method: The method that predicts.
        state: The server's state.
        reader: The reader of image batches. The caller must have loaded the adapter of the client into the reader's
            model, or the global adapter if `client` is None.
        images: The image set.
        client: The client whose model predicts, or None for the global model.
        side_inputs: Tensors (n, ...) that the model uses in addition to the pixels, keyed by name. If None, the global
            model uses the method's `server_features`, and a client's model uses only the pixels.
        domain: The domain of the images, or None if the domain is unknown or is not the domain of any client.
    """
    owner = client.id if client else None
    steps = FrozenBlocks.of_method(method).num_frozen_blocks(state, owner)
    if client is None and side_inputs is None:
        side_inputs = SideInputs.of_method(method).server_features(reader, images)
    parts: Iterable[Images] = reader.batches(images)
    if steps or side_inputs:
        prefix = reader.prefix(state.layers, steps, adapter_of(method, state, owner)) if steps else None
        places = torch.split(torch.arange(len(images)), reader.batch_size)
        parts = (reader.batch(images, index, prefix, steps, side_inputs or {}) for index in places)
    logits = []
    for part in parts:
        logits.append(method.predict(state, reader.model, part, client is not None, domain))
        reader.listener.tested(len(logits[-1]))
    return torch.cat(logits)
