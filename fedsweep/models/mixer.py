"""timm's MLP-Mixers, walked layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fedsweep.models.layered import LayeredModel

if TYPE_CHECKING:
    from timm.models.mlp_mixer import MlpMixer


class LayeredMixer(LayeredModel):
    """The walk of `timm.models.mlp_mixer.MlpMixer` with its MixerBlock: an MLP over tokens, then one over channels."""

    backbone: MlpMixer
    sublayers: ClassVar = {"l0": "mlp_tokens.fc2", "l1": "mlp_channels.fc2"}
    patch_projection = "backbone.stem.proj"

    @staticmethod
    def fits(backbone: nn.Module) -> bool:
        """Whether a timm model has this walk; gMLP's and ResMLP's blocks are of another structure."""
        from timm.models.mlp_mixer import MixerBlock, MlpMixer

        return type(backbone) is MlpMixer and all(type(block) is MixerBlock for block in backbone.blocks)

    def embed(self, pixels: Tensor) -> Tensor:
        """Patches; a Mixer has no positions and no class token."""
        tokens: Tensor = self.backbone.stem(pixels)
        return tokens


def reshaped(
    model: str,
    img_size: int,
    in_chans: int,
    patch_size: int | None,
    embed_dim: int | None,
    num_blocks: int | None,
) -> MlpMixer:
    """A Mixer like timm's `model`, with a head of one class, of another shape; None keeps what the model has.

    timm's entry points fix these arguments and refuse them as changes, so the class is called here. The widths of
    the two MLPs keep their ratio to the width of a token.

    Raises:
        ValueError: the model's MLPs are gated ones, which need arguments of their own.
    """
    from timm.models.mlp_mixer import MlpMixer

    shape = mixer_shape(model, patch_size, embed_dim, num_blocks)
    return MlpMixer(num_classes=1, img_size=img_size, in_chans=in_chans, **shape)


def mixer_shape(model: str, patch_size: int | None, embed_dim: int | None, num_blocks: int | None) -> dict[str, Any]:
    """The class's own arguments for a Mixer like timm's `model`; None keeps what the model has.

    Raises:
        ValueError: the model's MLPs are gated ones, which need arguments of their own.
    """
    import timm
    from timm.layers.mlp import Mlp

    with torch.device("meta"):
        plain: Any = timm.create_model(model, num_classes=1)
    block = plain.blocks[0]
    if not LayeredMixer.fits(plain) or type(block.mlp_tokens) is not Mlp:
        raise ValueError("only the Mixers with plain MLPs (`mixer_*`) can be given another shape")
    tokens, channels = block.mlp_tokens.fc1.out_features, block.mlp_channels.fc1.out_features
    return {
        "patch_size": patch_size or plain.stem.patch_size[0],
        "num_blocks": num_blocks or len(plain.blocks),
        "embed_dim": embed_dim or plain.embed_dim,
        "mlp_ratio": [tokens / plain.embed_dim, channels / plain.embed_dim],
    }
