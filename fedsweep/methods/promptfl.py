"""PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models.

Tao Guo, Song Guo, Junxiao Wang, Xueyang Tang, Wenchao Xu. IEEE Transactions on Mobile Computing, 2023. Context vectors
before the classes' names are learned as in CoOp, and averaged; both encoders of CLIP stay frozen.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models import BackboneConfig
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.local_training import Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class PromptFL(FederatedMethod):
    """FedAvg on context vectors shared by all classes; an image is encoded once for all rounds."""

    uses_lora: ClassVar = False
    needs_text: ClassVar = True

    name: Literal["promptfl"] = "promptfl"
    context: int = Field(16, gt=0, description="learned vectors before a class's name, in place of the prompt's words")

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """There is room for the vectors beside the longest name."""
        _check_context(self.context, backbone, tuple(class_names), backbone.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """The vectors, as `prompt.context` (context, width of the text encoder)."""
        cast(LayeredClip, model).add_context(self.context, seed)

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """All blocks are run, none is trained."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy."""
        return cross_entropy

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """FedAvg."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """The vectors: no CLIPModel takes them."""
        return "learned vectors before the classes' names"

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """All blocks."""
        return len(state.layers)


@lru_cache(maxsize=16)  # asked for every arm and seed of a search space
def _check_context(count: int, backbone: BackboneConfig, class_names: tuple[str, ...], _fingerprint: str) -> None:
    model = cast(LayeredClip, backbone.build(len(class_names), 0, class_names))
    try:
        model.add_context(count, 0)
    except UserError as error:
        raise UserError(f"`method.context` {count} is too large: {error}") from None
