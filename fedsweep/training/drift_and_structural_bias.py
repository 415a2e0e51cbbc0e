"""The metrics of client drift and structural bias, as defined by FedBRICK.

Client drift is the distance between the clients' models after local training (Fig. 4). Structural bias is the effect of
missing blocks on a client's gradients before local training (Definition 1 and Remark 2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.common.randomness import derived_seed, stream
from fedsweep.models.client_rank import padded
from fedsweep.models.layered import LayeredModel, Step, Walk, completed
from fedsweep.models.names import layer_of, names_within
from fedsweep.training.local_training import Objective
from fedsweep.types import AdapterState, Client, ClientUpdate

REPRESENTATION, HEAD = "drift/representation", "drift/head"
DRIFT_METRICS = [REPRESENTATION, HEAD]
IMAGES = 16
"""The number of training images on which the structural bias of a client is measured in each round."""
GRADIENT, GROWTH = "structural_bias/gradient", "structural_bias/gradient_per_missing_block"
IDENTITY, BRICK = "structural_bias/jacobian/identity", "structural_bias/jacobian/brick"
ERROR = "structural_bias/brick_error"


def bias_metrics(stand_ins: bool) -> list[str]:
    """Return the names of the structural-bias metrics that are not specific to one block.

    Structural bias is the effect of missing blocks on a client's gradients. `stand_ins` is true if clients have
    stand-ins, which are modules that replace missing blocks.
    """
    return [GRADIENT, GROWTH, IDENTITY, *([BRICK, ERROR] if stand_ins else [])]


@dataclass(frozen=True)
class Placed:
    """A client of the cohort, with the blocks that it holds and its stand-ins.

    A stand-in is a module that replaces a missing block.
    """

    client: Client
    held: tuple[int, ...]
    stand_ins: Mapping[int, Step]

    @property
    def walk(self) -> Walk:
        """The steps of the client's forward pass, in order: the blocks that it holds, and its stand-ins."""
        return completed(self.held, self.stand_ins)


def drift(
    model: LayeredModel,
    before: AdapterState,
    after: AdapterState,
    updates: Sequence[ClientUpdate],
    placed: Sequence[Placed],
    images: Tensor,
) -> dict[str, float]:
    """Return the metrics of client drift as mean cosine distances (1 - cos).

    The representation drift is the mean distance between the clients' representations of the same images. The head
    drift is the mean distance between each client's update of the head and the server's update. The computation takes
    one forward pass of the images for each client.

    Args:
        model: The model that all clients share in memory; its adapter is overwritten.
        before: The adapter that the server sent.
        after: The adapter that the server aggregated.
        updates: The updates of the cohort.
        placed: The clients of the cohort, with their blocks.
        images: uint8 images (n, 3, h, w).
    """
    ordered, walks = sorted(updates, key=lambda update: update.client), {one.client.id: one.walk for one in placed}
    held = [before | padded(one.adapter, before) for one in ordered]
    features = [representation(model, own, walks[one.client], images) for own, one in zip(held, ordered, strict=True)]
    heads = [head_distance(before, after, one.adapter) for one in ordered]
    return {REPRESENTATION: mean_pairwise_distance(torch.stack(features)), HEAD: sum(heads) / len(heads)}


@torch.inference_mode()
def representation(model: LayeredModel, adapter: AdapterState, walk: Walk, images: Tensor) -> Tensor:
    """Return the head's input (n, width) for n images.

    Args:
        model: The model.
        adapter: The tensors to load into the model, keyed by name.
        walk: The steps of the forward pass. A step is a block or a module that replaces a block.
        images: uint8 images (n, 3, h, w).
    """
    model.load_adapter(adapter)
    return model.features(model.walk(images, walk))


def mean_pairwise_distance(features: Tensor) -> float:
    """Return the mean cosine distance (1 - cos) over all pairs of clients and all images.

    `features` has the shape (clients, n, width) for n images. The distance is 0 for a single client.
    """
    clients = len(features)
    if clients == 1:
        return 0.0
    # |sum of unit vectors|^2 = K + sum over ordered pairs of their cosines
    total = F.normalize(features.double(), dim=-1).sum(0).square().sum(-1)
    return max(0.0, 1 - ((total - clients) / (clients * (clients - 1))).mean().item())


def head_distance(before: AdapterState, after: AdapterState, update: AdapterState) -> float:
    """Return the cosine distance (1 - cos) between a client's and the server's change to the heads.

    Both changes are differences from the heads before the round.

    Args:
        before: The tensors before the round.
        after: The tensors that the server aggregated.
        update: The tensors that the client trained.
    """
    names = [name for name in update if name.startswith((LayeredModel.head_prefix, "heads."))]
    own, global_ = (
        torch.cat([(state[name] - before[name]).flatten().double() for name in names]) for state in (update, after)
    )
    return max(0.0, 1 - F.cosine_similarity(own, global_, dim=0).item())  # rounding errors could make it negative


