"""Capabilities: optional base classes for methods with special features, such as personal models.

A method inherits from `FederatedMethod` and from its capabilities, whose functions it overrides. The functions of a
capability itself are the defaults for all other methods, so callers need not check whether a method has the capability:
`Messages.of_method(method).sent_names(...)`. `FrozenEncoders`, by contrast, is a base class for complete methods.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Self

import torch
from numpy.random import Generator
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.models import BackboneConfig
from fedsweep.models.base import Reader
from fedsweep.models.layered import Images, LayeredModel, Step
from fedsweep.models.names import names_within
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState


class Capability:
    """The base class of all capabilities, which are optional features of methods."""

    @classmethod
    def of_method(cls, method: FederatedMethod) -> Self:
        """Return `method` if it has this capability, or else an object with the default behaviour."""
        return method if isinstance(method, cls) else cls()


class OwnWeights(Capability):
    """A base class for methods that load weights besides the backbone's, or add tensors that must fit the backbone."""

    def fingerprint(self) -> str | None:
        """Return a string that identifies the method's own pretrained weights, or None if it has none.

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

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that a client with the allocation `row` receives before its training."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the tensor names among `names` that a client with the allocation `row` trains and sends back."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the tensor names among `names` that a client with the allocation `row` trains.

        Unlike `sent_names`, the result includes tensors that the client does not send back.
        """
        return self.sent_names(state, names, row)


class StandIns(Capability):
    """A base class for methods with stand-ins, small modules that a client runs in place of its missing blocks."""

    @property
    def has_stand_ins(self) -> bool:
        """True if these hyperparameters let clients run stand-ins, small modules in place of missing blocks."""
        return False

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the client's stand-ins, modules that can run in place of blocks, keyed by block number.

        A missing block without a stand-in is skipped in the forward pass.
        """
        return {}


class PersonalModels(Capability):
    """A base class for methods in which each client has a personal model in addition to the global model."""

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the adapter of a client's personal model; by default, the global adapter."""
        return state.adapter


class SeparateModels(PersonalModels):
    """A base class for methods whose clients have separate models, which are never averaged into a global model.

    The base optimizer FedDyn, `evaluation.metrics` and t-SNE need such an average, so these methods cannot be combined
    with any of the three.
    """

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors that the server sends to a client in a round; by default, the global adapter."""
        return state.adapter


class FrozenBlocks(Capability):
    """A base class for methods that freeze the lowest blocks, whose outputs are then computed only once per image."""

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return how many lowest blocks are frozen in a client's model, or in the global model if `client` is None."""
        return 0


class SideInputs(Capability):
    """A base class for methods whose models have side inputs, values for each image besides its pixels.

    One example is the features that a frozen network computes for the image.
    """

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the side inputs of the clients' models, values that they use for an image besides its pixels.

        Args:
            state: The server's state.
            reader: The reader of image batches, which can compute the outputs of frozen networks.
            sets: The image sets, each under a name that the caller chooses.

        Returns:
            For each name in `sets`, a dict from the names of the side inputs to tensors (n, ...) for the set's n
            images.
        """
        return {name: {} for name in sets}

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """Return the features that a frozen network of the server computes for images, by default none.

        The result is a dict from the names of the features to tensors (n, ...) for the n images.
        """
        return {}


class Stages(Capability):
    """A base class for methods with stages, which differ in the tensors that clients hold, train and send."""

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return one state for each stage of a run of `rounds` rounds, keyed by the stage's name.

        `fedsweep counts` lists the clients' parameter counts in each of these states.
        """
        return {"": state}


class OwnMetrics(Capability):
    """A base class for methods that report metrics of their own in each round."""

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the metrics that the method adds in a run with these clients."""
        return []

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the metrics that the method adds in a round, given the updates of the round and the state after it."""
        return {}


class ExportObstacle(Capability):
    """A base class for methods whose models have parts that exported files cannot contain."""

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the model's parts that cannot be exported, or None if all parts can be exported.

        Args:
            depths: All numbers of blocks that a client can hold.
            num_layers: The number of blocks of the backbone.
            of_client: Whether a client's own model is exported instead of the global model.
        """
        return None


class FrozenEncoders(FederatedMethod, FrozenBlocks):
    """A base class for methods that keep both encoders of CLIP frozen, so each image is encoded only once."""

    needs: ClassVar[Needs] = Needs(lora=False, text=True)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate all blocks to each client, which trains none of these blocks."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of all blocks, because all blocks are frozen."""
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
        reader: The reader of image batches. The adapter that predicts must already be loaded into the reader's model.
        images: The image set.
        client: The client whose model predicts, or None for the global model.
        side_inputs: Tensors (n, ...) that the model uses in addition to the pixels, keyed by name. If None, the side
            inputs of the global model are computed.
        domain: The domain of the images, or None if the domain is unknown or no client has it.
    """
    owner = client.id if client else None
    steps = FrozenBlocks.of_method(method).num_frozen_blocks(state, owner)
    if client is None and side_inputs is None:
        side_inputs = SideInputs.of_method(method).server_features(reader, images)
    parts: Iterable[Images] = (pixels for pixels, _ in images.batches(reader.batch_size))
    if steps or side_inputs:
        prefix = reader.prefix(state.layers, steps, adapter_of(method, state, owner)) if steps else None
        places = torch.split(torch.arange(len(images)), reader.batch_size)
        parts = (reader.batch(images, index, prefix, steps, side_inputs or {}) for index in places)
    return torch.cat([method.predict(state, reader.model, part, client is not None, domain) for part in parts])
