"""AllSmall, the floor of FedRA's tables: everyone, the server too, has only as many blocks as the smallest client."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from fedsweep.aggregation import layerwise_mean
from fedsweep.methods.base import Allocations, FederatedMethod, Server, same_start
from fedsweep.models.layered import LayeredModel
from fedsweep.training import CohortTrainer, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class AllSmall(FederatedMethod):
    """The first min_i L_i blocks for everyone (FedRA, Section 4.1, baseline 2)."""

    name: Literal["all_small"] = "all_small"

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """The server's own model is small as well."""
        depth = min(client.capacity for client in clients)
        return ServerState(adapter=model.adapter(), layers=tuple(range(depth)))

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """The server's blocks for everyone."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Cross-entropy on the small model."""
        return trainer.fit(same_start(state.adapter, cohort, allocations, cross_entropy))

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """FedAvg on the small model; the other blocks' adapters stay as they were."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))
