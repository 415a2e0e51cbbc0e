"""Local training of a cohort on one resident model: tensors in, tensors out, no copy of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.config import Config
from fedsweep.models.layered import LayeredModel, names_within
from fedsweep.seeding import derived_seed, stream
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation

Objective = Callable[[LayeredModel, Tensor, Tensor, LayerAllocation], Tensor]
"""(model, uint8 images (batch, 3, h, w), labels (batch,), allocation) to a scalar loss."""


class OptimizerConfig(Config):
    """SGD with momentum; its state is made afresh for each local session."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum, without dampening")
    weight_decay: float = Field(1e-5, ge=0, description="L2 penalty added to the gradient")
    clip_norm: float | None = Field(10.0, gt=0, description="largest norm of the whole gradient; null for none")


class LocalConfig(Config):
    """How much work a client does in a round."""

    batch_size: int = Field(128, gt=0, description="images per step")
    steps: Literal["epoch", "min_client"] | Annotated[int, Field(gt=0)] = Field(
        "epoch", description="one epoch, the epoch of the cohort's smallest client, or a number of steps"
    )


@dataclass(frozen=True)
class LocalTask:
    """What one client is asked to do: train `allocation.trained` from `start` on its own images."""

    client: Client
    start: AdapterState
    allocation: LayerAllocation
    objective: Objective


class DivergenceError(RuntimeError):
    """A client's loss stopped being a number."""


def cross_entropy(model: LayeredModel, images: Tensor, labels: Tensor, allocation: LayerAllocation) -> Tensor:
    """The plain objective of FedAvg and FedRA, on the blocks that the client holds."""
    return F.cross_entropy(model(images, allocation.held), labels)


@dataclass(frozen=True)
class CohortTrainer:
    """Runs the tasks of a cohort. A method hands it all tasks of a round at once and need not know how they run."""

    model: LayeredModel
    optimizer: OptimizerConfig
    local: LocalConfig
    seed: int
    round: int = 0

    def at(self, round: int) -> CohortTrainer:
        """The same trainer in another round: batch order and dropout differ."""
        return replace(self, round=round)

    def fit(self, tasks: Sequence[LocalTask]) -> list[ClientUpdate]:
        """Train every task from its own start; results in the order of the tasks."""
        epochs = [math.ceil(len(task.client.train) / self.local.batch_size) for task in tasks]
        updates = []
        for task, epoch in zip(tasks, epochs, strict=True):
            match self.local.steps:
                case "epoch":
                    steps = epoch
                case "min_client":
                    steps = min(epochs)
                case int(steps):
                    pass
            updates.append(self._fit_one(task, steps))
        return updates

    def _fit_one(self, task: LocalTask, steps: int) -> ClientUpdate:
        model, client = self.model, task.client
        model.load_adapter(task.start)
        parameters = model.trainable()
        names = names_within(parameters, task.allocation.trained)
        trained = [parameters[name] for name in names]
        sgd = _SGD(self.optimizer, trained)
        total = torch.zeros((), device=model.mean.device)
        order = batches(
            len(client.train), self.local.batch_size, steps, stream(self.seed, "batches", self.round, client.id)
        )
        devices = [model.mean.device] if model.mean.is_cuda else []
        model.train()
        # Dropout is the one consumer of torch's global generator: give it a stream of its own and put the old one back.
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derived_seed(self.seed, "dropout", self.round, client.id))
            for batch in order:
                images, labels = client.train.take(torch.from_numpy(batch))
                loss = task.objective(model, images, labels.to(total.device), task.allocation)
                sgd.step(torch.autograd.grad(loss, trained))
                total += loss.detach()
        model.eval()
        mean_loss = total.item() / steps
        if not math.isfinite(mean_loss):
            raise DivergenceError(
                f"the loss of client {client.id} became {mean_loss} in round {self.round}; try a smaller `optimizer.lr`"
            )
        adapter = {name: parameter.detach().clone() for name, parameter in zip(names, trained, strict=True)}
        return ClientUpdate(client.id, task.allocation, adapter, len(client.train), {"loss": mean_loss})


class _SGD:
    """torch.optim.SGD's arithmetic on a list of tensors, without its import of the compiler (seconds per process)."""

    def __init__(self, config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> None:
        self.config = config
        self.parameters = [parameter.data for parameter in parameters]
        self.buffers: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor]) -> None:
        config, grads = self.config, list(gradients)
        if config.clip_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            grads = list(torch._foreach_mul(grads, (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)))
        if config.weight_decay:
            grads = list(torch._foreach_add(grads, self.parameters, alpha=config.weight_decay))
        if config.momentum:
            if self.buffers:
                torch._foreach_mul_(self.buffers, config.momentum)
                torch._foreach_add_(self.buffers, grads)
            else:
                self.buffers = [grad.clone() for grad in grads]
            grads = self.buffers
        torch._foreach_add_(self.parameters, grads, alpha=-config.lr)


def batches(num_examples: int, batch_size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """`steps` index arrays of at most `batch_size`, without replacement within each pass over the examples."""
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        if len(order) == 0:
            order = rng.permutation(num_examples)
        yield order[:batch_size]
        order = order[batch_size:]
