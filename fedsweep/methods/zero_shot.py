"""Zero-shot CLIP: nothing is trained (Radford et al., Learning Transferable Visual Models, 2021)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch.nn.functional as F

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server, without_training
from fedsweep.methods.capabilities import FrozenBlocks, predicted
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class ZeroShot(FederatedMethod, FrozenBlocks):
    """Each image gets the class with the nearest prompt, in every round alike."""

    name: Literal["zero_shot"] = "zero_shot"

    @property
    def needs(self) -> Needs:
        """A text encoder, and no adapters."""
        return Needs(lora=False, text=True)

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """Return an allocation in which every client runs all blocks and trains none."""
        return without_training(state, cohort)

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Measure CLIP's loss on the clients' images; they send nothing."""
        trainer.model.load_adapter(state.adapter)
        updates = []
        for client in cohort:
            logits = predicted(self, state, trainer.reader, client.train)
            loss = F.cross_entropy(logits, client.train.labels.to(logits.device)).item()
            updates.append(ClientUpdate(client.id, allocations[client.id], {}, len(client.train), {"loss": loss}))
        return updates

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return the state as it is."""
        return state

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of all blocks."""
        return len(state.layers)
