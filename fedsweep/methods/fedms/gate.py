"""FedMS's gate, a network that weighs the global expert against the local expert for each image.

The server averages the clients' gates (Eq. 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, one_line
from fedsweep.methods.fedms.trunk import TimmTrunk, TrunkConfig
from fedsweep.models.initial_values import draw_linears
from fedsweep.models.layered import Images, LayeredModel, Walk, standardize_
from fedsweep.models.weight_cache import built
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import AdapterState, Batch, ClientUpdate


class GateConfig(Config):
    """The settings of the gate, which mixes the global and the local expert (FedMS, Section 3.3)."""

    trunk: TrunkConfig = Field(
        default_factory=TimmTrunk,
        description="trunk of the gate, the network that computes image features: timm or digits_resnet",
    )
    hidden: int | None = Field(
        None, gt=0, description="width of the gate's hidden layer; `null`: width of the trunk's features"
    )
    trained: Literal["adapter", "all"] = Field(
        "adapter", description="trained part of the gate. `adapter`: the layers after the trunk; `all`: the trunk too"
    )
    weights: Literal["loss", "aggregation"] = Field(
        "loss",
        description="weights of the clients in the mean of the gates. `loss`: the clients' losses (Eq. 7); "
        "`aggregation`: the weights that `aggregation.weights` sets",
    )


class Gate(nn.Module):
    """A network that computes the weight lambda of the global expert for each image (FedMS, Section 3.3).

    The gate's trunk computes image features. From these features, the gate's adapter, which contains batch norms (BN),
    computes lambda = sigmoid(BN(Linear(BN(Linear(features))))), a number in (0, 1). The FedMS paper specifies a softmax
    instead of a sigmoid, but the gate has a single output (Table 4), and the softmax of a single value is always 1.
    """

    mean: Tensor
    std: Tensor

    identity: str = ""
    """A string that identifies the trunk and its weights."""

    def __init__(self, trunk: nn.Module, hidden: int | None, mean: list[float], std: list[float], whole: bool) -> None:
        super().__init__()
        width = cast(int, trunk.num_features)
        hidden = hidden or width
        self.whole, self.trunk = whole, trunk
        self.adapter = nn.Sequential(
            nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1), nn.BatchNorm1d(1)
        )
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        trunk.requires_grad_(whole)

    def features(self, images: Tensor) -> Tensor:
        """Return the image features (n, width) of uint8 images (n, 3, h, w).

        The gate's trunk, a pre-trained network, computes these features.
        """
        pixels = images.to(self.mean.device, non_blocking=True).to(self.mean.dtype, copy=True).div_(255)
        pixels = standardize_(pixels, self.mean, self.std)
        alone = self.trunk.training and len(images) == 1  # one image has no variance
        if alone:
            self.trunk.eval()
        found: Tensor = self.trunk(pixels)
        if alone:
            self.trunk.train()
        return found

    def forward(self, features: Tensor) -> Tensor:
        """Return the weights lambda (n,) of the global expert for n images, each between 0 and 1.

        Args:
            features: The image features (n, width) that the function `features` returned.
        """
        for layer in self.adapter:
            features = _normed(layer, features) if isinstance(layer, nn.BatchNorm1d) else layer(features)
        return torch.sigmoid(features.squeeze(1))

    def train(self, mode: bool = True) -> Gate:
        """Set training or evaluation mode for the gate.

        The trunk, which computes the image features, stays in evaluation mode if it is frozen.
        """
        super().train(mode)
        if not self.whole:
            self.trunk.eval()
        return self


def _normed(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Apply batch norm. A batch of one image has no variance, so it is normalised by the running statistics."""
    own = norm.training and len(x) > 1
    mean, var, momentum = norm.running_mean, norm.running_var, cast(float, norm.momentum)
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, own, momentum, norm.eps)


