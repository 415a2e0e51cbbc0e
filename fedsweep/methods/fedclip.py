"""FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning.

Wang Lu, Xixu Hu, Jindong Wang, Xing Xie. IEEE Data Engineering Bulletin, 2023. An attention over the features of the
frozen image encoder is trained on the clients and averaged.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.local_training import Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class FedCLIP(FederatedMethod):
    """FedAvg on one adapter behind CLIP's image encoder; an image is encoded once for all rounds."""

    uses_lora: ClassVar = False
    needs_text: ClassVar = True

    name: Literal["fedclip"] = "fedclip"
    hidden: int | None = Field(None, gt=0, description="width between the adapter's two MLPs; null: the features'")

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """The adapter, as `image_adapter`."""
        cast(LayeredClip, model).add_image_adapter(self.hidden, seed)

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
        """The adapter."""
        return "an attention behind the image encoder"

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """All blocks."""
        return len(state.layers)
