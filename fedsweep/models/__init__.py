"""Backbones as layered models, and their adapters."""

import torch

from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import LoraConfig, add_lora
from fedsweep.models.vit import DigitsViT

BackboneConfig = DigitsViT


def build_model(backbone: BackboneConfig, lora: LoraConfig, num_classes: int, seed: int) -> LayeredModel:
    """The frozen backbone with fresh adapters, in evaluation mode; adapters and head are trainable."""
    with torch.random.fork_rng(devices=[]):  # constructors draw values that are overwritten at once
        model = backbone.build(num_classes)
        add_lora(model, lora, seed)
    return model.eval()


__all__ = ["BackboneConfig", "LayeredModel", "LoraConfig", "build_model"]
