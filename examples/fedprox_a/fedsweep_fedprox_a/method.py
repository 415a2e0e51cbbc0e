"""FedRA with a proximal term on LoRA's factor A."""

from collections.abc import Collection, Sequence
from typing import Literal

from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Server
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.models.names import names_within
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation, ServerState


class FedProxA(FederatedMethod):
    """FedRA in which clients minimise F(w) + mu / 2 ||A - A_global||^2.

    F is the cross-entropy. A are the LoRA factors A of the blocks that the client trains, and A_global are their values
    at the beginning of the round. FedProx has the same term for all trained weights.
    """

    name: Literal["fedprox_a"] = "fedprox_a"
    mu: float = Field(0.1, ge=0, description="strength of the proximal term on LoRA's factors A")

    def draws_blocks(self, depths: Collection[int], num_layers: int) -> bool:
        """Return whether a client can have fewer blocks than the backbone; a client of full depth holds all blocks."""
        return min(depths) < num_layers

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Draw the blocks of each client at random, as FedRA does."""
        rows = {one.id: rng.choice(server.num_layers, size=one.capacity, replace=False) for one in cohort}
        return {client: LayerAllocation.of(blocks.tolist()) for client, blocks in rows.items()}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients of a cohort, each with the proximal term on its own blocks."""
        return trainer.fit(
            [
                LocalTask(one, state.adapter, allocations[one.id], self.proximal(state.adapter, allocations[one.id]))
                for one in cohort
            ]
        )

    def proximal(self, start: AdapterState, row: LayerAllocation) -> Objective:
        """Return the loss of a client that starts from the tensors `start` and trains the blocks of `row`."""
        if not self.mu:
            return cross_entropy
        names = [name for name in names_within(start, row.trained) if ".lora_A." in name]

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            current = model.trainable()
            distances = [(current[name] - start[name].to(current[name].device)).square().sum() for name in names]
            return cross_entropy(model, images, labels, walk) + self.mu / 2 * sum(distances)

        return objective
