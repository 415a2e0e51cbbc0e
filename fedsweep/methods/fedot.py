"""FedOT: Offsite-Tuning in federated learning, a baseline of FedAG (Section 4.2).

Guangxuan Xiao, Ji Lin, Song Han. Offsite-Tuning: Transfer Learning without Full Model, 2023. Clients train both ends of
the model around an emulator, which is the middle of the model without some of its blocks. The server averages the ends
and inserts them into the full model.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator
from pydantic import Field

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import layer_of
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, LayerAllocation, ServerState


class FedOT(FederatedMethod):
    """FedAvg on all weights of the lowest and the topmost blocks; the depths of the clients are ignored."""

    name: Literal["fedot"] = "fedot"
    needs: ClassVar[Needs] = Needs(lora=False)
    bottom: int = Field(2, ge=0, description="number of lowest blocks, which are trained")
    top: int = Field(2, ge=0, description="number of topmost blocks, which are trained")
    kept: float = Field(0.5, gt=0, le=1, description="share of the blocks between them that clients hold, frozen")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless there is at least one block to train and one block between the two ends."""
        if not 0 < self.bottom + self.top < num_layers:
            raise ValueError(
                f"`method.bottom` and `method.top` together must be at least 1 and below the {num_layers} blocks, but "
                f"they are {self.bottom} and {self.top}"
            )

    def ends(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks that are trained."""
        return (*layers[: self.bottom], *layers[len(layers) - self.top :])

    def emulator(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the frozen blocks of the clients, spread evenly over the middle, with its first and last block.

        >>> FedOT(bottom=1, top=1, kept=0.5).emulator(range(12)), FedOT(bottom=1, top=1, kept=0.1).emulator(range(12))
        ((1, 3, 5, 8, 10), (1,))
        """
        middle = layers[self.bottom : len(layers) - self.top]
        count = max(1, round(self.kept * len(middle)))
        return tuple(middle[round(place)] for place in np.linspace(0, len(middle) - 1, count))

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Make the ends trainable, and also the head if there is one."""
        ends = self.ends(range(model.num_layers))
        for name, parameter in model.named_parameters():
            layer = layer_of(name)
            parameter.requires_grad_(layer in ends if layer is not None else name.startswith(model.head_prefix))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the ends, which are trained, and the emulator between them."""
        ends = self.ends(state.layers)
        row = LayerAllocation(held=tuple(sorted({*ends, *self.emulator(state.layers)})), trained=ends)
        return {client.id: row for client in cohort}
