"""Small timm backbones in which every tensor influences the output."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsweep.models import TimmBackbone
from fedsweep.models.timm.architecture import Architecture

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_blocks": 3, "num_heads": 3}
"""The shape of a ViT with 21 thousand parameters per block."""


def tiny_vit(pretrained: str | Path = "none", **changes: Any) -> TimmBackbone:
    """Return the configuration of a small ViT."""
    return TimmBackbone.of(
        {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": str(pretrained), **TINY, **changes}, "test"
    )


def stirred(backbone: nn.Module, seed: int = 1) -> nn.Module:
    """Add noise to every tensor of a network, because timm initialises layer scales, biases and positions near 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return backbone.eval()


def timm_network(config: TimmBackbone, num_classes: int, seed: int = 1) -> Any:
    """Return timm's own network for a configuration, with a head and noisy weights."""
    fields = ("in_chans", "img_size", "patch_size", "embed_dim", "num_blocks", "num_heads")
    architecture = Architecture(config.model, *(getattr(config, field) for field in fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone: Any = architecture.build()
        backbone.reset_classifier(num_classes)
    return stirred(backbone, seed)
