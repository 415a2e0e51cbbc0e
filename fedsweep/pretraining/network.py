"""The network of a pre-training: backbone, head, parameter groups and learning-rate schedule."""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torchvision.transforms import v2  # type: ignore[import-untyped]

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.models import LayeredModel
from fedsweep.models.timm.vit import DigitsViT, LayeredViT
from fedsweep.pretraining.config import AdamWConfig, MixConfig, PretrainConfig, ScheduleConfig


class Network(nn.Module):
    """A backbone with its head, on images in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: LayeredModel) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.register_buffer("mean", model.mean, persistent=False)
        self.register_buffer("std", model.std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w) in [0, 1]; one channel is the mean of the colours."""
        pixels = images.mean(1, keepdim=True) if len(self.mean) == 1 else images
        logits: Tensor = self.backbone((pixels - self.mean) / self.std)
        return logits


def build_network(config: PretrainConfig, num_classes: int) -> Network:
    """The network with the weights that the seed draws, and with stochastic depth.

    Raises:
        UserError: the data has other classes than the backbone, or its blocks have no place for stochastic depth.
    """
    seed = derived_seed(config.seed, "pretrain/init")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(config.backbone, DigitsViT):
            if num_classes != 10:
                raise UserError(
                    f"`backbone.name` digits_vit knows ten digits, but {config.data.set} has {num_classes} classes."
                )
            model: LayeredModel = LayeredViT(config.backbone.architecture(), [0.5] * 3, [0.5] * 3)
        else:
            model = config.backbone.build(num_classes, seed)
    model.requires_grad_(True)
    if config.drop_path:
        _drop_paths(model, config.drop_path)
    return Network(model)


def _drop_paths(model: LayeredModel, rate: float) -> None:
    """Give every block timm's stochastic depth, from 0 in the first to `rate` in the last."""
    from timm.layers.drop import DropPath

    blocks = list(model.backbone.blocks)  # type: ignore[arg-type]
    rates = torch.linspace(0, rate, len(blocks)).tolist()
    for block, share in zip(blocks, rates, strict=True):
        places = [name for name, _ in block.named_children() if name.startswith("drop_path")]
        if not places:
            raise UserError(
                f"`drop_path` must be 0: the blocks of {type(model.backbone).__name__} have no place for it."
            )
        for place in places:
            setattr(block, place, DropPath(share))


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
