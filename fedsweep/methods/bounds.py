"""The two bounds of FedRA (Section 4): AllLarge, where all clients hold all blocks, and AllSmall."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
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


class AllSmall(FederatedMethod):
    """The first min_i L_i blocks for everyone (FedRA, Section 4.1, baseline 2), or as many as `depth` says."""

    name: Literal["all_small"] = "all_small"
    depth: int | None = Field(None, gt=0, description="blocks of everyone; null for those of the smallest client")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """There must be as many blocks."""
        if self.depth is not None and self.depth > num_layers:
            raise ValueError(f"`method.depth` must be at most the {num_layers} blocks, but it is {self.depth}")

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """The server's own model is small as well."""
        depth = self.depth or min(client.capacity for client in clients)
        return ServerState(adapter=model.adapter(), layers=tuple(range(depth)))

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """The server's blocks for everyone."""
        return {client.id: LayerAllocation.of(state.layers) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy on the small model."""
        return cross_entropy

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """FedAvg on the small model; the other blocks' adapters stay as they were."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))