def structural_bias(
    model: LayeredModel, objective: Objective, layers: Sequence[int], placed: Sequence[Placed], seed: int, round: int
) -> dict[str, float]:
    """Return a round's metrics of structural bias, the effect of missing blocks on the clients' gradients.

    The metrics are measured on a few training images of each client. The computation takes three forward passes and two
    backward passes for each client, and another backward pass through each missing block and its stand-in, the module
    that replaces it.

    Args:
        model: The full model, with the server's adapter.
        objective: The loss that clients minimise.
        layers: The blocks of the server's model.
        placed: The clients of the cohort, with their blocks and stand-ins.
        seed: The seed of the run.
        round: The number of the round.
    """
    ordered = sorted(placed, key=lambda one: one.client.id)
    by_block: dict[int, list[float]] = {}
    relative, jacobians = [], []
    for one in ordered:
        rng = stream(seed, "structural bias", round, one.client.id)
        chosen = rng.choice(len(one.client.train), size=min(IMAGES, len(one.client.train)), replace=False)
        images, labels = one.client.train.take(torch.from_numpy(chosen))
        errors, share = gradient_distortion(model, objective, layers, one, images, labels.to(model.mean.device))
        relative.append(share)
        for layer, error in errors.items():
            by_block.setdefault(layer, []).append(error)
        generator = torch.Generator().manual_seed(derived_seed(seed, "jacobian", round, one.client.id))
        jacobians += list(jacobian_discrepancy(model, layers, one, images, generator))
    missing = [len(set(layers) - set(one.held)) for one in ordered]
    found = {GRADIENT: sum(relative) / len(relative), GROWTH: slope(missing, relative)}
    for name in bias_metrics(any(one.stand_ins for one in placed))[2:]:
        found[name] = sum(one[name] for one in jacobians) / len(jacobians) if jacobians else 0.0
    return found | {f"{GRADIENT}/block/{layer}": sum(all_) / len(all_) for layer, all_ in sorted(by_block.items())}


def gradient_distortion(
    model: LayeredModel, objective: Objective, layers: Sequence[int], placed: Placed, images: Tensor, labels: Tensor
) -> tuple[dict[int, float], float]:
    """Measure how much missing blocks change the gradients of the adapters that a client holds.

    The change in block l is epsilon_l = g~_l - g*_l (FedBRICK, Eq. 9). g~_l is the gradient when the forward pass runs
    the client's own blocks and stand-ins. g*_l is the gradient when the forward pass runs all blocks in `layers`.

    Returns:
        A dict that maps the number of each held block l to ||epsilon_l||, and the relative change ||epsilon|| / ||g*||
        over all held blocks.
    """
    trainable = model.trainable()
    within = (name for name in names_within(trainable, placed.held) if layer_of(name) is not None)
    names = sorted(within, key=lambda name: cast(int, layer_of(name)))
    if not names:
        return {}, 0.0
    parameters, walks = [trainable[name] for name in names], (placed.walk, tuple(layers))
    own, full = (torch.autograd.grad(objective(model, images, labels, walk), parameters) for walk in walks)
    squares = [
        ((a - b).double().square().sum().item(), b.double().square().sum().item())
        for a, b in zip(own, full, strict=True)
    ]
    by_block = {
        cast(int, layer): sum(error for _, (error, _) in group) ** 0.5
        for layer, group in groupby(zip(names, squares, strict=True), key=lambda pair: layer_of(pair[0]))
    }
    error, whole = (sum(column) for column in zip(*squares, strict=True))
    return by_block, (error / whole) ** 0.5 if whole else 0.0


def jacobian_discrepancy(
    model: LayeredModel, layers: Sequence[int], placed: Placed, images: Tensor, generator: torch.Generator
) -> Iterator[dict[str, float]]:
    """Yield, for each missing block, the distances between the block's Jacobian and those of its replacements.

    A missing block is a block in `layers` that the client `placed` does not hold. The block has up to two replacements:
    the identity, which skips the block, and the client's stand-in, if there is one.

    The distance is the mean of ||J - J_l||_F^2 / d over the images (FedBRICK, Remark 2), where J is the Jacobian of the
    replacement, J_l is the Jacobian of block l, and d is the number of values in an activation. Both Jacobians are
    taken at the activations of the full model. The norm is estimated by Hutchinson's method: if the entries of v are
    random signs, the mean of ||(J - J_l)^T v||^2 is the squared Frobenius norm. One v is drawn for each image.

    If the client has a stand-in E for a missing block f, the block's dict also contains the relative error of E. This
    error is ||E(x) - f(x)||^2 / ||x - f(x)||^2 for inputs x of the block. An error of 1 means that E is no better than
    skipping the block.
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
    """Return the slope of the least-squares line through the points (x, y); 0 if all values of `x` are equal."""
    across, up = np.asarray(x) - np.mean(x), np.asarray(y) - np.mean(y)
    spread = float(across @ across)
    return float(across @ up) / spread if spread else 0.0
