"""BRICKs: small modules that run in place of a block, or in parallel with it (FedBRICK, Eqs. 17 to 19 and 23).

The server trains one BRICK for each block to reproduce the block's output. It computes the inputs and outputs of all
blocks only once, and then trains all BRICKs in parallel.
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
"""The function sigma of Eq. 19: softmax over a token's features (as in the paper), or the sigmoid of each feature."""
Norm = Literal["mean", "sum"]
"""The norm of Eq. 24: a mean over all elements of a batch of tokens, or a sum over the elements of each image."""
FACTORS = ("a1", "b1", "a2", "b2")


def brick(x: Tensor, factors: Mapping[str, Tensor], gate: Gate) -> Tensor:
    """Return the output of a BRICK, E(x) = x * sigma(B1 A1 x) + B2 A2 x + x, for each token x (Eqs. 17 to 19).

    Args:
        x: Tokens (..., tokens, d). The output has the same shape.
        factors: The low-rank matrices: a1 and a2 of shape (..., r, d), b1 and b2 of shape (..., d, r). The matrices of
            several BRICKs can be stacked along leading dimensions.
        gate: The function sigma.
    """
    x1 = x @ factors["a1"].mT @ factors["b1"].mT
    x2 = x @ factors["a2"].mT @ factors["b2"].mT
    weight = torch.softmax(x1, dim=-1) if gate == "softmax" else torch.sigmoid(x1)
    return torch.addcmul(x, x, weight) + x2


class Brick(nn.Module):
    """A small module of rank r that imitates a block for tokens of width d.

    The output for a token x is x * sigma(B1 A1 x) + B2 A2 x + x, where `gate` selects the function sigma. The matrices
    have 4 r d trainable values in total. B1 and B2 start at zero. If sigma is the softmax, sigma(0) is 1/d in each
    position. An untrained BRICK then returns (1 + 1/d) x, which is close to x.
    """

    def __init__(self, width: int, rank: int, gate: Gate) -> None:
        super().__init__()
        self.gate: Gate = gate
        shapes = ((rank, width), (width, rank))
        for name, shape in zip(FACTORS, shapes * 2, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the BRICK's output for tokens (batch, tokens, d), in the same shape."""
        return brick(tokens, cast(dict[str, Tensor], self._parameters), self.gate)


@dataclass(frozen=True)
class InPlace:
    """A step of a forward pass that runs a BRICK in place of a block."""

    layer: int
    brick: Brick

    def __call__(self, model: LayeredModel, tokens: Tensor) -> Tensor:
        """Return the BRICK's output for `tokens`, in the same shape."""
        return cast(Tensor, self.brick(tokens))


@dataclass
class Blend:
    """A step of a forward pass that runs a block in parallel with its BRICK and mixes the two outputs.

    The forward pass stores the squared difference between the two outputs in `gap`. Each forward pass therefore needs a
    new object.
    """

    layer: int
    brick: Brick
    share: float
    """The weight of the block, from 0 (only the BRICK) to 1 (only the block)."""
    norm: Norm = "mean"
    """The reduction of the squared differences: their mean, or their sum over the elements of an image."""
    gap: Tensor | None = None
    """The reduced squared difference (E(a) - f(a))^2, without a gradient into f; None before the forward pass.

    With the norm `mean`, it is the mean over all elements. With `sum`, it is the sum over the tokens and features of an
    image, averaged over the images.
    """

    def __call__(self, model: LayeredModel, tokens: Tensor) -> Tensor:
        """Return the mixture `share * f(a) + (1 - share) * E(a)` of the two outputs (Eq. 23).

        Here a are the tokens, f is the block, E is its BRICK, and `share` is the weight of the block.
        """
        block, stand_in = model.block(self.layer, tokens), self.brick(tokens)
        square = (stand_in - block.detach()).square()
        self.gap = square.mean() if self.norm == "mean" else square.flatten(1).sum(1).mean()
        return torch.lerp(stand_in, block, self.share)


def add_bricks(model: LayeredModel, sets: Iterable[str], rank: int, gate: Gate, seed: int) -> None:
    """Add sets of trainable BRICKs to the model. Each set contains one BRICK for each block.

    `sets` contains the names of the sets. The BRICK for block 7 in the set `x` is the module `bricks.x.7`. The matrices
    A1 and A2 of a BRICK get Kaiming-uniform values that depend on `seed`, and B1 and B2 are zero.
    """
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
    """Return the inputs of all L blocks of the full model, and the output of the last block, for all images in `sets`.

    Returns:
        A float32 tensor (L + 1, images, tokens, width). It takes `4 * (L + 1) * tokens * width` bytes for each image:
        56 KB with digits_vit, and 7.9 MB with ViT-B/16 at 224 px.
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
    """Train the BRICK of every block to reproduce the block's output (FedBRICK, Eq. 20).

    For block l with input x_{l-1}, output x_l and BRICK E_l, the loss is the mean of (E_l(x_{l-1}) - x_l)^2. Training
    all BRICKs in parallel gives the same result as training one after the other: the loss of a block has no gradient
    into another block's BRICK, and Adam treats each value separately.

    Args:
        bricks: The matrices of all BRICKs, stacked over the L blocks: `a1` and `a2` of shape (L, r, d), and `b1` and
            `b2` of shape (L, d, r).
        passed: The input x_0 of the first block and the outputs x_1 to x_L of all blocks, of shape
            (L + 1, images, tokens, d).
        gate: The function sigma of Eq. 19.
        epochs: The number of epochs.
        lr: The learning rate of Adam.
        batch_size: The number of images per step.
        rng: The generator that draws the order of the images.

    Returns:
        The trained matrices, in the shapes of `bricks`.
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
