"""FT: every parameter of the model is trained and averaged, as FedMS compares with it (Section 4.1.2)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsweep.data.partition.base import POOL, pool
from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.base_optimizers import FedAvg
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class FT(FederatedMethod):
    """Vanilla fine-tuning: FedAvg without adapters. Clients' capacities are ignored."""

    uses_lora: ClassVar = False

    name: Literal["ft"] = "ft"
    synthetic_epochs: int = Field(
        0, ge=0, description="epochs of the server on its synthetic images after each average (FedAG, Section 4.2)"
    )

    @property
    def needs_synthetic(self) -> bool:
        """Where the server trains too."""
        return self.synthetic_epochs > 0

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """All of the backbone is trained."""
        model.backbone.requires_grad_(True)

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """All L blocks for everyone."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy on the whole model."""
        return cross_entropy

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """FedAvg."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """The server descends its own cross-entropy, with the clients' optimizer and nothing to hold it."""
        if not self.synthetic_epochs:
            return state
        images = pool(list(server.synthetic.values()))
        steps = self.synthetic_epochs * math.ceil(len(images) / trainer.local.batch_size)
        alone = replace(trainer, local=trainer.local.model_copy(update={"steps": steps}), base=FedAvg(), memory={})
        owner = Client("server", POOL, images, len(state.layers))
        (update,) = alone.fit([LocalTask(owner, state.adapter, LayerAllocation.of(state.layers), cross_entropy)])
        return replace(state, adapter=state.adapter | update.adapter)
