"""Backbones as layered models, and their adapters."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from fedsweep.models.clip.backbone import ClipBackbone, DigitsClip
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import LoraConfig, add_lora, relative_norm, train_head_alone
from fedsweep.models.timm.backbone import TimmBackbone
from fedsweep.models.timm.digits_vit import DigitsViT
from fedsweep.models.weight_cache import built

BackboneConfig = Annotated[DigitsViT | TimmBackbone | DigitsClip | ClipBackbone, Field(discriminator="name")]


def build_model(
    backbone: BackboneConfig,
    lora: LoraConfig | None,
    num_classes: int,
    seed: int,
    class_names: Sequence[str] | None = None,
    freeze_a: bool = False,
) -> LayeredModel:
    """Return the frozen backbone in evaluation mode, with a trainable head and, with `lora`, fresh adapters.

    With `class_names`, a weights file's head is kept only if its card names the same classes, or none. With `freeze_a`
    the factor A of every adapter stays at its start, which is the same for all clients.
    """
    with torch.random.fork_rng(devices=[]):  # constructors draw values that are overwritten at once
        content, names = backbone.fingerprint(), None if class_names is None else tuple(class_names)
        drawn = seed if content == "none" else 0  # with weights, only a fresh head depends on the seed
        model = built("backbone", backbone, content, num_classes, drawn, names)
        if model.head_is_fresh:
            model.draw_head(seed)
        if lora is None:
            train_head_alone(model)
        else:
            add_lora(model, lora, seed, freeze_a)
    model.class_names = model.class_names or tuple(class_names or ())
    return model.eval()


__all__ = [
    "BackboneConfig",
    "ClipBackbone",
    "DigitsClip",
    "DigitsViT",
    "LayeredModel",
    "LoraConfig",
    "TimmBackbone",
    "add_lora",
    "build_model",
    "relative_norm",
    "train_head_alone",
]
