"""Optimizer, learning rate, average of the weights and mixing of images, from torch, timm and torchvision."""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor
from torchvision.transforms import v2  # type: ignore[import-untyped]

from fedsweep.pretraining.config import AdamWConfig, MixConfig, ScheduleConfig
from fedsweep.pretraining.network import Network

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Images (n, 3, h, w) and labels (n,) to mixed images and shares of classes (n, classes)."""


def adamw(network: Network, config: AdamWConfig) -> torch.optim.AdamW:
    """The optimizer of all parameters, in two groups: weight matrices decay, the others do not."""
    spared: set[str] = getattr(network.backbone, "no_weight_decay", set)()
    groups = param_groups_weight_decay(network.backbone, config.weight_decay, no_weight_decay_list=spared)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def cosine(optimizer: torch.optim.Optimizer, config: ScheduleConfig, lr: float, steps: int) -> CosineLRScheduler:
    """The schedule over `steps` steps; call its `step_update(k)` before step k, which counts from 0.

    Over w steps of warm-up the rate is lr (k + 1) / (w + 1); then it falls from lr, and would reach the floor at
    k = `steps`. It depends on k alone, so that nothing of it need be saved.
    """
    warmup = int(config.warmup * steps)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 2),  # timm warns of a cosine of one step
        lr_min=config.floor,
        warmup_t=warmup,
        warmup_lr_init=lr / (warmup + 1),
        warmup_prefix=True,
        t_in_epochs=False,
    )


def mixer(config: MixConfig, num_classes: int) -> Mix | None:
    """torchvision's MixUp or CutMix, or one of them at random for each batch. They draw from torch's global stream."""
    chosen: list[Any] = []
    if config.mixup:
        chosen.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
    if config.cutmix:
        chosen.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    both: Mix = v2.RandomChoice(chosen)
    return both
