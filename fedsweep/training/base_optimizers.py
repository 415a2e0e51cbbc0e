"""The base optimizers FedAvg, FedProx and FedDyn, which can be combined with methods."""

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
    """The base class of base optimizers, which can change the clients' gradients and correct the server's average."""

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradients of a client's objective, given the gradients of its loss.

        Args:
            gradients: The gradient of the loss for each trained tensor.
            parameters: The present values of these tensors.
            start: Their values at the beginning of the local session.
            memory: The remembered gradient of the client for each tensor, or None.
        """
        return gradients

    def conclude(
        self, before: ServerState, after: ServerState, updates: Sequence[ClientUpdate], shares: Mapping[ClientId, float]
    ) -> ServerState:
        """Return the state after the round.

        Args:
            before: The state before the round.
            after: The state that the method has aggregated.
            updates: The updates of the cohort.
            shares: The weights of all clients, including those outside the cohort. They sum to one.
        """
        return after


class FedAvg(BaseOptimizer):
    """Plain averaging: clients minimise their own loss, and the server averages (McMahan et al., 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(BaseOptimizer):
    """A proximal term mu / 2 ||theta - theta^t||^2 in the clients' objective (Li et al., 2020, Eq. 2)."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0: the same as FedAvg")

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradients plus mu (theta - theta^t)."""
        return _pulled(gradients, parameters, start, self.mu)


class FedDyn(BaseOptimizer):
    """Dynamic regularisation with remembered gradients, so that clients agree on an optimum (Acar et al., 2021).

    Gradients are remembered separately for each tensor. A client that does not hold a block keeps its memory of the
    block. For this block, the server treats the client as one outside the cohort.
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
        """Update the remembered gradients g_k and h, and subtract h / alpha from the average.

        g_k -= alpha (theta_k - theta^t); h -= alpha sum_k p_k (theta_k - theta^t); theta = mean - h / alpha. p_k is
        client k's share, 1 / m in the paper.
        """
        clients, server, adapter = dict(before.client_memory), dict(before.server_memory), dict(after.adapter)
        for update in sorted(updates, key=lambda one: one.client):
            known = dict(clients.get(update.client, {}))
            for name, tensor in update.adapter.items():
                if not is_statistic(name):  # running statistics have no gradients
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
