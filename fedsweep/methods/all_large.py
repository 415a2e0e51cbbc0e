"""AllLarge, the ceiling of FedRA's tables: every client can hold the whole model; FedAvg on LoRA and head."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.local_training import Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class AllLarge(FederatedMethod):
    """Clients' capacities are ignored (FedRA, Section 4.1, baseline 1)."""

    name: Literal["all_large"] = "all_large"

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
