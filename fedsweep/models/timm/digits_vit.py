"""The small Vision Transformer that is shipped with fedsweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.models import weights_file
from fedsweep.models.base import Backbone, Outline, Recipe
from fedsweep.models.timm.transformer_families import LayeredViT

WEIGHTS = Path(__file__).parents[1] / "weights" / "digits_vit.safetensors"
DIGITS_SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 12, "num_heads": 4, "mlp_ratio": 2}


class DigitsViT(Backbone):
    """A small ViT that is shipped with fedsweep and was pre-trained on MNIST.

    The model has 12 blocks of width 64 and takes images of 16 x 16 pixels.
    """

    name: Literal["digits_vit"] = "digits_vit"

    @property
    def _outline(self) -> Outline:
        return Outline(layers=12, width=64, image_size=16, largest_rank=dict.fromkeys(self.positions, 64))

    def fingerprint(self) -> str:
        """Return `sha256:` followed by the SHA-256 of the weights file.

        Raises:
            UserError: The file does not match the SHA-256 on its JSON card.
        """
        return f"sha256:{weights_file.read_card(WEIGHTS)['sha256']}"

    def build(self, num_classes: int, seed: int = 0, class_names: Sequence[str] | None = None) -> LayeredViT:
        """Return the pre-trained model with its head for MNIST, in evaluation mode on the CPU.

        Raises:
            UserError: The data set does not have ten classes.
        """
        _check_classes(num_classes)
        card = weights_file.read_card(WEIGHTS)
        model = LayeredViT(self.architecture(), mean=card["mean"], std=card["std"])
        model.backbone.load_state_dict(weights_file.read(WEIGHTS))
        return model

    def check_weights(self, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        """Raise UserError unless the data set has ten classes and the weights file is intact.

        Intact weights are known to fit the model, so timm is not imported.
        """
        _check_classes(num_classes)
        self.fingerprint()

    def outlined(self, num_classes: int, class_names: Sequence[str] | None = None) -> LayeredViT:
        """Return the model on torch's meta device, where tensors have shapes but no values.

        `class_names` has no effect, because no shape depends on the names.
        """
        with torch.device("meta"):
            backbone = self.architecture()
            backbone.reset_classifier(num_classes)
            return LayeredViT(backbone, mean=[0.5] * 3, std=[0.5] * 3)

    def recipe(self, num_classes: int) -> Recipe:
        """Return the call of a timm function that builds this network by changing the sizes of timm's ViT-Tiny."""
        arguments: dict[str, Json] = {**DIGITS_SHAPE, "num_classes": num_classes}
        return Recipe(call="timm.create_model", model="vit_tiny_patch16_224", arguments=arguments, fetched=False)

    def architecture(self) -> Any:
        """Return the network, timm's VisionTransformer, with random weights."""
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**cast(dict[str, Any], DIGITS_SHAPE), num_classes=10)


def _check_classes(num_classes: int) -> None:
    if num_classes != 10:
        raise UserError(
            f"`backbone.name` digits_vit classifies ten digits, but the data set has {num_classes} classes."
        )
