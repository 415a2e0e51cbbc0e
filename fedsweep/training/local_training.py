"""Local training of a cohort, one client after another, on a single model in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import DivergenceError
from fedsweep.common.randomness import derived_seed, stream
from fedsweep.models.base import Reader
from fedsweep.models.layered import Images, LayeredModel, Walk, copy_into
from fedsweep.models.names import is_statistic, names_within
from fedsweep.training.base_optimizers import AnyBaseOptimizer
from fedsweep.training.optimizers import OptimizerConfig
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, LayerAllocation

Objective = Callable[[LayeredModel, Images, Tensor, Walk], Tensor]
"""A function that returns the loss, given the model, a batch of images, their labels (batch,), and the steps to run."""


class LocalConfig(Config):
    """The options of a client's local training in each round."""

    batch_size: int = Field(128, gt=0, description="number of images per step")
    steps: Literal["epoch", "min_client"] | Annotated[int, Field(gt=0)] = Field(
        "epoch",
        description="`epoch`: whole epochs; `min_client`: the same, but an epoch has at most one step more than an "
        "epoch of the client with the fewest images (as in FedRA's released code); or a number of steps",
    )
    epochs: int = Field(1, gt=0, description="number of epochs; not used if `local.steps` is a number")

    def steps_for(self, images: int, fewest: int) -> int:
        """Return the number of local steps of a client with `images` training images.

        `fewest` is the smallest number of training images of any client.
        """
        if isinstance(self.steps, int):
            return self.steps
        epoch = math.ceil(images / self.batch_size)
        if self.steps == "min_client":
            epoch = min(epoch, math.ceil(fewest / self.batch_size) + 1)
        return self.epochs * epoch


@dataclass(frozen=True)
class LocalTask:
    """One session of a client's local training.

    Attributes:
        client: The client, which trains on its own training images.
        start: The tensors at the beginning of the session, keyed by name.
        allocation: The blocks that the client holds and trains.
        objective: The function that computes the loss.
        walk_at: A function that returns the steps of the forward pass, given the session's progress in [0, 1). A step
            is a block or a module that replaces a block. By default, the steps are the blocks that the client holds.
        names: The names of the tensors to train. By default, these are the tensors that the allocation trains.
        session: The number of the session among the client's sessions in the round, counted from 0. Batches and
            dropout masks depend on this number.
        side_inputs: Additional inputs of the method, each a tensor (n, ...) with one row for every training image,
            keyed by name.
    """

    client: Client
    start: AdapterState
    allocation: LayerAllocation
    objective: Objective
    walk_at: Callable[[float], Walk] | None = None
    names: Sequence[str] | None = None
    session: int = 0
    side_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def walk(self, over: float) -> Walk:
        """Return the steps of the forward pass at a given point of the session.

        A step is a block or a module that replaces a block. `over` is the session's progress in [0, 1).
        """
        return self.allocation.held if self.walk_at is None else self.walk_at(over)


