"""DepthFL: clients hold the first blocks, and classification heads at several depths teach each other.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon. DepthFL: Depthwise Federated Learning for Heterogeneous Clients.
ICLR 2023. This module implements the variant that FedRA's paper uses as a baseline: clients train LoRA adapters and
heads, and there is a head after every third block.
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
from fedsweep.methods.capabilities import ExportObstacle, UnequalRanks
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.local_training import Objective
from fedsweep.types import Client, ServerState


class DepthFL(FederatedMethod, UnequalRanks, ExportObstacle):
    """A method with classification heads at several depths, which teach each other. Clients hold the first blocks.

    Source: FedRA, Section 4.1, baseline 4.
    """

    name: Literal["depthfl"] = "depthfl"
    needs: ClassVar[Needs] = Needs(head=True)
    heads: tuple[int, ...] = Field(
        (3, 6, 9),
        min_length=1,
        description="numbers of blocks after which there is an additional head (FedRA's released code: 4, 7, 10)",
    )
    own_head: Literal["by_depth", "shared"] = Field(
        "by_depth",
        description="last head of a client. `by_depth`: the head at the client's own depth; `shared`: the backbone's "
        "head for all clients (FedRA's released code)",
    )
    ramp: float = Field(
        0.3,
        gt=0,
        description="share of the rounds after which the distillation between heads has its full weight (FedRA's "
        "released code: 5, which a run never reaches)",
    )
    prediction: Literal["mean", "last"] = Field(
        "mean",
        description="logits of the model. `mean`: the mean of the logits of all heads; `last`: the logits of the last "
        "head (FedRA's released code)",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the option `heads` is invalid.

        This option lists the blocks after which there is a head. The numbers must be strictly ascending and lie between
        1 and `num_layers` - 1.
        """
        if list(self.heads) != sorted(set(self.heads)) or not 1 <= min(self.heads) <= max(self.heads) < num_layers:
            raise ValueError(
                f"`method.heads` must be ascending numbers of blocks between 1 and {num_layers - 1}, "
                f"but they are {list(self.heads)}"
            )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add classification heads between the blocks of the model.

        For each number in the option `heads`, add a head after that many blocks, unless the deepest client has fewer
        blocks. With the option `own_head: by_depth`, also add a head at each depth that a client can have. At full
        depth, no head is added, because the backbone has its own head there.
        """
        own = set(depths) - {model.num_layers} if self.own_head == "by_depth" else set()
        model.add_heads({*(head for head in self.heads if head <= max(depths)), *own}, seed)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state.

        With the option `own_head: by_depth`, the server's model has as many blocks as the deepest client. With
        `own_head: shared`, the server's model has all blocks.
        """
        blocks = max(server.depths) if self.own_head == "by_depth" else server.num_layers
        return ServerState(adapter=model.adapter(), layers=tuple(range(blocks)))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate blocks and classification heads to the clients.

        Each client gets the first blocks, as many as fit on it. The function `exits_of` determines which heads it gets.
        """
        rows = first_blocks(cohort)
        return {
            client: replace(row, excluded_prefixes=self.absent_heads(state, len(row.held), server.num_layers))
            for client, row in rows.items()
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the loss that a client minimises in round `round` of `rounds` (see `mutual_loss`).

        The loss is the sum of two parts: the cross-entropies of the client's heads, and the divergences between the
        predictions of these heads. The weight of the divergences grows over the rounds.
        """
        weight = ramp_up(round - 1, self.ramp * rounds)

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            depths, last = self._exits_in(model, len(walk))
            return mutual_loss(model.exits(images, walk, depths, last), labels, weight)

        return objective

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the mean of the logits of all classification heads.

        With the option `prediction: last`, return the logits of the head after the last block instead.
        """
        depths, last = self._exits_in(model, len(state.layers))
        if self.prediction == "last":
            depths = () if last else depths[-1:]
        return torch.stack(model.exits(images, state.layers, depths, last)).mean(0)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the added classification heads that the model needs for predictions.

        Return None if predictions use only the head of the backbone.
        """
        within, last = self.exits_of(max(depths) if self.own_head == "by_depth" else num_layers, num_layers)
        heads = [head for head in within if head <= max(depths)]
        if last and (self.prediction == "last" or not heads):
            return None
        used = heads if self.prediction == "mean" else heads[-1:]
        return f"heads after {', '.join(map(str, used))} blocks"

    def exits_of(self, depth: int, num_layers: int) -> tuple[tuple[int, ...], bool]:
        """Return which classification heads a client with `depth` blocks has.

        Returns:
            A tuple of two values. The first value lists the heads that DepthFL adds to the model; the number k stands
            for the head after the first k blocks. The second value is true if the client also has the backbone's head.
        """
        within = tuple(head for head in self.heads if head <= depth)
        if self.own_head == "shared" or depth == num_layers:
            return within, True
        return tuple(sorted({*within, depth})), False

    def _exits_in(self, model: LayeredModel, depth: int) -> tuple[tuple[int, ...], bool]:
        """Return the heads of a client with `depth` blocks, as `exits_of` does, but omit heads that `model` lacks."""
        within, last = self.exits_of(depth, model.num_layers)
        return tuple(head for head in within if str(head) in model.heads), last

    def absent_heads(self, state: ServerState, depth: int, num_layers: int) -> tuple[str, ...]:
        """Return the tensor-name prefixes of the classification heads that a client with `depth` blocks lacks."""
        depths, last = self.exits_of(depth, num_layers)
        present = {int(name.split(".")[1]) for name in state.adapter if name.startswith("heads.")}
        missing = tuple(f"heads.{head}." for head in sorted(present - set(depths)))
        return missing if last else (*missing, LayeredModel.head_prefix)


def mutual_loss(logits: Sequence[Tensor], labels: Tensor, weight: float) -> Tensor:
    """Return the loss of heads that learn from the labels and from each other (DepthFL, Section 3.3).

    The loss is the sum of the heads' cross-entropies plus `weight` / (K - 1) times the sum of the divergences
    KL(softmax(z_k) || softmax(z_i)) over all ordered pairs (k, i) of different heads. In each divergence, head i learns
    from head k: the gradient flows only into head i.

    Args:
        logits: The logits z_1 to z_K of the K heads, each of shape (batch, classes).
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
    """Return the weight of the divergences between heads after `done` rounds.

    The weight rises over the first `length` rounds and is 1 afterwards. With t = `done` and T = `length`, it is
    exp(-5 (1 - t / T)^2) for t < T, as in the code of DepthFL's authors.
    """
    return math.exp(-5.0 * (1.0 - min(done / length, 1.0)) ** 2)
