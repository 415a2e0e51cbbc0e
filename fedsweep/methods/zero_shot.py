"""Zero-shot CLIP, without any training (Radford et al., Learning Transferable Visual Models, 2021)."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F

from fedsweep.methods.base import Allocations, Server
from fedsweep.methods.capabilities import FrozenEncoders, predicted
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import Client, ClientUpdate, ServerState


class ZeroShot(FrozenEncoders):
    """CLIP without training, as a baseline.

    In every round, each image is assigned to the class with the most similar prompt.
    """

    name: Literal["zero_shot"] = "zero_shot"

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Measure CLIP's loss on the clients' training images; the updates contain no tensors."""
        trainer.model.load_adapter(state.adapter)
        updates = []
        for client in cohort:
            logits = predicted(self, state, trainer.reader, client.train)
            loss = F.cross_entropy(logits, client.train.labels.to(logits.device)).item()
            updates.append(ClientUpdate(client.id, allocations[client.id], {}, len(client.train), {"loss": loss}))
        return updates

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return `state` unchanged, because the updates contain no tensors."""
        return state
