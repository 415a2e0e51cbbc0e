"""Backbones that run block by block, and their LoRA adapters."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from fedsweep.models.clip.backbone import ClipBackbone, DigitsClip
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import Adapters, LoraConfig, add_lora, draw_adapters, relative_norm, train_head_alone
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
    """Return a model in evaluation mode with a frozen backbone, a trainable head and untrained LoRA adapters.

    Args:
        backbone: The configuration of the backbone.
        lora: The configuration of the adapters; None for a model without adapters.
        num_classes: The number of outputs of the head.
        seed: The seed of the adapters' initial values and of all parameters that have no pre-trained values.
        class_names: The names of the classes, in the order of the outputs. If the JSON card of a weights file lists
            other names, the head in the file is not used.
        freeze_a: Whether LoRA's factor A keeps its initial value, which is the same for all clients.

    Raises:
        UserError: The weights are missing or do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):  # the constructors' random values are overwritten below
        content, names = backbone.fingerprint(), None if class_names is None else tuple(class_names)
        drawn = seed if content == "none" else 0  # with pre-trained weights, only a fresh head depends on the seed
        adapters = None if lora is None else Adapters(lora, freeze_a)
        model = built("backbone", backbone, content, num_classes, drawn, names, change=adapters)
        if model.head_is_fresh:
            model.draw_head(seed)
        if adapters is None:
            train_head_alone(model)
        else:
            draw_adapters(model, seed)
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
