"""Zero-shot CLIP: nothing is trained (Radford et al., Learning Transferable Visual Models, 2021)."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch.nn.functional as F

from fedsweep.methods.base import Allocations, FederatedMethod, Server, predicted
from fedsweep.training.local_training import CohortTrainer, Objective, cross_entropy
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState


class ZeroShot(FederatedMethod):
    """An image goes to the class whose prompt is nearest, in each round alike."""

    uses_lora: ClassVar = False
    needs_text: ClassVar = True

    name: Literal["zero_shot"] = "zero_shot"

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """All blocks are run, none is trained."""
        return {client.id: LayerAllocation(held=state.layers, trained=()) for client in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy, which is measured and not descended."""
        return cross_entropy

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Clients measure CLIP's loss on their images, and send nothing."""
        trainer.model.load_adapter(state.adapter)
        updates = []
        for client in cohort:
            logits = predicted(self, state, trainer.reader, client.train)
            loss = F.cross_entropy(logits, client.train.labels.to(logits.device)).item()
            updates.append(ClientUpdate(client.id, allocations[client.id], {}, len(client.train), {"loss": loss}))
        return updates

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Nothing changes."""
        return state

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """All blocks."""
        return len(state.layers)
