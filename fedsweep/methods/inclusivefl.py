"""InclusiveFL: clients hold the first blocks, and small models learn from the last blocks of larger models.

Ruixuan Liu, Fangzhao Wu, Chuhan Wu, Yanlin Wang, Lingjuan Lyu, Hong Chen, Xing Xie. No One Left Behind: Inclusive
Federated Learning over Heterogeneous Devices. KDD 2022. This module implements the variant that FedRA's paper uses as a
baseline: clients train LoRA adapters and the head instead of all weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from numpy.random import Generator
from pydantic import Field

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks, state_as
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import layer_of, moved_to
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import AdapterState, Client, ClientUpdate, ServerState


@dataclass(frozen=True)
class InclusiveState(ServerState):
    """The server's state, including the mean updates that momentum distillation uses in the next round.

    Attributes:
        steps: A dict from each depth to the change of the blocks' tensors in the latest round, averaged over the
            clients of this depth. These are the changes before momentum distillation. A depth without clients in this
            round has no entry.
    """

    steps: dict[int, AdapterState] = field(default_factory=dict)


class InclusiveFL(FederatedMethod):
    """A method in which each client holds the first blocks, and small models learn from larger models.

    The server averages each block over the clients that hold it. With momentum distillation, the last block of a
    smaller model also learns from the blocks that only the larger model has: the mean update of these blocks in the
    previous round is mixed into the last block's update (FedRA, Section 4.1, baseline 3).
    """

    name: Literal["inclusivefl"] = "inclusivefl"
    beta: float = Field(
        0.2,
        ge=0,
        le=1,
        description="weight of momentum distillation, which mixes the update of a client's last block with the "
        "previous round's mean update of the additional blocks of the next larger clients; 0: no distillation",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the option `beta` is above 0 and `aggregation.lora` is `product_svd`.

        A `beta` above 0 turns on momentum distillation, which uses earlier updates of LoRA's factors A and B, but
        `product_svd` replaces the factors in every round.
        """
        if self.beta and aggregation.lora == "product_svd":
            raise ValueError(
                "`method.beta` must be 0 if `aggregation.lora` is product_svd, which replaces LoRA's factors A and B "
                f"in every round, but it is {self.beta:g}"
            )

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> InclusiveState:
        """Return the initial state, which contains no earlier updates."""
        return InclusiveState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Apply momentum distillation to the clients' updates, and then average the updates.

        Momentum distillation changes only the update of a client's last block. The updates of the deepest clients stay
        unchanged. Each block is averaged over the clients that hold it.
        """
        state = state_as(InclusiveState, state)
        distilled = [self._distilled(update, state) for update in updates] if self.beta else updates
        mean = layerwise_mean(state.adapter, distilled, server.aggregation)
        steps = class_steps(state.adapter, updates, server) if self.beta else {}
        return replace(state, adapter=mean, steps=steps)

    def _distilled(self, update: ClientUpdate, state: InclusiveState) -> ClientUpdate:
        """Return the client's update after momentum distillation, which changes only the client's last block.

        If d is the client's change of this block, the new change is (1 - beta) d + beta m. The momentum m comes from
        the previous round: the clients of the next greater depth changed the blocks that this client lacks, and m is
        the mean of these changes. If the previous round had no deeper clients, the update is returned unchanged.
        """
        depth = len(update.allocation.held)
        larger = min((other for other in state.steps if other > depth), default=None)
        if larger is None:
            return update
        last, mixed = depth - 1, dict(update.adapter)
        momentum = mean_of_blocks(state.steps[larger], range(depth, larger), last)
        for name, tensor in update.adapter.items():
            if layer_of(name) == last:
                before = state.adapter[name]
                mixed[name] = before + (1 - self.beta) * (tensor - before) + self.beta * momentum[name]
        return replace(update, adapter=mixed)


def class_steps(before: AdapterState, updates: Sequence[ClientUpdate], server: Server) -> dict[int, AdapterState]:
    """Return the mean update of the blocks' tensors for each group of clients with the same depth.

    Args:
        before: The tensors before the round.
        updates: The updates of the clients.
        server: The server, whose aggregation settings define the weights of the clients.

    Returns:
        A dict from each depth to a dict of mean updates, keyed by tensor name. A mean update is the mean of the
        clients' tensors minus the tensor in `before`.
    """
    classes: dict[int, list[ClientUpdate]] = {}
    for update in updates:
        classes.setdefault(len(update.allocation.held), []).append(update)
    steps: dict[int, AdapterState] = {}
    for depth, members in sorted(classes.items()):
        mean = layerwise_mean(before, members, server.aggregation)
        blocks = [name for name in members[0].adapter if layer_of(name) is not None]
        steps[depth] = {name: mean[name] - before[name] for name in blocks}
    return steps


def mean_of_blocks(step: Mapping[str, torch.Tensor], blocks: range, place: int) -> AdapterState:
    """Return the mean of the corresponding tensors of several blocks.

    Args:
        step: The tensors of the blocks, keyed by name.
        blocks: The numbers of the blocks to average over.
        place: The number of the block whose tensor names are used as the keys of the result.
    """
    gathered: dict[str, list[torch.Tensor]] = {}
    for name, tensor in step.items():
        if layer_of(name) in blocks:
            gathered.setdefault(moved_to(name, place), []).append(tensor)
    return {name: torch.stack(tensors).mean(0) for name, tensors in gathered.items()}
