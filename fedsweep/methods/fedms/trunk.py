"""The network below FedMS's gate: its own, or one of timm."""

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
"""Channels of the trunk that ships."""


class DigitsTrunk(Config):
    """A narrow ResNet-18 for 16 px, trained on MNIST by scripts/train_digits_clip.py; ships with fedsweep."""

    name: Literal["digits_resnet"] = "digits_resnet"

    def fingerprint(self) -> str:
        """Return the digest on the card, against which `build` checks the weights."""
        return f"sha256:{_card()['sha256']}"

    def outlined(self) -> nn.Module:
        """Return the network without its weights."""
        from timm.models.resnet import BasicBlock, ResNet

        return cast(nn.Module, ResNet(cast(Any, BasicBlock), (2, 2, 2, 2), channels=SMALL, num_classes=0))

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """Return the network with its weights and its pixels' mean and deviation; raise UserError for a wrong file."""
        if weights_file.digest(WEIGHTS) != _card()["sha256"]:
            raise UserError(f"{WEIGHTS.name} is not the file that its card {WEIGHTS.stem}.json describes.")
        trunk = self.outlined()
        trunk.load_state_dict(weights_file.read(WEIGHTS))
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
        """Return timm's tag, or the digest of the file; raise UserError if the file is missing."""
        if self.pretrained in ("timm", "none"):
            return f"{self.pretrained}:{self.model}"
        return f"sha256:{weights_file.digest(weights_file.find(self.pretrained, FIELD))}"

    def outlined(self) -> nn.Module:
        """Return the network without its weights."""
        import timm

        return timm.create_model(self.model, num_classes=0)

    def build(self, seed: int) -> tuple[nn.Module, list[float], list[float]]:
        """Return the network with its weights and its pixels' mean and deviation; raise UserError if none fit."""
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
