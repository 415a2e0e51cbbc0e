"""The methods AllLarge and AllSmall, in which all clients train models of the same depth.

They are the upper and the lower bound in FedRA's experiments.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.methods.capabilities import UnequalRanks
from fedsweep.models.layered import LayeredModel
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, ServerState


class AllLarge(FederatedMethod, UnequalRanks):
    """FedAvg in which every client trains all blocks (FedRA, Section 4.1, baseline 1).

    The hyperparameter `federation.depths` is ignored.
    """

    name: Literal["all_large"] = "all_large"


class AllSmall(FederatedMethod, UnequalRanks):
    """FedAvg on a small model that consists of the first blocks of the backbone (FedRA, Section 4.1, baseline 2).

    The option `depth` sets the number of these blocks. The default is the number of blocks that fit on the smallest
    client. The other blocks are neither trained nor used for predictions.
    """

    name: Literal["all_small"] = "all_small"
    depth: int | None = Field(
        None,
        gt=0,
        description="number of blocks of the small model; `null`: the number that fits on the smallest client",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the option `depth` exceeds the number of blocks of the backbone."""
        if self.depth is not None and self.depth > num_layers:
            raise ValueError(
                f"`method.depth` must be at most {num_layers}, the number of blocks, but it is {self.depth}"
            )

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state, in which the server's model has only the first `depth` blocks."""
        depth = self.depth or min(client.capacity for client in clients)
        return ServerState(adapter=model.adapter(), layers=tuple(range(depth)))
