"""AllLarge and AllSmall, the upper and the lower bound in FedRA's experiments (Section 4)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, ServerState


class AllLarge(FederatedMethod):
    """FedAvg on all blocks; the depths of the clients are ignored (FedRA, Section 4.1, baseline 1)."""

    name: Literal["all_large"] = "all_large"


class AllSmall(FederatedMethod):
    """FedAvg on a small model, which has only the first blocks (FedRA, Section 4.1, baseline 2).

    The number of blocks is `depth`, by default the smallest depth of a client, min_i L_i. The other blocks are neither
    trained nor used for predictions.
    """

    name: Literal["all_small"] = "all_small"
    depth: int | None = Field(
        None, gt=0, description="number of blocks of the small model; `null`: as many as the smallest client holds"
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if `depth` exceeds the number of blocks."""
        if self.depth is not None and self.depth > num_layers:
            raise ValueError(
                f"`method.depth` must be at most {num_layers}, the number of blocks, but it is {self.depth}"
            )

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state, in which the server's model is the small model too."""
        depth = self.depth or min(client.capacity for client in clients)
        return ServerState(adapter=model.adapter(), layers=tuple(range(depth)))
