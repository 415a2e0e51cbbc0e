"""Base optimizers: the federated optimizers FedAvg, FedProx and FedDyn. A run combines one of them with its method."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.models.client_rank import cut_tensor, padded, widened
from fedsweep.models.names import is_statistic, rank_dim
from fedsweep.types import ClientId, ClientUpdate, ServerState

Tensors = list[Tensor]


class BaseOptimizer(Config):
    """The base class of the federated optimizers FedAvg, FedProx and FedDyn.

    A run combines one base optimizer with its method. A base optimizer can change the clients' gradients, and correct
    the average that the server computes.
    """

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradients of the objective that a client minimises.

        The base class returns `gradients`. A subclass that adds terms to the loss also adds the gradients of these
        terms.

        Args:
            gradients: The gradient of the loss for each trained tensor.
            parameters: The current values of the trained tensors.
            start: The values of the trained tensors at the beginning of the local session.
            memory: For each trained tensor, the gradient that the client remembers from earlier rounds (see FedDyn), or
                None if the client remembers no gradient.
        """
        return gradients

    def conclude(
        self, before: ServerState, after: ServerState, updates: Sequence[ClientUpdate], shares: Mapping[ClientId, float]
    ) -> ServerState:
        """Return the server's state after the round, including the base optimizer's correction of the average.

        Args:
            before: The state before the round.
            after: The state after the method's aggregation.
            updates: The updates of the cohort.
            shares: The weights of all clients, including those outside the cohort. The weights sum to one.
        """
        return after


class FedAvg(BaseOptimizer):
    """Plain averaging: clients minimise their own loss, and the server averages the updates (McMahan et al., 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(BaseOptimizer):
    """The base optimizer FedProx, which adds a proximal term to the clients' objective (Li et al., 2020, Eq. 2).

    The term is mu / 2 ||theta - theta^t||^2, where theta denotes the client's tensors, and theta^t denotes the tensors
    that the server sent.
    """

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0: the same as FedAvg")

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return `gradients` plus mu (theta - theta^t), the gradient of the proximal term.

        theta are the current `parameters`, and theta^t are their values at the `start` of the session.
        """
        return _pulled(gradients, parameters, start, self.mu)


class FedDyn(BaseOptimizer):
    """The base optimizer FedDyn, which regularises the clients' objectives dynamically (Acar et al., 2021).

    Each client remembers a gradient for each tensor, and updates it after training. The remembered gradients shift the
    clients' objectives such that the clients agree on an optimum. If a client does not hold a block in a round, the
    client keeps its remembered gradients for the block, and the server updates the block as if the client were not in
    the cohort.
    """

    name: Literal["feddyn"] = "feddyn"
    alpha: float = Field(0.1, gt=0, description="weight of the regulariser")

    def steer(self, gradients: Tensors, parameters: Tensors, start: Tensors, memory: list[Tensor | None]) -> Tensors:
        """Return the gradients of FedDyn's objective (Eq. 1).

        The objective is L_k(theta) - <g_k, theta> + alpha / 2 ||theta - theta^t||^2. L_k is the loss of client k, g_k
        is the gradient that the client remembers from earlier rounds (`memory`), theta are the current `parameters`,
        and theta^t are their values at the `start` of the session.
        """
        pulled = _pulled(gradients, parameters, start, self.alpha)
        return [one if known is None else one - known for one, known in zip(pulled, memory, strict=True)]

    def conclude(
        self, before: ServerState, after: ServerState, updates: Sequence[ClientUpdate], shares: Mapping[ClientId, float]
    ) -> ServerState:
        """Update the gradients that the clients and the server remember, and correct the server's average.

        Let theta^t be the tensors before the round, theta_k the tensors that client k has trained, and p_k the client's
        weight in `shares` (for m clients, 1 / m in Acar et al.). The client's remembered gradient g_k decreases by
        alpha (theta_k - theta^t). The server's remembered gradient h decreases by alpha times the sum of
        p_k (theta_k - theta^t) over the cohort. The server then subtracts h / alpha from the average.
        """
        clients, server, adapter = dict(before.client_memory), dict(before.server_memory), dict(after.adapter)
        for update in sorted(updates, key=lambda one: one.client):
            known = dict(clients.get(update.client, {}))
            for name, tensor in widened(update.adapter, before.adapter).items():
                if not is_statistic(name):  # running statistics have no gradients
                    step = tensor - before.adapter[name]
                    nothing = torch.zeros_like(step)
                    known[name] = known.get(name, nothing) - self.alpha * step
                    server[name] = server.get(name, nothing) - self.alpha * shares[update.client] * step
            clients[update.client] = known
        for name in {name for update in updates for name in update.adapter if not is_statistic(name)}:
            adapter[name] = adapter[name] - self._reached(name, server[name], updates) / self.alpha
        return replace(after, adapter=adapter, client_memory=clients, server_memory=server)

    def _reached(self, name: str, remembered: Tensor, updates: Sequence[ClientUpdate]) -> Tensor:
        """Return the server's gradient, with zeros in the rows or columns that no client's rank reaches."""
        dim = rank_dim(name)
        if dim is None:
            return remembered
        rank = max(update.adapter[name].shape[dim] for update in updates if name in update.adapter)
        return padded({name: cut_tensor(name, remembered, rank)}, {name: remembered})[name]


def _pulled(gradients: Tensors, parameters: Tensors, start: Tensors, strength: float) -> Tensors:
    return list(torch._foreach_add(gradients, torch._foreach_sub(parameters, start), alpha=strength))


AnyBaseOptimizer = FedAvg | FedProx | FedDyn
BaseOptimizerConfig = Annotated[AnyBaseOptimizer, Field(discriminator="name")]
