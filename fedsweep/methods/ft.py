"""FT: every parameter of the model is trained and averaged, as FedMS compares with it (Section 4.1.2)."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from fedsweep.aggregation import layerwise_mean
from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.training import Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class FT(FederatedMethod):
    """Vanilla fine-tuning: FedAvg without adapters. Clients' capacities are ignored."""

    uses_lora: ClassVar = False

    name: Literal["ft"] = "ft"

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
