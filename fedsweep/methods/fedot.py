"""FedOT: Offsite-Tuning in federated learning, a baseline of FedAG (Section 4.2).

Guangxuan Xiao, Ji Lin, Song Han. Offsite-Tuning: Transfer Learning without Full Model, 2023. Clients train the lowest
and the topmost blocks of the model. Between these two ends, they run a frozen emulator, which consists of only some of
the middle blocks. The server averages the ends and inserts them into the full model.
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
    """FedAvg on all weights of the lowest and the topmost blocks, and on the head.

    Every client trains the same blocks and runs the same subset of the frozen blocks between them. The hyperparameter
    `federation.depths` is ignored.
    """

    name: Literal["fedot"] = "fedot"
    needs: ClassVar[Needs] = Needs(lora=False)
    bottom: int = Field(2, ge=0, description="number of blocks that are trained at the lower end of the model")
    top: int = Field(2, ge=0, description="number of blocks that are trained at the upper end of the model")
    kept: float = Field(
        0.5, gt=0, le=1, description="share of the blocks between the two ends that clients hold as frozen blocks"
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless at least one block is trained and at least one block is frozen.

        The lowest and the topmost blocks are trained, and the blocks between them are frozen.
        """
        if not 0 < self.bottom + self.top < num_layers:
            raise ValueError(
                f"`method.bottom` and `method.top` must sum to at least 1 and to less than {num_layers}, the number of "
                f"blocks, but they are {self.bottom} and {self.top}"
            )

    def ends(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the trained blocks: the lowest and the topmost blocks of `layers`.

        The options `bottom` and `top` set how many blocks are trained at each end.
        """
        return (*layers[: self.bottom], *layers[len(layers) - self.top :])

    def emulator(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the frozen blocks that clients run.

        The frozen blocks lie between the trained blocks at the two ends of the model. The option `kept` is the share of
        the frozen blocks that clients run. These blocks are evenly spaced and include the first and the last frozen
        block. If clients run only one frozen block, it is the first one.

        >>> FedOT(bottom=1, top=1, kept=0.5).emulator(range(12)), FedOT(bottom=1, top=1, kept=0.1).emulator(range(12))
        ((1, 3, 5, 8, 10), (1,))
        """
        middle = layers[self.bottom : len(layers) - self.top]
        count = max(1, round(self.kept * len(middle)))
        return tuple(middle[round(place)] for place in np.linspace(0, len(middle) - 1, count))

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Freeze all weights except those of the lowest blocks, the topmost blocks and the head, if there is one."""
        ends = self.ends(range(model.num_layers))
        for name, parameter in model.named_parameters():
            layer = layer_of(name)
            parameter.requires_grad_(layer in ends if layer is not None else name.startswith(model.head_prefix))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return allocations in which each client trains the lowest and the topmost blocks.

        In addition, each client holds some of the frozen blocks between them (see `emulator`).
        """
        ends = self.ends(state.layers)
        row = LayerAllocation(held=tuple(sorted({*ends, *self.emulator(state.layers)})), trained=ends)
        return {client.id: row for client in cohort}
