"""The state of a client's local training, from the first tensors to the update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.errors import DivergenceError
from fedsweep.models.activation_cache import FrozenFunction
from fedsweep.models.layered import Walk
from fedsweep.models.sessions import DropoutMasks
from fedsweep.training.base_optimizers import AnyBaseOptimizer
from fedsweep.training.optimizers import SGD, Adam
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation


@dataclass
class LocalSession:
    """The state of a client's local training.

    Attributes:
        names: The names of the trained tensors.
        leaves: The trained tensors, with respect to which the loss is differentiated.
        optimizer: The local optimizer, which changes the values of `leaves` in place.
        start: The values of the trained tensors at the beginning.
        memory: For each trained tensor, the gradient that FedDyn remembers, or None.
        statistics: The running statistics that change during training, keyed by name.
        steps: The number of local steps.
        order: The batches that remain, each an array of image indices.
        dropout: The seed of the dropout masks.
        walk: The blocks of the forward pass.
        done: The number of frozen blocks at the start of `walk`.
        prefix: These blocks as a function whose outputs can be cached; None if no block is frozen.
        total: The sum of the losses so far.
    """

    names: list[str]
    leaves: list[Tensor]
    optimizer: SGD | Adam
    start: list[Tensor]
    memory: list[Tensor | None]
    statistics: AdapterState
    steps: int
    order: Iterator[np.ndarray]
    dropout: int
    walk: Walk
    done: int
    prefix: FrozenFunction | None
    total: Tensor

    def __post_init__(self) -> None:
        self.masks = DropoutMasks(self.dropout)

    def step(self, gradients: list[Tensor], loss: Tensor, base: AnyBaseOptimizer) -> None:
        """Update the trained tensors with the gradients of a step, and add the step's loss."""
        self.optimizer.step(base.steer(gradients, [leaf.data for leaf in self.leaves], self.start, self.memory))
        self.total += loss

    def update(self, client: Client, allocation: LayerAllocation, round: int) -> ClientUpdate:
        """Return the client's update after the last step.

        Raises:
            DivergenceError: The loss or a trained tensor is infinite or NaN.
        """
        loss = self.total.item() / self.steps
        if not math.isfinite(loss):
            raise DivergenceError(
                f"the loss of client {client.id} became {loss} in round {round}; try a smaller `optimizer.lr`"
            )
        values = [leaf.data for leaf in self.leaves]
        if not torch.stack(torch._foreach_norm(values)).isfinite().all():  # no loss is computed after the last step
            raise DivergenceError(
                f"the adapter of client {client.id} became infinite or NaN in round {round}; "
                "try a smaller `optimizer.lr`"
            )
        trained = dict(zip(self.names, values, strict=True)) | self.statistics
        adapter = {name: tensor.detach().clone() for name, tensor in trained.items()}
        return ClientUpdate(client.id, allocation, adapter, len(client.train), {"loss": loss})
