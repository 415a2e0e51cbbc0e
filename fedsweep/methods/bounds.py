"""The two bounds of FedRA (Section 4): AllLarge, where all clients hold all blocks, and AllSmall."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, ServerState


class AllLarge(FederatedMethod):
    """FedAvg on all blocks: clients' capacities are ignored (FedRA, Section 4.1, baseline 1)."""

    name: Literal["all_large"] = "all_large"


class AllSmall(FederatedMethod):
    """FedAvg on a small model, the first min_i L_i blocks or `depth` (FedRA, Section 4.1, baseline 2).

    The adapters of the other blocks stay as they were.
    """

    name: Literal["all_small"] = "all_small"
    depth: int | None = Field(None, gt=0, description="blocks of everyone; null for those of the smallest client")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless there are `depth` blocks."""
        if self.depth is not None and self.depth > num_layers:
            raise ValueError(f"`method.depth` must be at most the {num_layers} blocks, but it is {self.depth}")

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return a state whose own model is small as well."""
        depth = self.depth or min(client.capacity for client in clients)
        return ServerState(adapter=model.adapter(), layers=tuple(range(depth)))
