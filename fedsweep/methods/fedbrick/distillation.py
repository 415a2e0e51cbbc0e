"""Layer-wise distillation on the server: the BRICKs of all blocks in parallel, on activations computed once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedsweep.methods.fedbrick.bricks import FACTORS, Gate, brick
from fedsweep.models.layered import LayeredModel
from fedsweep.training.optimizers import Adam, AdamConfig
from fedsweep.types import ImageSet


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
    bricks: Mapping[str, Tensor],
    passed: Tensor,
    gate: Gate,
    epochs: int,
    lr: float,
    batch_size: int,
    rng: np.random.Generator,
) -> dict[str, Tensor]:
    """min over theta_l of the mean of (E_l(a_{l-1}) - a_l)^2, for all blocks l at once (FedBRICK, Eq. 20).

    `bricks` are stacked factors, a1 (L, r, d) and so on; `passed` are activations (L + 1, images, tokens, d). Training
    them in parallel equals training them one after the other: no gradient of one block's loss reaches another's BRICK,
    and Adam treats each value separately.
    """
    layers, images = len(passed) - 1, passed.shape[1]
    factors = {name: bricks[name].clone().requires_grad_() for name in FACTORS}
    config = AdamConfig(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_norm=None)
    adam = Adam(config, [factors[name].data for name in FACTORS])
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(images)).to(passed.device)
        for chosen in torch.split(order, batch_size):
            here = passed.index_select(1, chosen).view(layers + 1, -1, passed.shape[-1])
            gaps = (brick(here[:-1], factors, gate) - here[1:]).square().mean(dim=(1, 2))
            adam.step(list(torch.autograd.grad(gaps.sum(), list(factors.values()))))
    return {name: one.detach() for name, one in factors.items()}
