"""Structural bias: the effect of missing blocks on a client's gradients (FedBRICK, Definition 1 and Remark 2)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.randomness import derived_seed, stream
from fedsweep.models.layered import LayeredModel, Step, completed
from fedsweep.models.names import layer_of, names_within
from fedsweep.training.local_training import Objective
from fedsweep.types import Client

IMAGES = 16
"""Of each client's training images, drawn for each round."""
GRADIENT, GROWTH = "structural_bias/gradient", "structural_bias/gradient_per_missing_block"
IDENTITY, BRICK = "structural_bias/jacobian/identity", "structural_bias/jacobian/brick"
ERROR = "structural_bias/brick_error"


def bias_metrics(stand_ins: bool) -> list[str]:
    """Return the names of the metrics of every round, without those of single blocks."""
    return [GRADIENT, GROWTH, IDENTITY, *([BRICK, ERROR] if stand_ins else [])]


@dataclass(frozen=True)
class Placed:
    """A client before its local training: the blocks that it holds and its stand-ins for others."""

    client: Client
    held: tuple[int, ...]
    stand_ins: Mapping[int, Step]


def structural_bias(
    model: LayeredModel, objective: Objective, layers: Sequence[int], placed: Sequence[Placed], seed: int, round: int
) -> dict[str, float]:
    """Measure one round with the adapter that `model` holds; `layers` are the blocks of the server's model.

    For each client two passes forward and back on `IMAGES` images, a third forward through all blocks, and one back
    through each missing block and its stand-in.
    """
    ordered = sorted(placed, key=lambda one: one.client.id)
    gradients, jacobians = [], []
    for one in ordered:
        rng = stream(seed, "structural bias", round, one.client.id)
        chosen = rng.choice(len(one.client.train), size=min(IMAGES, len(one.client.train)), replace=False)
        images, labels = one.client.train.take(torch.from_numpy(chosen))
        gradients.append(gradient_distortion(model, objective, layers, one, images, labels.to(model.mean.device)))
        generator = torch.Generator().manual_seed(derived_seed(seed, "jacobian", round, one.client.id))
        jacobians += list(jacobian_discrepancy(model, layers, one, images, generator))
    relative = [distortion.relative for distortion in gradients]
    missing = [len(set(layers) - set(one.held)) for one in ordered]
    found = {GRADIENT: sum(relative) / len(relative), GROWTH: slope(missing, relative)}
    for name in bias_metrics(any(one.stand_ins for one in placed))[2:]:
        found[name] = sum(one[name] for one in jacobians) / len(jacobians) if jacobians else 0.0
    return found | _by_block(gradients)


@dataclass(frozen=True)
class Distortion:
    """||g~_l - g*_l|| by block, and over all of them as a share of ||g*||."""

    by_block: Mapping[int, float]
    relative: float


def gradient_distortion(
    model: LayeredModel, objective: Objective, layers: Sequence[int], placed: Placed, images: Tensor, labels: Tensor
) -> Distortion:
    """epsilon_l = g~_l - g*_l (Eq. 9) in the adapters of the blocks held: on the client's walk, and on all `layers`."""
    trainable = model.trainable()
    names = sorted((name for name in names_within(trainable, placed.held) if layer_of(name) is not None), key=_layer)
    if not names:
        return Distortion({}, 0.0)
    walks = completed(placed.held, placed.stand_ins), tuple(layers)
    parameters = [trainable[name] for name in names]
    own, full = (torch.autograd.grad(objective(model, images, labels, walk), parameters) for walk in walks)
    squares = [
        ((a - b).double().square().sum().item(), b.double().square().sum().item())
        for a, b in zip(own, full, strict=True)
    ]
    by_block = {
        layer: sum(error for _, (error, _) in group) ** 0.5
        for layer, group in groupby(zip(names, squares, strict=True), key=lambda pair: _layer(pair[0]))
    }
    error, whole = (sum(column) for column in zip(*squares, strict=True))
    return Distortion(by_block, (error / whole) ** 0.5 if whole else 0.0)


def jacobian_discrepancy(
    model: LayeredModel, layers: Sequence[int], placed: Placed, images: Tensor, generator: torch.Generator
) -> Iterator[dict[str, float]]:
    """Yield, for each missing block, Delta_l = E ||J - J_l||_F^2 / d of the identity and of the stand-in (Remark 2).

    By Hutchinson: E_v ||(J - J_l)^T v||^2 is the squared Frobenius norm for random signs v; one v for each image, at
    the activations of the full model. d is an activation's number of values. With a stand-in also ||E - f||^2 /
    ||x - f||^2 of the outputs: 1 is as far from the block as skipping it.
    """
    with torch.no_grad():
        tokens = model.embed(model.normalize(images))
    for layer in layers:
        x = tokens.detach().requires_grad_()
        out = model.block(layer, x)
        tokens = out.detach()
        if layer in placed.held:
            continue
        signs = torch.randint(2, x.shape, generator=generator).mul_(2).sub_(1).to(x)
        (pulled,) = torch.autograd.grad(out, x, signs)
        found = {IDENTITY: (signs - pulled).square().mean().item()}
        if step := placed.stand_ins.get(layer):
            instead = model.step(step, x)
            (other,) = torch.autograd.grad(instead, x, signs)
            found[BRICK] = (other - pulled).square().mean().item()
            found[ERROR] = ((instead - out).square().sum() / (x - out).square().sum()).item()
        yield found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the points; 0 if all x are equal."""
    across, up = np.asarray(x) - np.mean(x), np.asarray(y) - np.mean(y)
    spread = float(across @ across)
    return float(across @ up) / spread if spread else 0.0


def _by_block(gradients: Sequence[Distortion]) -> dict[str, float]:
    blocks = sorted({layer for one in gradients for layer in one.by_block})
    of_block = {layer: [one.by_block[layer] for one in gradients if layer in one.by_block] for layer in blocks}
    return {f"{GRADIENT}/block/{layer}": sum(all_) / len(all_) for layer, all_ in of_block.items()}


def _layer(name: str) -> int:
    layer = layer_of(name)
    return -1 if layer is None else layer
