"""FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning.

Wang Lu, Xixu Hu, Jindong Wang, Xing Xie. IEEE Data Engineering Bulletin, 2023. An attention over the features of the
frozen image encoder is trained on the clients and averaged.
"""

from collections.abc import Collection, Sequence
from typing import Literal, cast

import numpy as np
from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Needs, Server, without_training
from fedsweep.methods.capabilities import ExportObstacle, FrozenBlocks
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel
from fedsweep.types import Client, ClientId, LayerAllocation, ServerState


class FedCLIP(FederatedMethod, FrozenBlocks, ExportObstacle):
    """FedAvg on one adapter after CLIP's image encoder; an image is encoded once for all rounds."""

    name: Literal["fedclip"] = "fedclip"
    hidden: int | None = Field(None, gt=0, description="width between the adapter's two MLPs; null: the features'")

    @property
    def needs(self) -> Needs:
        """A text encoder, and no adapters."""
        return Needs(lora=False, text=True)

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the adapter, as `image_adapter`."""
        cast(LayeredClip, model).add_image_adapter(self.hidden, seed)

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """Return an allocation in which every client runs all blocks and trains none."""
        return without_training(state, cohort)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return the adapter."""
        return "an attention behind the image encoder"

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of all blocks."""
        return len(state.layers)