def build_gate(config: TrunkConfig, hidden: int | None, whole: bool, seed: int, outlined: bool = False) -> Gate:
    """Return a gate with a pre-trained trunk and an untrained adapter.

    The trunk is the network that computes image features. The initial value of each tensor of the adapter depends only
    on `seed` and the tensor's name.

    Args:
        config: The configuration of the trunk.
        hidden: The width of the adapter's hidden layer; None for the width of the trunk's features.
        whole: Whether the trunk is trained too.
        seed: The seed of the initial values of the adapter, and of a trunk without pre-trained weights.
        outlined: Whether to build the gate on the meta device, without weights.

    Raises:
        UserError: The weights of the trunk are missing or do not fit its network.
    """
    if outlined:
        with torch.device("meta"):
            return Gate(config.outlined(), hidden, [0.5] * 3, [0.5] * 3, whole)
    with torch.random.fork_rng(devices=[]):  # constructors draw random values that are then overwritten
        content = config.fingerprint()
        drawn = seed if content.startswith("none:") else 0
        trunk, mean, std = built("beside", config, content, drawn)
        gate = Gate(trunk, hidden, mean, std, whole)
    gate.identity = f"{config.model_dump_json()} {content} {drawn}"
    draw_linears(gate.adapter, seed, "gate")
    return gate.eval()


@lru_cache(maxsize=16)  # because it is called for every arm and seed of a search space
def check_gate(config: TrunkConfig, hidden: int | None, size: int, _fingerprint: str) -> None:
    """Raise UserError unless a gate with this trunk can process images of `size` by `size` pixels.

    The trunk is the network that computes the gate's image features. `_fingerprint` identifies its weights, so that a
    cached result is never used for other weights.
    """
    gate = build_gate(config, hidden, whole=False, seed=0)
    blank = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    try:
        with torch.no_grad():
            gate(gate.features(blank))
    except Exception as error:  # networks of timm raise various errors for images of an unsuitable size
        raise UserError(f"`method.gate.trunk` cannot process images of {size} pixels: {one_line(error)}.") from None


def mixing(model: LayeredModel, images: Batch) -> Tensor:
    """Run the model's gate on a batch of images, and return the weights lambda (batch,) of the global expert."""
    gate = cast(Gate, model.gate)
    found: Tensor = gate(images.side_inputs["trunk"] if "trunk" in images.side_inputs else gate.features(images.images))
    return found


def mixed(model: LayeredModel, images: Batch, walk: Walk) -> Tensor:
    """Return the logits (batch, classes) of the mixture of the global and the local expert (Eq. 6).

    For each image, the gate computes the weight lambda of the global expert; the local expert has the weight 1 -
    lambda. The result is the weighted sum of the two experts' logits. A logit is a cosine similarity times CLIP's logit
    scale.

    Args:
        model: The model, into which the local expert and the gate have been loaded.
        images: The images, with the logits of the global expert as the side input `global`.
        walk: The blocks that the local expert runs.
    """
    mix = mixing(model, images).unsqueeze(1)
    local: Tensor = model(images, walk)
    return mix * images.side_inputs["global"] + (1 - mix) * local


def mixture_loss(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
    """Return the cross-entropy of the mixture of the global and the local expert.

    Args:
        model: The model, into which the local expert and the gate have been loaded.
        images: A batch with the global expert's logits as the side input `global`. If it is a plain tensor of images,
            the loss is that of the local expert alone.
        labels: The labels (batch,).
        walk: The blocks that the local expert runs.
    """
    logits = mixed(model, images, walk) if isinstance(images, Batch) else model(images, walk)
    return F.cross_entropy(logits, labels)


def average_gates(
    start: AdapterState, updates: Sequence[ClientUpdate], aggregation: AggregationConfig, by_loss: bool
) -> AdapterState:
    """Return `start`, with the gate replaced by the weighted mean of the clients' gates (FedMS, Eq. 7).

    The mean is Z_g = sum_i (L_i / sum_j L_j) Z_i, where Z_i is the gate of client i. The weight L_i is the client's
    loss if `by_loss` is true, and otherwise the weight that `aggregation` gives to the client.
    """
    return layerwise_mean(start, updates, aggregation, (lambda update: update.metrics["loss"]) if by_loss else None)
