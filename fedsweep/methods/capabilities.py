"""Capabilities: optional base classes of methods, for example for personal models or metrics of their own.

A method inherits its capabilities in addition to `FederatedMethod` and overrides their functions. Each class implements
the behaviour of methods without the capability, so the caller needs no case distinction:
`Messages.of_method(method).sent_names(...)`. `FrozenEncoders` is a base class of complete methods.
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
    """The base class of all capabilities."""

    @classmethod
    def of_method(cls, method: FederatedMethod) -> Self:
        """Return `method` if it has this capability, or else an object with the default behaviour."""
        return method if isinstance(method, cls) else cls()


class OwnWeights(Capability):
    """Pretrained weights in addition to the backbone, or new tensors that must fit the backbone."""

    def fingerprint(self) -> str | None:
        """Return a string that identifies the weights, or None without any; raise UserError if they are missing."""
        return None

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Load the weights in the same way as a run with this backbone and these classes.

        Raises:
            UserError: The weights are missing, or they do not fit the backbone or the classes.
        """


class Messages(Capability):
    """Messages that differ from the default.

    By default, a client receives the tensors of the blocks that it holds, and sends those of the blocks that it trains.
    """

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client at the beginning of a round."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of the tensor names `names` that a client trains and sends back."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of the tensor names `names` that a client trains, whether it sends them or not."""
        return self.sent_names(state, names, row)


class StandIns(Capability):
    """Stand-ins: modules that a client runs in place of blocks that it does not hold."""

    @property
    def has_stand_ins(self) -> bool:
        """True if clients have stand-ins with this configuration."""
        return False

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the client's stand-ins by block number. Missing blocks without a stand-in are skipped."""
        return {}


class PersonalModels(Capability):
    """Personal models: each client has a model of its own, in addition to the global model."""

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the adapter of a client's personal model."""
        return state.adapter


class SeparateModels(PersonalModels):
    """Personal models that are never averaged into a global model.

    FedDyn, `evaluation.metrics` and t-SNE need such an average, so they are rejected.
    """

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors with which a client starts a round."""
        return state.adapter


class FrozenBlocks(Capability):
    """Frozen lowest blocks, whose outputs are computed once and then reused."""

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of frozen lowest blocks in the client's model (in the global model if `client` is None)."""
        return 0


class SideInputs(Capability):
    """Side inputs: values for each image that a model uses for its predictions in addition to the pixels."""

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the side inputs of the clients' models: for each image set, tensors (n, ...) by the input's name."""
        return {name: {} for name in sets}

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """Return the features that the server's frozen model computes for `images`: tensors (n, ...) by name."""
        return {}


class Stages(Capability):
    """Stages of a run, which differ in the tensors that clients hold, train and send."""

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state of each stage of a run of `rounds` rounds, by the stage's name, for parameter counts."""
        return {"": state}


class OwnMetrics(Capability):
    """Additional metrics that a method reports."""

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of these metrics, which are known before a run."""
        return []

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the metrics of a round, computed from its updates and from the state after it."""
        return {}


class ExportObstacle(Capability):
    """Parts of a model that exported files cannot contain."""

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Describe the parts of the model that cannot be exported, or return None if all parts can.

        Args:
            depths: All depths that clients can have.
            num_layers: The number of blocks of the backbone.
            of_client: Whether a client's own model is exported, instead of the global model.
        """
        return None


class FrozenEncoders(FederatedMethod, FrozenBlocks):
    """A base class of methods that keep CLIP's encoders frozen: an image is encoded once for all rounds."""

    needs: ClassVar[Needs] = Needs(lora=False, text=True)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate all blocks to each client, none of them to be trained."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of blocks: all of them are frozen."""
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
    """Return the logits (n, classes) of an image set.

    The client's model predicts, or the global model if `client` is None. Its adapter must already be loaded into the
    reader's model.
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
