"""DepthFL: clients hold the first blocks, and heads at several depths learn from each other.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon. DepthFL: Depthwise Federated Learning for Heterogeneous Clients.
ICLR 2023. This is the variant that FedRA compares with: LoRA and heads are trained, with a head after every three
blocks.
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
    """First blocks for each client, heads at several depths and self-distillation (FedRA, Section 4.1, baseline 4)."""

    name: Literal["depthfl"] = "depthfl"
    needs: ClassVar[Needs] = Needs(head=True)
    heads: tuple[int, ...] = Field(
        (3, 6, 9),
        min_length=1,
        description="numbers of blocks after which a head follows (FedRA's code: 4, 7, 10)",
    )
    own_head: Literal["by_depth", "shared"] = Field(
        "by_depth",
        description="last head of a client. `by_depth`: a head at its own depth; `shared`: the model's own head for "
        "all clients (FedRA's released code)",
    )
    ramp: float = Field(
        0.3,
        gt=0,
        description="share of the rounds after which the distillation has its full weight (FedRA's released code: 5)",
    )
    prediction: Literal["mean", "last"] = Field(
        "mean",
        description="`mean`: the mean of the logits of all heads; `last`: the last head alone (FedRA's released code)",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless `heads` are in ascending order, each with blocks before and after it."""
        if list(self.heads) != sorted(set(self.heads)) or not 1 <= min(self.heads) <= max(self.heads) < num_layers:
            raise ValueError(
                f"`method.heads` must be ascending numbers of blocks between 1 and {num_layers - 1}, "
                f"but they are {list(self.heads)}"
            )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the heads that a client can have.

        These are the `heads` within the blocks of the deepest client. With `own_head` by_depth, there is also a head at
        each possible depth.
        """
        own = set(depths) - {model.num_layers} if self.own_head == "by_depth" else set()
        model.add_heads({*(head for head in self.heads if head <= max(depths)), *own}, seed)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state; with `own_head` by_depth, the server's model is as deep as the deepest client."""
        blocks = max(server.depths) if self.own_head == "by_depth" else server.num_layers
        return ServerState(adapter=model.adapter(), layers=tuple(range(blocks)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks, the heads within these blocks and the client's last head."""
        rows = first_blocks(cohort)
        return {
            client: replace(row, excluded_prefixes=self.absent_heads(state, len(row.held), server.num_layers))
            for client, row in rows.items()
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the heads' cross-entropies plus their mutual divergences, whose weight grows over the rounds."""
        weight = ramp_up(round - 1, self.ramp * rounds)

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            depths, last = self._exits_in(model, len(walk))
            return mutual_loss(model.exits(images, walk, depths, last), labels, weight)

        return objective

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the mean of the logits of the server's heads, or the logits of the last head."""
        depths, last = self._exits_in(model, len(state.layers))
        if self.prediction == "last":
            depths = () if last else depths[-1:]
        return torch.stack(model.exits(images, state.layers, depths, last)).mean(0)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Describe the heads between blocks, or return None if only the model's own head is used."""
        within, last = self.exits_of(max(depths) if self.own_head == "by_depth" else num_layers, num_layers)
        heads = [head for head in within if head <= max(depths)]
        if last and (self.prediction == "last" or not heads):
            return None
        used = heads if self.prediction == "mean" else heads[-1:]
        return f"heads after {', '.join(map(str, used))} blocks"

    def exits_of(self, depth: int, num_layers: int) -> tuple[tuple[int, ...], bool]:
        """Return the depths of a client's heads between blocks, and whether it has the model's own head too."""
        within = tuple(head for head in self.heads if head <= depth)
        if self.own_head == "shared" or depth == num_layers:
            return within, True
        return tuple(sorted({*within, depth})), False

    def _exits_in(self, model: LayeredModel, depth: int) -> tuple[tuple[int, ...], bool]:
        """Return the result of `exits_of`, without heads above the deepest client, which the model does not have."""
        within, last = self.exits_of(depth, model.num_layers)
        return tuple(head for head in within if str(head) in model.heads), last

    def absent_heads(self, state: ServerState, depth: int, num_layers: int) -> tuple[str, ...]:
        """Return the name prefixes of the heads that a client with `depth` blocks lacks."""
        depths, last = self.exits_of(depth, num_layers)
        present = {int(name.split(".")[1]) for name in state.adapter if name.startswith("heads.")}
        missing = tuple(f"heads.{head}." for head in sorted(present - set(depths)))
        return missing if last else (*missing, LayeredModel.head_prefix)


def mutual_loss(logits: Sequence[Tensor], labels: Tensor, weight: float) -> Tensor:
    """Return the cross-entropies of all heads plus their weighted mutual divergences (DepthFL, Section 3.3).

    sum_i CE(z_i) + weight / (K - 1) sum_i sum_{k != i} KL(softmax(z_k) || softmax(z_i)), at temperature 1. No gradient
    flows into the teachers z_k.

    Args:
        logits: The logits z_i of the K heads, each of shape (batch, classes).
        labels: The labels (batch,).
        weight: The weight of the divergences.
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
    """Return exp(-5 (1 - t / T)^2) for t = `done` and T = `length`, or 1 if t > T (the DepthFL authors' code)."""
    return math.exp(-5.0 * (1.0 - min(done / length, 1.0)) ** 2)
