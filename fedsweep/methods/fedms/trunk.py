"""The trunk of FedMS's gate, which computes image features with a timm network or a small network for digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import nn

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.models import weights_file
from fedsweep.models.timm.architecture import check_name, check_pinned, timm_config
from fedsweep.models.timm.weights import pretrained_network

WEIGHTS = Path(__file__).parent / "weights" / "digits_resnet.safetensors"
FIELD = "method.gate.trunk.pretrained"
SMALL = (16, 32, 64, 64)
"""The numbers of channels in the four stages of the ResNet-18 that is included in fedsweep."""


class DigitsTrunk(Config):
    """A narrow ResNet-18 for images of 16 by 16 pixels, whose pre-trained weights are included in fedsweep.

    The network was trained on MNIST by `scripts/train_digits_clip.py`.
    """

    name: Literal["digits_resnet"] = "digits_resnet"

    def fingerprint(self) -> str:
        """Return the SHA-256 digest of the weights, which is recorded in a JSON file next to the weights file."""
        return f"sha256:{_card()['sha256']}"

    def outlined(self) -> nn.Module:
        """Return the network without loading its pre-trained weights."""
        from timm.models.resnet import BasicBlock, ResNet

        return cast(nn.Module, ResNet(cast(Any, BasicBlock), (2, 2, 2, 2), channels=SMALL, num_classes=0))

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """Return the pre-trained network and the values that normalise its input pixels.

        Returns:
            The network, and the means and the standard deviations of the three colour channels.

        Raises:
            UserError: The weights file does not have the digest that is recorded in the JSON file next to it.
        """
        if weights_file.digest(WEIGHTS) != _card()["sha256"]:
            raise UserError(
                f"{WEIGHTS.name} does not match the SHA-256 digest in {WEIGHTS.stem}.json; reinstall fedsweep."
            )
        trunk = self.outlined()
        trunk.load_state_dict(weights_file.read(WEIGHTS))
        return trunk, _card()["mean"], _card()["std"]


class TimmTrunk(Config):
    """A timm network that computes image features; its classifier is removed.

    The FedMS paper uses ResNet-18.
    """

    name: Literal["timm"] = "timm"
    model: str = Field(
        "resnet18.tv_in1k", min_length=1, description="name of the network in timm, with the tag of its weights"
    )
    pretrained: str = Field(
        "timm",
        min_length=1,
        description="pre-trained weights of timm (`timm`), random weights (`none`), or a weights file with timm's "
        "tensor names",
    )

    @model_validator(mode="after")
    def _timm_has_it(self) -> Self:
        if self.pretrained not in ("timm", "none") and not weights_file.is_path(self.pretrained):
            raise ValueError(
                f"`method.gate.trunk.pretrained` must be timm, none or a weights file, but it is {self.pretrained}"
            )
        try:
            check_name(self.model)
            if self.pretrained == "timm":
                check_pinned(self.model)
        except ValueError as error:
            raise ValueError(str(error).replace("`backbone.", "`method.gate.trunk.")) from None
        return self

    def fingerprint(self) -> str:
        """Return a string that identifies the weights: the network's name in timm, or the digest of the weights file.

        Raises:
            UserError: The weights file is missing.
        """
        if self.pretrained in ("timm", "none"):
            return f"{self.pretrained}:{self.model}"
        return f"sha256:{weights_file.digest(weights_file.find(self.pretrained, FIELD))}"

    def outlined(self) -> nn.Module:
        """Return the network without loading its pre-trained weights."""
        import timm

        return timm.create_model(self.model, num_classes=0)

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """Return the network with its weights, and the values that normalise its input pixels.

        Returns:
            The network, and the means and the standard deviations of the three colour channels.

        Raises:
            UserError: The weights are missing or do not fit the network.
        """
        config = timm_config(self.model)
        if self.pretrained == "timm":
            return pretrained_network(self.model, num_classes=0), list(config.mean), list(config.std)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(seed, "gate", "trunk"))
            trunk = self.outlined()
        if self.pretrained != "none":
            weights_file.load_without(trunk, weights_file.find(self.pretrained, FIELD), "fc.")
        return trunk, list(config.mean), list(config.std)


TrunkConfig = Annotated[DigitsTrunk | TimmTrunk, Field(discriminator="name")]


def _card() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(WEIGHTS.with_suffix(".json").read_text()))
