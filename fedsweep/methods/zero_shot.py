"""Zero-shot CLIP, without any training.

Radford et al. Learning Transferable Visual Models From Natural Language Supervision, 2021.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F

from fedsweep.methods.base import Allocations, Server
from fedsweep.methods.capabilities import FrozenEncoders, predicted
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import Client, ClientUpdate, ServerState


class ZeroShot(FrozenEncoders):
    """CLIP without training, as a baseline.

    Each image is assigned to the class whose prompt is most similar to the image.
    """

    name: Literal["zero_shot"] = "zero_shot"

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Measure CLIP's loss on the training images of each client, and return one update per client.

        An update contains the loss, but no tensors. If the trainer only counts costs, there are no updates.
        """
        if trainer.counts_only:
            return []
        trainer.model.load_adapter(state.adapter)
        updates = []
        for client in cohort:
            logits = predicted(self, state, trainer.reader, client.train)
            loss = F.cross_entropy(logits, client.train.labels.to(logits.device)).item()
            updates.append(ClientUpdate(client.id, allocations[client.id], {}, len(client.train), {"loss": loss}))
        return updates

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Return `state` unchanged; the updates contain no tensors to average."""
        return state
