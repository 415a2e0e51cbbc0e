"""timm's EVA, EVA-02, DINOv3 and their kin with rotary positions, walked layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedsweep.models.layered import LayeredModel

if TYPE_CHECKING:
    from timm.models.eva import Eva


class LayeredEva(LayeredModel):
    """The walk of `timm.models.eva.Eva`.

    Rotary positions depend on the grid alone, so they are computed once, in evaluation mode: the random shifts that
    DINOv3 gives them in its own pre-training would move frozen features. In mixed mode each layer has its own.
    """

    backbone: Eva
    rope: Tensor | None
    sublayers: ClassVar = {"l0": "attn.proj", "l1": "mlp.fc2"}
    patch_projection = "backbone.patch_embed.proj"

    def __init__(self, backbone: Eva, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(backbone, mean, std)
        backbone.eval()
        with torch.no_grad():
            stem = backbone.patch_embed.proj
            image = stem.weight.new_zeros(1, stem.in_channels, *backbone.patch_embed.img_size)
            _, rope = backbone._pos_embed(backbone.patch_embed(image))
        self.register_buffer("rope", rope, persistent=False)

    @staticmethod
    def fits(backbone: nn.Module) -> bool:
        """Whether a timm model has this walk."""
        from timm.layers.patch_embed import PatchEmbed
        from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm

        return (
            type(backbone) is Eva
            and type(backbone.patch_embed) is PatchEmbed
            and all(type(block) in (EvaBlock, EvaBlockPostNorm) for block in backbone.blocks)
        )

    def embed(self, pixels: Tensor) -> Tensor:
        """Patches, class and register tokens and, where the model has them, absolute positions."""
        eva = self.backbone
        tokens, _ = eva._pos_embed(eva.patch_embed(pixels))
        out: Tensor = eva.norm_pre(tokens)
        return out

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Attention with rotary positions and MLP, with their residual connections."""
        rope = self.rope[layer] if self.rope is not None and self.backbone.rope_mixed else self.rope
        out: Tensor = self.backbone.blocks[layer](tokens, rope=rope)
        return out
