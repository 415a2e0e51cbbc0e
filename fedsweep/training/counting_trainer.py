"""A trainer that counts the costs of local training from the shapes of tensors, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep.models.activation_cache import FrozenFunction, FrozenRows
from fedsweep.models.base import Reader
from fedsweep.models.client_rank import holding
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.models.sessions import DropoutMasks, training_only
from fedsweep.training.base_optimizers import BaseOptimizer, FedDyn
from fedsweep.training.local_session import LocalSession
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.training.step_meter import FusedAttention, StepMeter
from fedsweep.types import AdapterState, ClientUpdate, ImageSet


@dataclass(frozen=True)
class SessionCosts:
    """The costs of one session of a client's local training.

    Attributes:
        forward: The number of FLOPs of the forward pass of one step; a multiplication and an addition are two FLOPs.
        backward: The number of FLOPs of the backward pass of one step.
        memory: The largest number of bytes that exist at the same time during a step, without the model itself. They
            contain the optimizer's state, gradients, activations, temporary tensors, and the batch.
    """

    forward: int
    backward: int
    memory: int


@dataclass(frozen=True)
class CountingTrainer(CohortTrainer):
    """A trainer that runs one step of each task on the meta device, and records the costs of the step.

    The step is the first step of the session, but the optimizer already has its state, as in all later steps. Only the
    tensors that the task trains require gradients. Frozen blocks run in every step, because a device has no activation
    cache. The text encoder's frozen blocks run once in a session, and their FLOPs are not counted. Clients never train
    together. The model must be on the meta device, and the reader must be a `MetaReader`.

    Attributes:
        meter: The meter of FLOPs and memory, which the caller must have entered.
        sessions: The costs of all sessions so far.
    """

    counts_only: ClassVar[bool] = True
    meter: StepMeter = field(default_factory=StepMeter)
    sessions: list[SessionCosts] = field(default_factory=list)

    def fit(self, tasks: Sequence[LocalTask]) -> list[ClientUpdate]:
        """Count the costs of each task, and return updates that contain the tensors of the tasks' beginning."""
        parameters = self.model.movable()
        self.model.train()
        try:
            return [self._counted(task, parameters) for task in tasks]
        finally:
            self.model.eval()

    def _counted(self, task: LocalTask, parameters: dict[str, Tensor]) -> ClientUpdate:
        names, model, meter = task.moved(parameters), self.model, self.meter
        forward = 0

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            nonlocal forward
            loss = task.objective(model, images, labels, walk)
            forward = meter.flops
            return loss

        rank, before = holding(self.model, task.allocation.rank, self._scaling(task)), meter.live
        with training_only(parameters, names), rank as factors:
            parameters, whole, task = {**parameters, **factors}, meter.live - before, self._given(task)
            session = self._session(task, parameters, parameters)
            masks, frozen = model.session.drawing(EmptyMasks(0)), model.frozen(session.walk, session.done)
            with masks, frozen, FusedAttention():
                self._begin(session)
                meter.forget_peak()
                before = meter.flops
                batch = torch.arange(min(self.local.batch_size, len(task.client.train)))
                self._step(session, replace(task, objective=objective), batch, 0.0)
        self.sessions.append(SessionCosts(forward - before, meter.flops - forward, meter.peak - whole))
        adapter = {name: task.start[name] for name in names}
        return ClientUpdate(task.client.id, task.allocation, adapter, len(task.client.train), {"loss": 0.0})

    def _begin(self, session: LocalSession) -> None:
        """Create all tensors of a session that exist from one step to the next."""
        if type(self.base).steer is BaseOptimizer.steer:
            session.start = session.leaves  # not used
        else:
            session.start = [leaf.detach().clone() for leaf in session.leaves]
        if isinstance(self.base, FedDyn):
            session.memory = [torch.empty_like(leaf) for leaf in session.start]
        session.optimizer.step([torch.empty_like(leaf) for leaf in session.leaves])


class EmptyMasks(DropoutMasks):
    """Dropout masks that have shapes but no values."""

    def next(self, like: Tensor, rate: float) -> Tensor:
        """Return a mask without values, in the shape of `like` and on its device."""
        return torch.empty_like(like)


class MetaRows(FrozenRows):
    """An activation cache that stores nothing and whose outputs are on the meta device."""

    def rows(self, function: FrozenFunction, images: ImageSet, index: Tensor) -> Tensor:
        """Return the outputs (k, ...) of `function` for the k images at `index`, without padding the batch."""
        with torch.no_grad():
            return function.compute(images.take(index)[0])

    def all(self, function: FrozenFunction, images: ImageSet, size: int) -> Tensor:
        """Return the outputs (n, ...) of `function` for all n images in one batch; `size` is ignored."""
        return self.rows(function, images, torch.arange(len(images)))


class MetaReader(Reader):
    """A reader for a model on the meta device, which can compute no keys of an activation cache."""

    def prefix(self, walk: Walk, steps: int, adapter: AdapterState) -> FrozenFunction:
        """Return the first `steps` blocks of a forward pass as a function, whose key ignores the tensors `adapter`."""
        return super().prefix(walk, steps, {})
