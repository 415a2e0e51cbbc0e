"""SGD and Adam with the arithmetic of `torch.optim`, but without its slow import of torch's compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config


class SGDConfig(Config):
    """SGD with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum, without dampening")
    weight_decay: float = Field(1e-5, ge=0, description="weight of the L2 penalty in the gradient")
    clip_norm: float | None = Field(10.0, gt=0, description="largest norm of the whole gradient; `null`: no clipping")

    def over(self, parameters: list[Tensor]) -> SGD:
        """Return a new optimizer, which updates `parameters` in place."""
        return SGD(self, parameters)


class AdamConfig(Config):
    """Adam (Kingma and Ba, 2015)."""

    name: Literal["adam"] = "adam"
    lr: float = Field(2e-4, gt=0, description="learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.98), description="decay rates of the running means of the gradient and of the squared gradient"
    )
    eps: float = Field(
        1e-6, gt=0, description="number added to the denominator, which is the root of the mean squared gradient"
    )
    weight_decay: float = Field(0.05, ge=0, description="strength of the weight decay; see `decoupled`")
    decoupled: bool = Field(
        False,
        description="`true`: decay the weights directly (AdamW); `false`: an L2 penalty in the gradient (torch's Adam)",
    )
    clip_norm: float | None = Field(10.0, gt=0, description="largest norm of the whole gradient; `null`: no clipping")

    def over(self, parameters: list[Tensor]) -> Adam:
        """Return a new optimizer, which updates `parameters` in place."""
        return Adam(self, parameters)


class SGD:
    """An optimizer that updates a list of tensors in place, with the same arithmetic as `torch.optim.SGD`."""

    def __init__(self, config: SGDConfig, parameters: list[Tensor]) -> None:
        self.config, self.parameters = config, parameters
        self.buffers: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update each tensor theta with its gradient g, after gradient clipping.

        First, the velocity v becomes momentum * v + g + weight_decay * theta. Then theta becomes theta - lr * v.
        """
        config, grads = self.config, clipped(gradients, self.config.clip_norm)
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


class Adam:
    """An optimizer that updates a list of tensors in place, with the same arithmetic as `torch.optim.Adam`.

    If the option `decoupled` is true, the arithmetic is that of `torch.optim.AdamW`.
    """

    def __init__(self, config: AdamConfig, parameters: list[Tensor]) -> None:
        self.config, self.parameters, self.taken = config, parameters, 0
        self.mean, self.square = ([torch.zeros_like(one) for one in parameters] for _ in range(2))

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update each tensor theta with its gradient, after gradient clipping.

        theta becomes theta - lr m / (sqrt(v) + eps), where m and v are the bias-corrected first and second moments.
        """
        config, grads = self.config, clipped(gradients, self.config.clip_norm)
        self.taken += 1
        if config.weight_decay and config.decoupled:
            torch._foreach_mul_(self.parameters, 1 - config.lr * config.weight_decay)
        elif config.weight_decay:
            grads = list(torch._foreach_add(grads, self.parameters, alpha=config.weight_decay))
        slow, slower = config.betas
        torch._foreach_lerp_(self.mean, grads, 1 - slow)
        torch._foreach_mul_(self.square, slower)
        torch._foreach_addcmul_(self.square, grads, grads, 1 - slower)
        first, second = (1 - beta**self.taken for beta in config.betas)
        scale = torch._foreach_div(torch._foreach_sqrt(self.square), second**0.5)
        torch._foreach_add_(scale, config.eps)
        torch._foreach_addcdiv_(self.parameters, self.mean, scale, -config.lr / first)


def plain_adam(lr: float, tensors: Iterable[Tensor]) -> Adam:
    """Return an Adam optimizer for `tensors` with the defaults of Kingma and Ba, without weight decay or clipping."""
    config = AdamConfig(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_norm=None)
    return Adam(config, [one.data for one in tensors])


def clipped(gradients: Sequence[Tensor], largest: float | None) -> list[Tensor]:
    """Return the gradients, scaled down if their joint norm exceeds `largest`. None disables clipping."""
    grads = list(gradients)
    if largest is None:
        return grads
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return list(torch._foreach_mul(grads, (largest / (norm + 1e-6)).clamp(max=1.0)))


OptimizerConfig = Annotated[SGDConfig | AdamConfig, Field(discriminator="name")]
