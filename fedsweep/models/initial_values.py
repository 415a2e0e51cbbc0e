"""Random initial values of heads and of linear layers, which depend only on a seed and on names."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from fedsweep.common.randomness import derived_seed


@torch.no_grad()
def draw_head(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Draw a head's weights from a truncated normal distribution (standard deviation 0.02), and set its biases to zero.

    The values of a tensor depend only on the seed and the tensor's full name.
    """
    for name, parameter in parameters:
        if parameter.ndim > 1:
            generator = torch.Generator().manual_seed(derived_seed(seed, "head", name))
            nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
        else:
            parameter.zero_()


@torch.no_grad()
def draw_linears(layers: nn.Sequential, seed: int, purpose: str, *key: str) -> None:
    """Draw the weights of linear layers from torch's default distribution, and set their biases to zero.

    The values depend only on `seed`, on the strings `purpose` and `key`, and on the layer's position in `layers`.
    Layers on the meta device are skipped.
    """
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:
            generator = torch.Generator().manual_seed(derived_seed(seed, purpose, *key, place))
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(layer.bias)
