"""Capabilities of some methods, which inherit them besides `FederatedMethod` and override their verbs.

Each class holds the answers of a method without the capability, so that the engine asks every method alike:
`Messages.of_method(method).sent_names(...)`. `FrozenEncoders` is a base of whole methods.
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
    """The base of the capabilities."""

    @classmethod
    def of_method(cls, method: FederatedMethod) -> Self:
        """Return the method if it has this capability, or else an object with the default answers."""
        return method if isinstance(method, cls) else cls()


class OwnWeights(Capability):
    """Pretrained weights besides the backbone's, or tensors that must fit the backbone's weights."""

    def fingerprint(self) -> str | None:
        """Return what pins the content of the own weights, None for none; raise UserError if they are missing."""
        return None

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Load them as a run on this backbone and these classes will; raise UserError unless they are there and fit."""


class Messages(Capability):
    """Other tensors on the wire than those of the blocks that a client holds and trains."""

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the server's tensors that a client receives at the beginning of a round."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return those of an adapter's `names` that a client trains and sends back."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return those of an adapter's `names` that a client trains, sent or not."""
        return self.sent_names(state, names, row)


class StandIns(Capability):
    """Steps that a client walks in place of the blocks that it does not hold."""

    @property
    def has_stand_ins(self) -> bool:
        """True if a client of this configuration has any."""
        return False

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the client's stand-ins by block. It skips a missing block without one."""
        return {}


class PersonalModels(Capability):
    """Clients with models of their own besides the global one."""

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the adapter of a client's own model."""
        return state.adapter


class SeparateModels(PersonalModels):
    """Personal models of which no global mean is formed: there is nothing to correct or to compare them with."""

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors from which a client begins a round."""
        return state.adapter


class FrozenBlocks(Capability):
    """First blocks that nobody trains, so that evaluation need not run them again."""

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of frozen first blocks of the client's model, or of the global one without a client."""
        return 0


class SideInputs(Capability):
    """Values of each image that a model predicts with besides its pixels."""

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the side inputs of the clients' models: for each image set, tensors (n, ...) by name."""
        return {name: {} for name in sets}

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """Return the features of images by the server's own frozen model: tensors (n, ...) by name."""
        return {}


class Stages(Capability):
    """Stages of a run in which clients hold, train and send different tensors."""

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state of each stage of a run of `rounds` rounds, by the stage's name; for counting parameters."""
        return {"": state}


class OwnMetrics(Capability):
    """Metrics that only this method reports."""

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return their names, known before a run."""
        return []

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Measure a round, from the state after it and its updates."""
        return {}


class ExportObstacle(Capability):
    """Parts of the predicting model for which an export has no place."""

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return these parts of the global or a client's model in words, or None; `depths` are all of the clients'."""
        return None


class FrozenEncoders(FederatedMethod, FrozenBlocks):
    """The base of methods that train nothing within CLIP's encoders: an image is encoded once for all rounds."""

    needs: ClassVar[Needs] = Needs(lora=False, text=True)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return all blocks, of which none is trained."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of all blocks."""
        return len(state.layers)


def adapter_of(method: FederatedMethod, state: ServerState, client: ClientId | None) -> AdapterState:
    """Return the adapter of a client's model, or the global one without a client."""
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
    """Return logits (n, classes) of an image set by the client's or global model, which the reader's model holds."""
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
