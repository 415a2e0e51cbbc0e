"""DepthFL: clients hold the first blocks; heads at several depths teach each other.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon. DepthFL: Depthwise Federated Learning for Heterogeneous Clients.
ICLR 2023. As FedRA compares with it: LoRA and heads are trained, with a head after every three blocks.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import permutations
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server, first_blocks
from fedsweep.methods.capabilities import ExportObstacle
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.local_training import Objective
from fedsweep.types import Client, ServerState


class DepthFL(FederatedMethod, ExportObstacle):
    """InclusiveFL's split with extra heads and mutual self-distillation (FedRA, Section 4.1, baseline 4)."""

    name: Literal["depthfl"] = "depthfl"
    needs: ClassVar[Needs] = Needs(head=True)
    heads: tuple[int, ...] = Field(
        (3, 6, 9), min_length=1, description="blocks after which a head sits (FedRA's released code: 4, 7, 10)"
    )
    own_head: Literal["by_depth", "shared"] = Field(
        "by_depth",
        description="a client's last head is that of its depth, or the model's own for all (FedRA's released code)",
    )
    ramp: float = Field(
        0.3, gt=0, description="share of the rounds until the distillation has its full weight (released code: 5)"
    )
    prediction: Literal["mean", "last"] = Field(
        "mean", description="mean of all heads' logits, or the last head alone (FedRA's released code)"
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless all heads sit between blocks, in ascending order."""
        if list(self.heads) != sorted(set(self.heads)) or not 1 <= min(self.heads) <= max(self.heads) < num_layers:
            raise ValueError(
                f"`method.heads` must ascend between 1 and {num_layers - 1}, the blocks before the last one, "
                f"but they are {list(self.heads)}"
            )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the heads that some client has: those of `heads` within the deepest, with by_depth one at each depth."""
        own = set(depths) - {model.num_layers} if self.own_head == "by_depth" else set()
        model.add_heads({*(head for head in self.heads if head <= max(depths)), *own}, seed)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the state of a server whose model, if heads are by depth, ends with the deepest client's own head."""
        blocks = max(server.depths) if self.own_head == "by_depth" else server.num_layers
        return ServerState(adapter=model.adapter(), layers=tuple(range(blocks)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return the first L_i blocks, with the heads within them and the client's own."""
        rows = first_blocks(cohort)
        return {
            client: replace(row, excluded_prefixes=self.absent_heads(state, len(row.held), server.num_layers))
            for client, row in rows.items()
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the heads' cross-entropies plus their mutual distances, whose weight grows over the rounds."""
        weight = ramp_up(round - 1, self.ramp * rounds)

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            depths, last = self._exits_in(model, len(walk))
            return mutual_loss(model.exits(images, walk, depths, last), labels, weight)

        return objective

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the mean of the logits of the server's heads, or those of the last one."""
        depths, last = self._exits_in(model, len(state.layers))
        if self.prediction == "last":
            depths = () if last else depths[-1:]
        return torch.stack(model.exits(images, state.layers, depths, last)).mean(0)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return the heads between blocks, unless the model's own is used alone."""
        within, last = self.exits_of(max(depths) if self.own_head == "by_depth" else num_layers, num_layers)
        heads = [head for head in within if head <= max(depths)]
        if last and (self.prediction == "last" or not heads):
            return None
        used = heads if self.prediction == "mean" else heads[-1:]
        return f"heads after {', '.join(map(str, used))} blocks"

    def exits_of(self, depth: int, num_layers: int) -> tuple[tuple[int, ...], bool]:
        """Return the depths of the heads of a client with `depth` blocks, and whether the model's own head is one."""
        within = tuple(head for head in self.heads if head <= depth)
        if self.own_head == "shared" or depth == num_layers:
            return within, True
        return tuple(sorted({*within, depth})), False

    def _exits_in(self, model: LayeredModel, depth: int) -> tuple[tuple[int, ...], bool]:
        """Return the result of `exits_of`, restricted to the heads that the model has."""
        within, last = self.exits_of(depth, model.num_layers)
        return tuple(head for head in within if str(head) in model.heads), last

    def absent_heads(self, state: ServerState, depth: int, num_layers: int) -> tuple[str, ...]:
        """Return the name prefixes of the heads that a client with `depth` blocks lacks."""
        depths, last = self.exits_of(depth, num_layers)
        present = {int(name.split(".")[1]) for name in state.adapter if name.startswith("heads.")}
        missing = tuple(f"heads.{head}." for head in sorted(present - set(depths)))
        return missing if last else (*missing, LayeredModel.head_prefix)


def mutual_loss(logits: Sequence[Tensor], labels: Tensor, weight: float) -> Tensor:
    """sum_i CE(z_i) + weight / (K - 1) sum_i sum_{k != i} KL(softmax(z_k) || softmax(z_i)), the teacher k held fixed.

    `logits` are K of shape (batch, classes), temperature 1 (DepthFL, Section 3.3).
    """
    loss = torch.stack([F.cross_entropy(one, labels) for one in logits]).sum()
    if len(logits) == 1 or not weight:
        return loss
    logs = [F.log_softmax(one, dim=1) for one in logits]
    distances = [
        F.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)
        for student, teacher in permutations(logs, 2)
    ]
    return loss + weight / (len(logits) - 1) * torch.stack(distances).sum()


def ramp_up(done: float, length: float) -> float:
    """exp(-5 (1 - t / T)^2) after t rounds, 1 from T on: the consistency ramp of the DepthFL authors' code."""
    return math.exp(-5.0 * (1.0 - min(done / length, 1.0)) ** 2)
