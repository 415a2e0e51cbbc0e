"""Local training of a cohort on a single model in memory: one client after another, or several clients together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.randomness import derived_seed, stream
from fedsweep.models.base import Reader
from fedsweep.models.client_rank import cut, holding, rescaled
from fedsweep.models.cohort_pass import ClientPass, cohort_logits, joinable
from fedsweep.models.layered import Images, LayeredModel, Walk, copy_into
from fedsweep.models.lora import LoraConfig
from fedsweep.models.names import is_statistic, names_within, not_folded, rank_dim
from fedsweep.models.sessions import Segment, training_only
from fedsweep.training.base_optimizers import AnyBaseOptimizer
from fedsweep.training.local_session import LocalSession
from fedsweep.training.optimizers import OptimizerConfig
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, LayerAllocation

Objective = Callable[[LayeredModel, Images, Tensor, Walk], Tensor]
"""A function that returns the loss, given the model, a batch of images, their labels (batch,), and the steps to run."""


JOINED_ON_CPU, JOINED_ON_GPU = 150_000, 8_000_000
"""The largest number of elements in the tokens of clients that train together, averaged over the blocks.

On a CPU, a step of four batches of 32 small images takes 0.6 to 0.9 of the time of four steps; with more images, the
tokens leave the processor's cache. On a GPU, a small step takes as long as launching its kernels.
"""


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
        start: The tensors at the beginning of the session, keyed by name, at the server's rank and scaling of LoRA.
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

    def moved(self, parameters: Iterable[str]) -> Sequence[str]:
        """Return the names of the tensors to train and of the statistics that change, given the names of a model's."""
        if self.names is not None:
            return self.names
        return not_folded(names_within(parameters, self.allocation.trained, self.allocation.excluded_prefixes))

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
    """A trainer that trains the clients of a cohort on a single model, either alone or together.

    Attributes:
        model: The model, into which the tensors of a client that trains alone are copied.
        optimizer: The options of the local optimizer.
        base: The base optimizer, which is a federated optimizer such as FedProx.
        local: The options that set the number of local steps and the batch size.
        seed: The seed of the run.
        rounds: The number of rounds of the run.
        fewest: The smallest number of training images of any client.
        reader: The reader of image batches, which reuses cached outputs of frozen blocks.
        round: The number of the current round.
        memory: The gradients that each client remembers from earlier rounds if the base optimizer is FedDyn.
        lora: The options of the adapters, which set the scaling of clients with a smaller rank; None without adapters.
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
    lora: LoraConfig | None = None

    counts_only: ClassVar[bool] = False
    """True for a trainer that counts the costs of training; its tensors have no values (`CountingTrainer`)."""

    def at(self, round: int, memory: Mapping[ClientId, AdapterState] | None = None) -> CohortTrainer:
        """Return a copy of the trainer that draws the batches and dropout masks of round `round`.

        `memory` contains the gradients that each client remembers from earlier rounds, which FedDyn uses.
        """
        if round != self.round:
            self.reader.kept.next_round()
        return replace(self, round=round, memory=memory or {})

    def fit(self, tasks: Sequence[LocalTask]) -> list[ClientUpdate]:
        """Run the local training of each task, and return the clients' updates in the same order.

        Clients whose batches are small train together (see `_groups`). Their updates differ from those of training one
        client after another only by rounding.
        """
        parameters = self.model.movable()  # once for all tasks: listing all modules takes as long as a small step
        updates: list[ClientUpdate] = []
        self.model.train()
        try:
            for group in self._groups(tasks, parameters):
                if len(group) == 1:
                    updates.append(self._fit_one(group[0], parameters, len(updates), len(tasks)))
                else:
                    updates += self._fit_together(group, parameters, len(updates), len(tasks))
        finally:
            self.model.eval()
        return updates

    def _groups(self, tasks: Sequence[LocalTask], parameters: Mapping[str, Tensor]) -> list[Sequence[LocalTask]]:
        """Divide the tasks into groups that train together, without changing their order.

        Only tasks with the cross-entropy and the same first tensors are grouped. The sizes of such tasks are shares of
        the largest group, so their sum, rounded up, is the number of groups. Each task belongs to the group in which
        the sum of the sizes before it lies.
        """
        groups: list[Sequence[LocalTask]] = []
        for (joins, _), similar in groupby(tasks, lambda task: (self._joins(task, parameters), id(task.start))):
            listed = list(similar)
            sizes = self._sizes(listed) if joins else [1.0] * len(listed)
            total = sum(sizes)
            starts = accumulate(sizes[:-1], initial=0.0)
            numbers = [int(start / total * math.ceil(total) + 1e-9) for start in starts]
            numbered = groupby(zip(numbers, listed, strict=True), itemgetter(0))
            groups += [[task for _, task in group] for _, group in numbered]
        return groups

    def _joins(self, task: LocalTask, parameters: Mapping[str, Tensor]) -> bool:
        plain = task.objective is cross_entropy and task.walk_at is None and not task.side_inputs
        return plain and joinable(self.model, task.moved(parameters))

    def _sizes(self, tasks: Sequence[LocalTask]) -> list[float]:
        """Return the size of each task's batch in the average block, as a share of the largest group."""
        pixels, _ = tasks[0].client.train.take(torch.zeros(1, dtype=torch.int64))
        with torch.no_grad():
            tokens = self.model.embed(self.model.normalize(pixels))
        largest = JOINED_ON_CPU if tokens.device.type == "cpu" else JOINED_ON_GPU
        whole = tokens.numel() * self.local.batch_size / largest
        held = [len(task.allocation.held) / self.model.num_layers for task in tasks]
        return [whole * max(share, 1 / 4) for share in held]  # all tasks of a group could hold the same block

    def _fit_together(
        self, tasks: Sequence[LocalTask], parameters: dict[str, Tensor], place: int, of: int
    ) -> list[ClientUpdate]:
        """Train several clients with one forward and one backward pass per step. Clients stop when their steps end."""
        model = self.model
        copy_into(parameters, tasks[0].start)
        tasks = [self._given(task) for task in tasks]
        sessions = [self._session(task, parameters, {}) for task in tasks]
        segments = [self._tensors(task, one) for task, one in zip(tasks, sessions, strict=True)]
        scalings = [self._scaling(task) for task in tasks]
        for step in range(max(one.steps for one in sessions)):
            training = [number for number, one in enumerate(sessions) if step < one.steps]
            passes, labels = [], []
            for number in training:
                one, train = sessions[number], tasks[number].client.train
                batch = torch.from_numpy(next(one.order))
                with model.frozen(one.walk, one.done):
                    images = self.reader.batch(train, batch, one.prefix, one.done, {})
                segment = Segment(len(batch), segments[number], one.masks, scalings[number])
                passes.append(ClientPass(images, cast("Sequence[int]", one.walk), segment))
                labels.append(train.labels[batch].to(model.mean.device, non_blocking=True))
            losses = list(map(F.cross_entropy, cohort_logits(model, passes), labels))
            active = [sessions[number] for number in training]
            gradients = iter(torch.autograd.grad(losses, [leaf for one in active for leaf in one.leaves]))
            for one, loss in zip(active, losses, strict=True):
                one.step([next(gradients) for _ in one.leaves], loss.detach(), self.base)
            share = sum(min(1.0, (step + 1) / one.steps) for one in sessions)
            self.reader.listener.training(place + share, of)
        return [self._update(task, one) for task, one in zip(tasks, sessions, strict=True)]

    def _tensors(self, task: LocalTask, session: LocalSession) -> AdapterState:
        """Return a client's own tensors: those that it trains and, if its rank is smaller, its other factors."""
        trained = dict(zip(session.names, session.leaves, strict=True))
        if task.allocation.rank is None:
            return trained
        return {name: one for name, one in task.start.items() if rank_dim(name) is not None} | trained

    def _fit_one(self, task: LocalTask, parameters: dict[str, Tensor], place: int, of: int) -> ClientUpdate:
        with holding(self.model, task.allocation.rank, self._scaling(task)) as factors:
            return self._fit_alone(self._given(task), {**parameters, **factors}, place, of)

    def _fit_alone(self, task: LocalTask, parameters: dict[str, Tensor], place: int, of: int) -> ClientUpdate:
        model = self.model
        copy_into(parameters, task.start)
        session = self._session(task, parameters, parameters)
        devices = [model.mean.device] if model.mean.is_cuda else []
        masks, frozen = model.session.drawing(session.masks), model.frozen(session.walk, session.done)
        # Dropout outside of LoRA uses torch's global generator, which is restored afterwards.
        with torch.random.fork_rng(devices=devices), masks, frozen, training_only(parameters, session.names):
            torch.manual_seed(session.dropout)
            for step, batch in enumerate(map(torch.from_numpy, session.order)):
                self._step(session, task, batch, step / session.steps)
                self.reader.listener.training(place + (step + 1) / session.steps, of)
        return self._update(task, session)

    def _scaling(self, task: LocalTask) -> float | None:
        """Return the scaling of a client with a smaller rank; None for that of the model."""
        rank = task.allocation.rank
        return None if rank is None or self.lora is None else self.lora.scaling_of(rank)

    def _factor(self, task: LocalTask) -> float:
        """Return s / s_r, by which a client of rank r multiplies the server's factors B, to have the same function."""
        scaling = self._scaling(task)
        return 1.0 if self.lora is None or scaling is None else self.lora.effective_scaling / scaling

    def _given(self, task: LocalTask) -> LocalTask:
        """Return the task with the tensors that the client begins with, at its own rank and scaling."""
        rank = task.allocation.rank
        return task if rank is None else replace(task, start=cut(task.start, rank, self._factor(task)))

    def _update(self, task: LocalTask, session: LocalSession) -> ClientUpdate:
        update, factor = session.update(task.client, task.allocation, self.round), self._factor(task)
        return update if factor == 1 else replace(update, adapter=rescaled(update.adapter, 1 / factor))

    def _step(self, session: LocalSession, task: LocalTask, batch: Tensor, over: float) -> None:
        """Run one step of a client that trains alone, on the images at the indices `batch` (k,).

        `over` is the session's progress in [0, 1).
        """
        train = task.client.train
        images = self.reader.batch(train, batch, session.prefix, session.done, task.side_inputs)
        labels = train.labels[batch].to(self.model.mean.device, non_blocking=True)
        loss = task.objective(self.model, images, labels, task.walk(over))
        session.step(list(torch.autograd.grad(loss, session.leaves)), loss.detach(), self.base)

    def _session(self, task: LocalTask, parameters: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> LocalSession:
        """Return the state with which a task begins; tensors that are not in `leaves` are copied from its start.

        The task is one that `_given` returned.
        """
        client, moved = task.client, task.moved(parameters)
        steps = self.local.steps_for(len(client.train), self.fewest)
        names = [name for name in moved if not is_statistic(name)]
        own = [leaves[name] if name in leaves else task.start[name].clone().requires_grad_() for name in names]
        key: list[int | str] = [self.round, client.id, *([task.session] if task.session else [])]
        walk, known = task.walk(0.0), cut(self.memory.get(client.id, {}), task.allocation.rank)
        done = self.model.frozen_steps(walk, names) if task.walk_at is None else 0
        return LocalSession(
            names=names,
            leaves=own,
            optimizer=self.optimizer.over([leaf.data for leaf in own]),
            start=[task.start[name] for name in names],
            memory=[known.get(name) for name in names],
            statistics={name: parameters[name] for name in moved if is_statistic(name)},
            steps=steps,
            order=batches(len(client.train), self.local.batch_size, steps, stream(self.seed, "batches", *key)),
            dropout=derived_seed(self.seed, "dropout", *key),
            walk=walk,
            done=done,
            prefix=self.reader.prefix(walk, done, task.start) if done else None,
            total=torch.zeros((), device=self.model.mean.device),
        )


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
