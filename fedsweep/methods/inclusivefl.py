"""InclusiveFL: clients hold the first blocks, and small models learn from the last blocks of larger models.

Ruixuan Liu, Fangzhao Wu, Chuhan Wu, Yanlin Wang, Lingjuan Lyu, Hong Chen, Xing Xie. No One Left Behind: Inclusive
Federated Learning over Heterogeneous Devices. KDD 2022. This is the variant that FedRA compares with: clients train
LoRA and head, not all weights.
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
    """The server's state with the last updates of the size classes; a size class is all clients of one depth.

    `steps` contains, by depth, the mean update of the class's blocks in the last round, before momentum is added. It
    has no entry for a class without clients in that round; the next larger class is then used instead.
    """

    steps: dict[int, AdapterState] = field(default_factory=dict)


class InclusiveFL(FederatedMethod):
    """First blocks for each client, layer-wise averages and momentum distillation (FedRA, Section 4.1, baseline 3)."""

    name: Literal["inclusivefl"] = "inclusivefl"
    beta: float = Field(
        0.2,
        ge=0,
        le=1,
        description="momentum distillation: share of the next deeper clients' previous update in the update of a "
        "client's last block; 0: none",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if momentum is combined with product_svd, which replaces the remembered factors A and B."""
        if self.beta and aggregation.lora == "product_svd":
            raise ValueError(
                "`method.beta` must be 0 with `aggregation.lora` product_svd, which replaces the factors A and B whose "
                f"updates InclusiveFL remembers, but it is {self.beta:g}"
            )

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> InclusiveState:
        """Return the initial state, without remembered updates."""
        return InclusiveState(adapter=model.adapter(), layers=tuple(range(server.num_layers)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks."""
        return first_blocks(cohort)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Add momentum to the last block of each smaller class, then average layer by layer."""
        state = state_as(InclusiveState, state)
        distilled = [self._distilled(update, state) for update in updates] if self.beta else updates
        mean = layerwise_mean(state.adapter, distilled, server.aggregation)
        steps = class_steps(state.adapter, updates, server) if self.beta else {}
        return replace(state, adapter=mean, steps=steps)

    def _distilled(self, update: ClientUpdate, state: InclusiveState) -> ClientUpdate:
        """Replace the update d of the client's last block by d' = (1 - beta) d + beta m.

        m is the mean update of the next larger class's additional blocks in the last round.
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
    """Return the mean update of the blocks over the clients of each depth, by depth."""
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
    """Return the mean of corresponding tensors over `blocks`, under their names in block number `place`."""
    gathered: dict[str, list[torch.Tensor]] = {}
    for name, tensor in step.items():
        if layer_of(name) in blocks:
            gathered.setdefault(moved_to(name, place), []).append(tensor)
    return {name: torch.stack(tensors).mean(0) for name, tensors in gathered.items()}
