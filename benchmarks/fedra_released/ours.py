"""fedsweep's side of the comparison with FedRA's released code: the model, the clients and the steps of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsweep.methods import FederatedMethod, Server
from fedsweep.methods.capabilities import predicted
from fedsweep.models import LayeredModel, LoraConfig, TimmBackbone, build_model
from fedsweep.models.base import Reader
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.base_optimizers import FedAvg
from fedsweep.training.evaluation import evaluate
from fedsweep.training.local_training import CohortTrainer, LocalConfig
from fedsweep.training.optimizers import SGDConfig
from fedsweep.types import Client, ClientId, ClientUpdate, Domain, ImageSet, LayerAllocation

from .setting import BATCH, CLASSES, DEPTHS, LAYERS, MEAN, RAMP, RATE, STD, TESTED, Batch, random_images


class Fedsweep:
    """fedsweep's side of the comparison with FedRA's released code: method, model, six clients and server state."""

    def __init__(
        self, method: FederatedMethod, dropout: float, images: Sequence[int], patch_embed: bool = True
    ) -> None:
        self.method = method
        backbone = TimmBackbone(model="vit_tiny_patch16_224", pretrained="none", mean=MEAN, std=STD)
        lora = LoraConfig(rank=8, alpha=8, dropout=dropout, patch_embed=patch_embed)
        self.model = build_model(backbone, lora, CLASSES, seed=0)
        method.prepare(self.model, set(DEPTHS), {str(one) for one in range(len(DEPTHS))}, seed=0)
        generator = torch.Generator().manual_seed(0)
        _draw_weights(self.model, generator)
        self.clients = [
            Client(str(number), str(number), random_images(generator, count), depth)
            for number, (depth, count) in enumerate(zip(DEPTHS, images, strict=True))
        ]
        self.test = random_images(generator, TESTED)
        self.server = Server(LAYERS, AggregationConfig(weights="uniform"), tuple(sorted(set(DEPTHS))))
        self.trainer = CohortTrainer(
            self.model,
            SGDConfig(lr=RATE, momentum=0.9, weight_decay=1e-5, clip_norm=10),
            FedAvg(),
            LocalConfig(batch_size=BATCH, steps="min_client"),
            seed=0,
            rounds=RAMP,
            fewest=min(images),
            reader=Reader(self.model, "", batch_size=BATCH),
        )
        self.state = method.init(self.model, self.clients, self.server)

    def weights(self) -> dict[str, Tensor]:
        """Return the frozen weights without the head, keyed by their names in timm."""
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in self.model.state_dict().items()}
        plain = {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in plain.items() if ".lora_" not in name and "head" not in name}

    def allocate(self, number: int) -> Mapping[ClientId, LayerAllocation]:
        """Return the blocks that the method allocates to each client in round `number`."""
        return self.method.allocate(self.state, self.clients, self.server, np.random.default_rng(number))

    def train(self, number: int, rows: Mapping[ClientId, LayerAllocation], cohort: list[Client]) -> list[ClientUpdate]:
        """Train the clients of a cohort in round `number` on their allocations `rows`, and return their updates."""
        return self.method.local_updates(self.state, cohort, rows, self.trainer.at(number + 1))

    def aggregate(self, updates: list[ClientUpdate]) -> None:
        """Aggregate the updates into the server's state."""
        self.state = self.method.aggregate(self.state, updates, self.server)

    def play(self, number: int, matrix: np.ndarray | None) -> list[list[Batch]]:
        """Run a round, and return the batches that each client trained on.

        Args:
            number: The number of the round.
            matrix: The allocation as 0 or 1, (clients, blocks). If it is None, the method draws the allocation.
        """
        rows = self.allocate(number)
        if matrix is not None:
            given = [LayerAllocation.of(np.flatnonzero(row).tolist()) for row in matrix]
            rows = dict(zip(rows, given, strict=True))
        seen: list[list[Batch]] = [[] for _ in self.clients]
        cohort = [
            replace(client, train=_Watched(client.train.images, client.train.labels, taken=taken))
            for client, taken in zip(self.clients, seen, strict=True)
        ]
        self.aggregate(self.train(number, rows, cohort))
        return seen

    def evaluate(self) -> None:
        """Evaluate the global model on the test images."""
        self.model.load_adapter(self.state.adapter)
        predict = partial(predicted, self.method, self.state, self.trainer.reader)
        evaluate(predict, [Domain("test", self.test, self.test)])


def _draw_weights(model: LayeredModel, generator: torch.Generator) -> None:
    """Draw large random weights, also for LoRA's B, so that every tensor changes visibly in a few steps."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ".lora_A." not in name:
            std = 0.02 if ".lora_B." in name or "embed" in name else 1.5 * parameter[0].numel() ** -0.5
            parameter.data.normal_(std=std, generator=generator)


@dataclass(frozen=True, kw_only=True)
class _Watched(ImageSet):
    """An image set that appends every batch that is read to the list `taken`."""

    taken: list[Batch]

    def take(self, index: Tensor) -> Batch:
        batch = super().take(index)
        self.taken.append(batch)
        return batch