def cross_entropy(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
    """Run the blocks in `walk` on a batch of images, and return the mean cross-entropy of the logits.

    FedAvg and FedRA use this loss.
    """
    return F.cross_entropy(model(images, walk), labels)


@dataclass(frozen=True)
class CohortTrainer:
    """A trainer that trains the clients of a cohort one after another on a single model.

    Attributes:
        model: The model, into which the tensors of each client are copied.
        optimizer: The options of the local optimizer.
        base: The base optimizer, which is a federated optimizer such as FedProx.
        local: The options that set the number of local steps and the batch size.
        seed: The seed of the run.
        rounds: The number of rounds of the run.
        fewest: The smallest number of training images of any client.
        reader: The reader of image batches, which reuses cached outputs of frozen blocks.
        round: The number of the current round.
        memory: The gradients that each client remembers from earlier rounds if the base optimizer is FedDyn.
    """

    model: LayeredModel
    optimizer: OptimizerConfig
    base: AnyBaseOptimizer
    local: LocalConfig
    seed: int
    rounds: int
    fewest: int
    reader: Reader
    round: int = 0
    memory: Mapping[ClientId, AdapterState] = field(default_factory=dict)

    def at(self, round: int, memory: Mapping[ClientId, AdapterState] | None = None) -> CohortTrainer:
        """Return a copy of the trainer that draws the batches and dropout masks of round `round`.

        `memory` contains the gradients that each client remembers from earlier rounds, which FedDyn uses.
        """
        if round != self.round:
            self.reader.kept.next_round()
        return replace(self, round=round, memory=memory or {})

    def fit(self, tasks: Sequence[LocalTask]) -> list[ClientUpdate]:
        """Run the local training of each task, and return the clients' updates in the same order."""
        parameters = self.model.movable()  # once for all tasks: listing all modules takes as long as a small step
        self.model.train()
        try:
            return [self._fit_one(task, parameters, place, len(tasks)) for place, task in enumerate(tasks)]
        finally:
            self.model.eval()

    def _fit_one(self, task: LocalTask, parameters: dict[str, Tensor], place: int, tasks: int) -> ClientUpdate:
        model, client = self.model, task.client
        steps = self.local.steps_for(len(client.train), self.fewest)
        copy_into(parameters, task.start)
        moved = task.names
        if moved is None:
            moved = names_within(parameters, task.allocation.trained, task.allocation.excluded_prefixes)
        names = [name for name in moved if not is_statistic(name)]
        trained = [parameters[name] for name in names]
        values = [parameter.data for parameter in trained]
        start, remembered = [task.start[name] for name in names], self.memory.get(client.id, {})
        memory = [remembered.get(name) for name in names]
        optimizer = self.optimizer.over(values)
        total = torch.zeros((), device=model.mean.device)
        key: list[int | str] = [self.round, client.id, *([task.session] if task.session else [])]
        order = batches(len(client.train), self.local.batch_size, steps, stream(self.seed, "batches", *key))
        devices = [model.mean.device] if model.mean.is_cuda else []
        # Only dropout uses torch's global generator. It is seeded for this session and restored afterwards.
        walk = task.walk(0.0)
        done = model.frozen_steps(walk, names) if task.walk_at is None else 0
        prefix = self.reader.prefix(walk, done, task.start) if done else None
        with torch.random.fork_rng(devices=devices), model.frozen(walk, done):
            torch.manual_seed(derived_seed(self.seed, "dropout", *key))
            for step, batch in enumerate(map(torch.from_numpy, order)):
                images = self.reader.batch(client.train, batch, prefix, done, task.side_inputs)
                labels = client.train.labels[batch].to(total.device, non_blocking=True)
                loss = task.objective(model, images, labels, task.walk(step / steps))
                gradients = list(torch.autograd.grad(loss, trained))
                optimizer.step(self.base.steer(gradients, values, start, memory))
                total += loss.detach()
                self.reader.listener.training(place + (step + 1) / steps, tasks)
        mean_loss = total.item() / steps
        if not math.isfinite(mean_loss):
            raise DivergenceError(
                f"the loss of client {client.id} became {mean_loss} in round {self.round}; try a smaller `optimizer.lr`"
            )
        if not torch.stack(torch._foreach_norm(values)).isfinite().all():  # no loss is computed after the last step
            raise DivergenceError(
                f"the adapter of client {client.id} became infinite or NaN in round {self.round}; "
                "try a smaller `optimizer.lr`"
            )
        adapter = {name: parameters[name].detach().clone() for name in moved}
        return ClientUpdate(client.id, task.allocation, adapter, len(client.train), {"loss": mean_loss})


def batches(num_examples: int, batch_size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield `steps` batches, each of which is an array of image indices.

    Every epoch goes through all `num_examples` images in a new random order. All batches have `batch_size` images,
    except that the last batch of an epoch can be smaller.
    """
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        if len(order) == 0:
            order = rng.permutation(num_examples)
        yield order[:batch_size]
        order = order[batch_size:]
