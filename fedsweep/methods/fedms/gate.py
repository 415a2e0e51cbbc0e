"""FedMS's gate, which weighs the global against the local expert for each image. The server averages it (Eq. 7)."""

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
from fedsweep.models.layered import Images, LayeredModel, Walk, draw_linears, standardize_
from fedsweep.models.weight_cache import built
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import AdapterState, Batch, ClientUpdate


class GateConfig(Config):
    """The gate of the mixture (Section 3.3)."""

    trunk: TrunkConfig = Field(
        default_factory=TimmTrunk, description="network that computes the gate's features: timm or digits_resnet"
    )
    hidden: int | None = Field(
        None, gt=0, description="width of the gate's hidden layer; `null`: width of the trunk's features"
    )
    trained: Literal["adapter", "all"] = Field(
        "adapter", description="`adapter`: train only the gate's last layers; `all`: train its trunk too"
    )
    weights: Literal["loss", "aggregation"] = Field(
        "loss",
        description="`loss`: the mean of the gates weighs clients by their loss (Eq. 7); `aggregation`: by "
        "`aggregation.weights`",
    )


class Gate(nn.Module):
    """The gate lambda = sigmoid(BN(Linear(BN(Linear(trunk(x)))))), in (0, 1) for each image (FedMS, Section 3.3).

    The paper names a softmax instead of the sigmoid. But the gate has a single output (Table 4), whose softmax would
    always be 1.
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
        """Return the trunk's features (n, width) of uint8 images (n, 3, h, w)."""
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
        """Return lambda (n,) in (0, 1) from the trunk's features (n, width)."""
        for layer in self.adapter:
            features = _normed(layer, features) if isinstance(layer, nn.BatchNorm1d) else layer(features)
        return torch.sigmoid(features.squeeze(1))

    def train(self, mode: bool = True) -> Gate:
        """Switch between training and evaluation mode; a frozen trunk stays in evaluation mode."""
        super().train(mode)
        if not self.whole:
            self.trunk.eval()
        return self


def _normed(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Apply batch norm; a batch of one image has no variance, so it is normalised as in evaluation mode."""
    own = norm.training and len(x) > 1
    mean, var, momentum = norm.running_mean, norm.running_var, norm.momentum
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, own, momentum or 0.0, norm.eps)


def build_gate(config: TrunkConfig, hidden: int | None, whole: bool, seed: int, outlined: bool = False) -> Gate:
    """Return a gate with pretrained trunk and untrained adapter.

    Each tensor of the adapter is drawn from a random stream of its own, by its name.

    Args:
        config: The trunk.
        hidden: The width of the adapter's hidden layer; None for the width of the trunk's features.
        whole: Whether the trunk is trained too.
        seed: The seed of the adapter, and of a trunk without pretrained weights.
        outlined: Whether to build the gate on the meta device, without weights.

    Raises:
        UserError: The weights of the trunk are missing or do not fit.
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


@lru_cache(maxsize=16)  # called for every arm and seed of a search space
def check_gate(config: TrunkConfig, hidden: int | None, size: int, _fingerprint: str) -> None:
    """Raise UserError unless a gate with this trunk can process images of `size` pixels."""
    gate = build_gate(config, hidden, whole=False, seed=0)
    blank = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    try:
        with torch.no_grad():
            gate(gate.features(blank))
    except Exception as error:  # networks of timm raise various errors for images of an unsuitable size
        raise UserError(f"`method.gate.trunk` cannot process images of {size} pixels: {one_line(error)}.") from None


def mixing(model: LayeredModel, images: Batch) -> Tensor:
    """Return the gate's weights lambda (batch,) of the global expert."""
    gate = cast(Gate, model.gate)
    found: Tensor = gate(images.side_inputs["trunk"] if "trunk" in images.side_inputs else gate.features(images.images))
    return found


def mixed(model: LayeredModel, images: Batch, walk: Walk) -> Tensor:
    """Return logits (batch, classes): O = lambda <V_g, T_g> + (1 - lambda) <V_i, T_i>, times exp(s) (Eq. 6)."""
    mix = mixing(model, images).unsqueeze(1)
    local: Tensor = model(images, walk)
    return mix * images.side_inputs["global"] + (1 - mix) * local


def mixture_loss(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
    """Return the cross-entropy of the mixture, or of the model alone for images without side inputs."""
    logits = mixed(model, images, walk) if isinstance(images, Batch) else model(images, walk)
    return F.cross_entropy(logits, labels)


def average_gates(
    start: AdapterState, updates: Sequence[ClientUpdate], aggregation: AggregationConfig, by_loss: bool
) -> AdapterState:
    """Average the clients' gates: Z_g = sum_i (L_i / sum_j L_j) Z_i (FedMS, Eq. 7).

    L_i is the loss of client i. Without `by_loss`, it is the client's weight by `aggregation.weights` instead.
    """
    return layerwise_mean(start, updates, aggregation, (lambda update: update.metrics["loss"]) if by_loss else None)
