"""The walk of timm's Vision Transformers, and the small one that ships with fedsweep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.models.base import Backbone, Outline, Recipe
from fedsweep.models.layered import LayeredModel

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

WEIGHTS = Path(__file__).parents[1] / "weights" / "digits_vit.safetensors"
SHAPE: dict[str, Json] = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 12, "num_heads": 4, "mlp_ratio": 2}


class LayeredViT(LayeredModel):
    """The walk of `timm.models.vision_transformer.VisionTransformer`, bit-identical to timm's own forward.

    ViT, DeiT (with or without its distillation token), DINOv2 (with or without registers), CLIP's and SigLIP's towers.
    """

    backbone: VisionTransformer
    sublayers: ClassVar = {"l0": "attn.proj", "l1": "mlp.fc2"}
    patch_projection = "backbone.patch_embed.proj"

    @staticmethod
    def fits(backbone: nn.Module) -> bool:
        """Return whether a backbone is of timm's class, with a convolutional stem and two sublayers in each block."""
        from timm.layers.patch_embed import PatchEmbed
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer

        return (
            type(backbone) in (VisionTransformer, VisionTransformerDistilled)
            and type(backbone.patch_embed) is PatchEmbed
            and all(type(block) in (Block, ResPostBlock) for block in backbone.get_submodule("blocks").children())
        )

    def embed(self, pixels: Tensor) -> Tensor:
        """Return patches, class and register tokens, with positions."""
        vit = self.backbone
        return cast(Tensor, vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(pixels)))))


class DigitsViT(Backbone):
    """The embedded backbone: 12 blocks at 16 px, pre-trained on MNIST by `fedsweep pretrain digits_vit`."""

    name: Literal["digits_vit"] = "digits_vit"

    @property
    def _outline(self) -> Outline:
        return Outline(layers=12, width=64, image_size=16, largest_rank=dict.fromkeys(self.positions, 64))

    def fingerprint(self) -> str:
        """Return the digest on the card, against which `build` checks the weights."""
        return f"sha256:{_card()['sha256']}"

    def check_weights(self, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        """Load the weights at every call: the fingerprint is the card's and does not change with the file."""
        self.build(num_classes, class_names=class_names)

    def build(self, num_classes: int, seed: int = 0, class_names: Sequence[str] | None = None) -> LayeredViT:
        """Return the pre-trained model with its MNIST head; raise UserError unless the data has ten classes."""
        from safetensors.torch import load_file

        if num_classes != 10:
            raise UserError(f"`backbone.name` digits_vit knows ten digits, but the data has {num_classes} classes.")
        card = _card()
        if hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() != card["sha256"]:
            raise UserError(f"{WEIGHTS.name} is not the file that its card {WEIGHTS.stem}.json describes.")
        model = LayeredViT(self.architecture(), mean=card["mean"], std=card["std"])
        model.backbone.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
        return model

    def outlined(self, num_classes: int) -> LayeredViT:
        """Return the model on the meta device, with shapes but no tensors."""
        with torch.device("meta"):
            backbone = self.architecture()
            backbone.reset_classifier(num_classes)
            return LayeredViT(backbone, mean=[0.5] * 3, std=[0.5] * 3)

    def recipe(self, num_classes: int) -> Recipe:
        """Return the call of timm's smallest ViT with the same shape."""
        arguments = {**SHAPE, "num_classes": num_classes}
        return Recipe(call="timm.create_model", model="vit_tiny_patch16_224", arguments=arguments, fetched=False)

    def architecture(self) -> VisionTransformer:
        """Return the untrained network."""
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**cast(dict[str, Any], SHAPE), num_classes=10)


def _card() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(WEIGHTS.with_suffix(".json").read_text()))
