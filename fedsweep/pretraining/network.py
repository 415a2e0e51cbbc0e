"""The untrained network that a pre-training starts from."""

import torch
from torch import Tensor, nn

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.models import LayeredModel
from fedsweep.models.timm.vit import DigitsViT, LayeredViT
from fedsweep.pretraining.config import PretrainConfig


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
