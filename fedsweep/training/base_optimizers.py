"""FedAvg, FedProx and FedDyn, the base optimizers, which combine with every method."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.models.names import is_statistic
from fedsweep.types import ClientId, ClientUpdate, ServerState

Tensors = list[Tensor]


class BaseOptimizer(Config):
    """A base optimizer decides how far a client moves from the global model, and what is remembered of it."""

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradients of a client's objective, from those of its loss.

        The four lists are parallel: `start` is where the session began, `memory` what is remembered of the client.
        """
        return gradients

    def conclude(
        self, before: ServerState, after: ServerState, updates: Sequence[ClientUpdate], shares: Mapping[ClientId, float]
    ) -> ServerState:
        """Return the state after the round, from the one `before` it and the method's aggregate.

        `shares` are the weights of all clients, including those outside the cohort; they sum to one.
        """
        return after


class FedAvg(BaseOptimizer):
    """Clients descend their own loss, the server averages (McMahan et al., 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(BaseOptimizer):
    """Clients are held near the global model by mu / 2 ||theta - theta^t||^2 (Li et al., 2020, Eq. 2)."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0 is FedAvg")

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Add mu (theta - theta^t)."""
        return _pulled(gradients, parameters, start, self.mu)


class FedDyn(BaseOptimizer):
    """Dynamic regularisation: clients and server remember gradients, so that local optima agree (Acar et al., 2021).

    Memory is kept per tensor: a client that does not hold a block keeps its memory of it, and the server treats it like
    one outside the cohort in the paper: it has not moved.
    """

    name: Literal["feddyn"] = "feddyn"
    alpha: float = Field(0.1, gt=0, description="weight of the regulariser")

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradient of L_k(theta) - <g_k, theta> + alpha / 2 ||theta - theta^t||^2 (Eq. 1)."""
        pulled = _pulled(gradients, parameters, start, self.alpha)
        return [one if known is None else one - known for one, known in zip(pulled, memory, strict=True)]

    def conclude(
        self, before: ServerState, after: ServerState, updates: Sequence[ClientUpdate], shares: Mapping[ClientId, float]
    ) -> ServerState:
        """g_k -= alpha (theta_k - theta^t); h -= alpha sum_k p_k (theta_k - theta^t); theta = mean - h / alpha.

        p_k is client k's share of all, 1 / m in the paper.
        """
        clients, server, adapter = dict(before.client_memory), dict(before.server_memory), dict(after.adapter)
        for update in sorted(updates, key=lambda one: one.client):
            known = dict(clients.get(update.client, {}))
            for name, tensor in update.adapter.items():
                if not is_statistic(name):  # what nothing descends along has no gradient to remember
                    step = tensor - before.adapter[name]
                    nothing = torch.zeros_like(step)
                    known[name] = known.get(name, nothing) - self.alpha * step
                    server[name] = server.get(name, nothing) - self.alpha * shares[update.client] * step
            clients[update.client] = known
        for name in {name for update in updates for name in update.adapter if not is_statistic(name)}:
            adapter[name] = adapter[name] - server[name] / self.alpha
        return replace(after, adapter=adapter, client_memory=clients, server_memory=server)


def _pulled(gradients: Tensors, parameters: Tensors, start: Tensors, strength: float) -> Tensors:
    return list(torch._foreach_add(gradients, torch._foreach_sub(parameters, start), alpha=strength))


AnyBaseOptimizer = FedAvg | FedProx | FedDyn
BaseOptimizerConfig = Annotated[AnyBaseOptimizer, Field(discriminator="name")]
