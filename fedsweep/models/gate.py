"""FedMS's gate: how much of the global expert goes into the answer for an image."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsweep.config import Config
from fedsweep.errors import UserError
from fedsweep.models import timm_weights, weights_file
from fedsweep.models.architecture import check_name, check_pinned, timm_config
from fedsweep.models.layered import standardize_
from fedsweep.seeding import derived_seed

WEIGHTS = Path(__file__).parent / "weights" / "digits_resnet.safetensors"
FIELD = "method.gate.trunk.pretrained"
SMALL = (16, 32, 64, 64)
"""Channels of the trunk that ships."""


class DigitsTrunk(Config):
    """A narrow ResNet-18 for 16 px, trained on MNIST by scripts/train_digits_clip.py; ships with fedsweep."""

    name: Literal["digits_resnet"] = "digits_resnet"

    def fingerprint(self) -> str:
        """The digest on the card that `build` checks the weights against."""
        return f"sha256:{_card()['sha256']}"

    def outlined(self) -> nn.Module:
        """The network without its weights."""
        from timm.models.resnet import BasicBlock, ResNet

        return cast(nn.Module, ResNet(cast(Any, BasicBlock), (2, 2, 2, 2), channels=SMALL, num_classes=0))

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """The network with its weights, and the mean and deviation of its pixels.

        Raises:
            UserError: the weights file is not the shipped one.
        """
        from safetensors.torch import load_file

        if weights_file.digest(WEIGHTS) != _card()["sha256"]:
            raise UserError(f"{WEIGHTS.name} is not the file that its card {WEIGHTS.stem}.json describes.")
        trunk = self.outlined()
        trunk.load_state_dict(
            {
                name: tensor.float() if tensor.is_floating_point() else tensor
                for name, tensor in load_file(WEIGHTS).items()
            }
        )
        return trunk, _card()["mean"], _card()["std"]


class TimmTrunk(Config):
    """A network of timm without its classifier, ResNet-18 in the paper."""

    name: Literal["timm"] = "timm"
    model: str = Field("resnet18.tv_in1k", min_length=1, description="timm's name, with the tag of its weights")
    pretrained: str = Field("timm", min_length=1, description="timm, none, or a file of weights in timm's naming")

    @model_validator(mode="after")
    def _timm_has_it(self) -> Self:
        if self.pretrained not in ("timm", "none") and not weights_file.is_path(self.pretrained):
            raise ValueError(
                f"`method.gate.trunk.pretrained` must be timm, none or a file of weights, but it is {self.pretrained}"
            )
        try:
            check_name(self.model)
            if self.pretrained == "timm":
                check_pinned(self.model)
        except ValueError as error:
            raise ValueError(str(error).replace("`backbone.", "`method.gate.trunk.")) from None
        return self

    def fingerprint(self) -> str:
        """Timm's tag, or the digest of the file.

        Raises:
            UserError: the file is not there.
        """
        if self.pretrained in ("timm", "none"):
            return f"{self.pretrained}:{self.model}"
        return f"sha256:{weights_file.digest(weights_file.find(self.pretrained, FIELD))}"

    def outlined(self) -> nn.Module:
        """The network without its weights."""
        import timm

        return timm.create_model(self.model, num_classes=0)

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """The network with its weights, and the mean and deviation of its pixels.

        Raises:
            UserError: the weights are missing or of another shape.
        """
        config = timm_config(self.model)
        if self.pretrained == "timm":
            return timm_weights.create(self.model, num_classes=0), list(config.mean), list(config.std)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(seed, "gate", "trunk"))
            trunk = self.outlined()
        if self.pretrained != "none":
            weights_file.load_without(trunk, weights_file.find(self.pretrained, FIELD), "fc.")
        return trunk, list(config.mean), list(config.std)


TrunkConfig = Annotated[DigitsTrunk | TimmTrunk, Field(discriminator="name")]


class Gate(nn.Module):
    """lambda = sigmoid(BN(Linear(BN(Linear(trunk(x)))))), one number in (0, 1) for each image (FedMS, Section 3.3).

    The paper says softmax, but of its one output (Table 4 counts one) a softmax is the constant 1.
    """

    mean: Tensor
    std: Tensor

    identity: str = ""
    """What pins the trunk's content."""

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
        """What the trunk sees in uint8 images (n, 3, h, w): (n, width)."""
        pixels = images.to(self.mean.device, non_blocking=True).to(self.mean.dtype, copy=True).div_(255)
        pixels = standardize_(pixels, self.mean, self.std)
        alone = self.trunk.training and len(images) == 1  # has no variance: as in evaluation
        if alone:
            self.trunk.eval()
        found: Tensor = self.trunk(pixels)
        if alone:
            self.trunk.train()
        return found

    def forward(self, features: Tensor) -> Tensor:
        """Lambda (n,) in (0, 1) of the trunk's features (n, width)."""
        for layer in self.adapter:
            features = _normed(layer, features) if isinstance(layer, nn.BatchNorm1d) else layer(features)
        return torch.sigmoid(features.squeeze(1))

    def train(self, mode: bool = True) -> Gate:
        """A trunk that is not trained stays in evaluation: its batch norms do not move."""
        super().train(mode)
        if not self.whole:
            self.trunk.eval()
        return self


def _normed(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """As the module, but a batch of a single image, which has no variance, is normed as in evaluation."""
    own = norm.training and len(x) > 1
    mean, var, momentum = norm.running_mean, norm.running_var, norm.momentum
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, own, momentum or 0.0, norm.eps)


def build_gate(config: TrunkConfig, hidden: int | None, whole: bool, seed: int, outlined: bool = False) -> Gate:
    """The gate with its trunk's weights and a fresh adapter, each tensor from a stream of its name.

    `whole`: the trunk is trained too. With `outlined` on the meta device, and no weights are looked for.

    Raises:
        UserError: the trunk's weights are missing or do not fit.
    """
    if outlined:
        with torch.device("meta"):
            return Gate(config.outlined(), hidden, [0.5] * 3, [0.5] * 3, whole)
    with torch.random.fork_rng(devices=[]):  # constructors draw values that are overwritten at once
        trunk, mean, std = config.build(seed)
        gate = Gate(trunk, hidden, mean, std, whole)
    gate.identity = f"{config.model_dump_json()} {config.fingerprint()} {seed if _fresh(config) else ''}"
    for place, layer in enumerate(gate.adapter):
        if isinstance(layer, nn.Linear):
            generator = torch.Generator().manual_seed(derived_seed(seed, "gate", place))
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(layer.bias)
    return gate.eval()


def _fresh(config: TrunkConfig) -> bool:
    return isinstance(config, TimmTrunk) and config.pretrained == "none"


def _card() -> dict[str, Any]:
    card: dict[str, Any] = json.loads(WEIGHTS.with_suffix(".json").read_text())
    return card
