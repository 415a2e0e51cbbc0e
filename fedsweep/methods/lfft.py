"""LFFT: the upper blocks are trained whole, the lower ones stay frozen, as FedMS compares with it (Section 4.1.2)."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import layer_of
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.local_training import Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class LFFT(FederatedMethod):
    """Layer-freeze fine-tuning: FedAvg on the blocks from some height on, and on what lies above them."""

    uses_lora: ClassVar = False

    name: Literal["lfft"] = "lfft"
    frozen: float = Field(0.5, ge=0, le=1, description="share of the blocks, from the lowest on, that stay as they are")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Some block is trained."""
        if self.first(num_layers) == num_layers:
            raise ValueError(
                f"`method.frozen` must leave one of the {num_layers} blocks to be trained, but it is {self.frozen:g}"
            )

    def first(self, num_layers: int) -> int:
        """The lowest block that is trained."""
        return round(self.frozen * num_layers)

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """The upper blocks of each encoder, and what lies above them: norms, projections, a head."""
        for name, parameter in model.named_parameters():
            if layer_of(name) is None:
                parameter.requires_grad_(name.startswith(model.top))
            else:
                place, depth = model.height(name)
                parameter.requires_grad_(place >= self.first(depth))

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """All blocks are run, the upper ones trained."""
        row = LayerAllocation(held=state.layers, trained=state.layers[self.first(server.num_layers) :])
        return {client.id: row for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy on the whole model."""
        return cross_entropy

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """FedAvg."""
        return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """The frozen blocks."""
        return self.first(len(state.layers))
