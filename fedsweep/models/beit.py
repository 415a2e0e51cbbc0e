"""timm's BEiT and BEiT v2, walked layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedsweep.models.layered import LayeredModel

if TYPE_CHECKING:
    from timm.models.beit import Beit


class LayeredBeit(LayeredModel):
    """The walk of `timm.models.beit.Beit`: relative positions in each block, or one table that all blocks share."""

    backbone: Beit
    sublayers: ClassVar = {"l0": "attn.proj", "l1": "mlp.fc2"}
    patch_projection = "backbone.patch_embed.proj"

    @staticmethod
    def fits(backbone: nn.Module) -> bool:
        """Whether a timm model has this walk."""
        from timm.models.beit import Beit, Block

        return type(backbone) is Beit and all(type(block) is Block for block in backbone.blocks)

    def embed(self, pixels: Tensor) -> Tensor:
        """Patches, class token and, where the model has them, absolute positions."""
        beit = self.backbone
        patches = beit.patch_embed(pixels)
        tokens = torch.cat((beit.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        if beit.pos_embed is not None:
            tokens = tokens + beit.pos_embed
        out: Tensor = beit.pos_drop(tokens)
        return out

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Attention with its relative positions and MLP, with their residual connections."""
        shared = self.backbone.rel_pos_bias
        out: Tensor = self.backbone.blocks[layer](tokens, shared_rel_pos_bias=None if shared is None else shared())
        return out
