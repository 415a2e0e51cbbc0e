"""The methods FT, which fine-tunes the whole model, and LFFT, which fine-tunes only the upper part.

Neither method uses LoRA adapters. Both are baselines in the FedMS paper.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from numpy.random import Generator
from pydantic import Field

from fedsweep.data.image_sets import pool
from fedsweep.data.partition import POOL
from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.methods.capabilities import FrozenBlocks
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import layer_of
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.base_optimizers import FedAvg
from fedsweep.training.local_training import CohortTrainer, LocalTask, cross_entropy
from fedsweep.types import Client, ClientId, LayerAllocation, ServerState


class FT(FederatedMethod):
    """Vanilla fine-tuning: FedAvg on all parameters (FedMS, Section 4.1.2).

    Every client trains all blocks, and the hyperparameter `federation.depths` is ignored.
    """

    name: Literal["ft"] = "ft"
    synthetic_epochs: int = Field(
        0,
        ge=0,
        description="number of epochs in which the server trains on synthetic images after each aggregation (FedAG, "
        "Section 4.2); 0: no such training",
    )

    @property
    def needs(self) -> Needs:
        """The parts of a run that FT requires.

        FT requires no LoRA adapters. It requires synthetic images only if the server trains on them.
        """
        return Needs(lora=False, synthetic=self.synthetic_epochs > 0)

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Make all parameters of the backbone trainable."""
        model.backbone.requires_grad_(True)

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Train the server's model on the synthetic images.

        The option `synthetic_epochs` sets the number of epochs. If it is 0, return `state` unchanged. The loss is the
        cross-entropy. The server uses the clients' optimizer, without the corrections of FedProx or FedDyn.
        """
        if not self.synthetic_epochs:
            return state
        images = pool(list(server.synthetic.values()))
        steps = self.synthetic_epochs * math.ceil(len(images) / trainer.local.batch_size)
        alone = replace(trainer, local=trainer.local.model_copy(update={"steps": steps}), base=FedAvg())
        owner = Client("server", POOL, images, len(state.layers))
        (update,) = alone.fit([LocalTask(owner, state.adapter, LayerAllocation.of(state.layers), cross_entropy)])
        return replace(state, adapter=state.adapter | update.adapter)


class LFFT(FederatedMethod, FrozenBlocks):
    """Layer-freeze fine-tuning: FedAvg on the upper blocks and the layers after them (FedMS, Section 4.1.2).

    Every client runs all blocks, and the hyperparameter `federation.depths` is ignored.
    """

    name: Literal["lfft"] = "lfft"
    needs: ClassVar[Needs] = Needs(lora=False)
    frozen: float = Field(
        0.5, ge=0, le=1, description="share of the blocks that are frozen, counted from the lowest block"
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless at least one block is trained."""
        if self.first(num_layers) == num_layers:
            raise ValueError(
                f"`method.frozen` must leave at least one of {num_layers} blocks to train, but it is {self.frozen:g}"
            )

    def first(self, num_layers: int) -> int:
        """Return the index of the lowest trained block, which equals the number of frozen blocks."""
        return round(self.frozen * num_layers)

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Freeze all weights except those of the upper blocks and of the layers after the last block.

        The layers after the last block are norms, projections and the head. The option `frozen` is the share of the
        blocks that are frozen. In CLIP, this share applies to each encoder separately, because the two encoders can
        differ in depth.
        """
        for name, parameter in model.named_parameters():
            if layer_of(name) is None:
                parameter.requires_grad_(name.startswith(model.top))
            else:
                place, depth = model.height(name)
                parameter.requires_grad_(place >= self.first(depth))

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return allocations in which each client holds all blocks and trains only the upper blocks."""
        row = LayerAllocation(held=state.layers, trained=state.layers[self.first(server.num_layers) :])
        return {client.id: row for client in cohort}

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of frozen blocks at the bottom of the model."""
        return self.first(len(state.layers))
