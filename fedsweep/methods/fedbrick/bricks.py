"""BRICKs: small modules that run in place of a block, or beside it (FedBRICK, Eqs. 17 to 19 and 23).

The server distils them layer by layer, those of all blocks in parallel, on activations that it computes once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from numpy.random import Generator
from torch import Tensor, nn

from fedsweep.common.randomness import derived_seed
from fedsweep.models.layered import LayeredModel
from fedsweep.training.optimizers import plain_adam
from fedsweep.types import ImageSet

Gate = Literal["softmax", "sigmoid"]
"""sigma of Eq. 19: softmax over the features (the paper), or the logistic function of each."""
FACTORS = ("a1", "b1", "a2", "b2")


def brick(x: Tensor, factors: Mapping[str, Tensor], gate: Gate) -> Tensor:
    """E(x) = x * sigma(B1 A1 x) + B2 A2 x + x, for each token: (..., tokens, d) to the same shape.

    `factors` are a1 and a2 of (..., r, d), b1 and b2 of (..., d, r): with leading dimensions, several BRICKs at once.
    """
    x1 = x @ factors["a1"].mT @ factors["b1"].mT
    x2 = x @ factors["a2"].mT @ factors["b2"].mT
    weight = torch.softmax(x1, dim=-1) if gate == "softmax" else torch.sigmoid(x1)
    return torch.addcmul(x, x, weight) + x2


class Brick(nn.Module):
    """The 4 r d values of one BRICK, trainable. B1 and B2 start at zero: then E(x) is x (1 + 1/d) with softmax."""

    def __init__(self, width: int, rank: int, gate: Gate) -> None:
        super().__init__()
        self.gate: Gate = gate
        shapes = ((rank, width), (width, rank))
        for name, shape in zip(FACTORS, shapes * 2, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, tokens: Tensor) -> Tensor:
        """E(x) of tokens (batch, tokens, d)."""
        return brick(tokens, cast(dict[str, Tensor], self._parameters), self.gate)


@dataclass(frozen=True)
class InPlace:
    """A step of a walk that runs a BRICK instead of the block."""

    layer: int
    brick: Brick

    def __call__(self, model: LayeredModel, tokens: Tensor) -> Tensor:
        """Return E(a), the output of the BRICK for the activations a."""
        return cast(Tensor, self.brick(tokens))


@dataclass
class Blend:
    """A step of a walk that runs the block and its BRICK in parallel. Made anew for each walk, whose `gap` it keeps."""

    layer: int
    brick: Brick
    share: float
    """Of the block in what goes on; 1 is the block alone, 0 the BRICK alone."""
    gap: Tensor | None = None
    """After the walk: the mean over all elements of (E(a) - f(a))^2, without a gradient into f."""

    def __call__(self, model: LayeredModel, tokens: Tensor) -> Tensor:
        """share f(a) + (1 - share) E(a) (Eq. 23)."""
        block, stand_in = model.block(self.layer, tokens), self.brick(tokens)
        self.gap = (stand_in - block.detach()).square().mean()
        return torch.lerp(stand_in, block, self.share)


def add_bricks(model: LayeredModel, sets: Iterable[str], rank: int, gate: Gate, seed: int) -> None:
    """Add a trainable BRICK for every block and set, as `bricks.<set>.<block>`; A is Kaiming-uniform."""
    width = cast(int, model.backbone.num_features)
    for name in sorted(sets):
        model.bricks[name] = nn.ModuleList(Brick(width, rank, gate) for _ in range(model.num_layers))
    for name, parameter in model.bricks.named_parameters(prefix="bricks"):
        if name.endswith((".a1", ".a2")):
            generator = torch.Generator().manual_seed(derived_seed(seed, "brick", name))
            fresh = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
            parameter.data.copy_(fresh)


@torch.no_grad()
def activations(model: LayeredModel, sets: Sequence[ImageSet], batch_size: int) -> Tensor:
    """Return the input of each block of the full model and the output of the last: (L + 1, images, tokens, width).

    4 (L + 1) tokens width bytes per image: 56 KB for digits_vit, 7.9 MB for ViT-B/16 at 224 px.
    """
    passed, done = torch.empty(0), 0
    for pixels in (pixels for images in sets for pixels, _ in images.batches(batch_size)):
        tokens = model.embed(model.normalize(pixels))
        if not done:
            passed = tokens.new_empty((model.num_layers + 1, sum(map(len, sets)), *tokens.shape[1:]))
        here = passed[:, done : done + len(tokens)]
        here[0] = tokens
        for layer in range(model.num_layers):
            here[layer + 1] = model.block(layer, here[layer])
        done += len(tokens)
    return passed


def distil(
    bricks: Mapping[str, Tensor], passed: Tensor, gate: Gate, epochs: int, lr: float, batch_size: int, rng: Generator
) -> dict[str, Tensor]:
    """min over theta_l of the mean of (E_l(a_{l-1}) - a_l)^2, for all blocks l at once (FedBRICK, Eq. 20).

    `bricks` are stacked factors, a1 (L, r, d) and so on; `passed` are activations (L + 1, images, tokens, d). Training
    them in parallel equals training them one after the other: no gradient of one block's loss reaches another's BRICK,
    and Adam treats each value separately.
    """
    layers, images = len(passed) - 1, passed.shape[1]
    factors = {name: bricks[name].clone().requires_grad_() for name in FACTORS}
    adam = plain_adam(lr, factors.values())
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(images)).to(passed.device)
        for chosen in torch.split(order, batch_size):
            here = passed.index_select(1, chosen).view(layers + 1, -1, passed.shape[-1])
            gaps = (brick(here[:-1], factors, gate) - here[1:]).square().mean(dim=(1, 2))
            adam.step(list(torch.autograd.grad(gaps.sum(), list(factors.values()))))
    return {name: one.detach() for name, one in factors.items()}
