"""Classes that run timm's ViT, Beit, Eva and MlpMixer block by block, and a function that selects one for a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedsweep.models.layered import LayeredModel

if TYPE_CHECKING:
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.mlp_mixer import MlpMixer
    from timm.models.vision_transformer import VisionTransformer


class LayeredViT(LayeredModel):
    """timm's VisionTransformer, run block by block; the logits are bit-identical to those of timm's own forward pass.

    The class covers ViT, DeiT (with or without its distillation token), DINOv2 (with or without registers), and the
    image encoders of CLIP and SigLIP.
    """

    backbone: "VisionTransformer"

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens (batch, tokens, width) before the first block.

        Any class and register tokens come before the tokens of the patches. If the model has absolute position
        embeddings, they are already added to the tokens.
        """
        vit = self.backbone
        return cast(Tensor, vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(pixels)))))


class LayeredBeit(LayeredModel):
    """timm's Beit, run block by block.

    Relative position biases are stored in each block or in one table that all blocks share.
    """

    backbone: "Beit"

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens (batch, tokens, width) before the first block.

        The class token, if any, comes before the tokens of the patches. If the model has absolute position embeddings,
        they are already added to the tokens.
        """
        beit = self.backbone
        patches = beit.patch_embed(pixels)
        tokens = torch.cat((beit.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        if beit.pos_embed is not None:
            tokens = tokens + beit.pos_embed
        return cast(Tensor, beit.pos_drop(tokens))

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the output (batch, tokens, width) of a block, computed with relative position biases."""
        shared = self.backbone.rel_pos_bias
        bias = None if shared is None else shared()
        return cast(Tensor, self.backbone.blocks[layer](tokens, shared_rel_pos_bias=bias))


class LayeredEva(LayeredModel):
    """timm's Eva, run block by block.

    The rotary position embeddings depend only on the grid of patches, so they are computed once. They are computed in
    evaluation mode: in training mode, DINOv3 shifts them at random, which would change the outputs of frozen blocks. If
    the model has timm's option `rope_mixed`, each block has its own rotary position embeddings.
    """

    backbone: "Eva"
    rope: Tensor | None

    def __init__(self, backbone: "Eva", mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(backbone, mean, std)
        backbone.eval()
        with torch.no_grad():
            stem = backbone.patch_embed.proj
            image = stem.weight.new_zeros(1, stem.in_channels, *backbone.patch_embed.img_size)
            _, rope = backbone._pos_embed(backbone.patch_embed(image))
        self.register_buffer("rope", rope, persistent=False)

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens (batch, tokens, width) before the first block.

        Any class and register tokens come before the tokens of the patches. If the model has absolute position
        embeddings, they are already added to the tokens.
        """
        eva = self.backbone
        tokens, _ = eva._pos_embed(eva.patch_embed(pixels))
        return cast(Tensor, eva.norm_pre(tokens))

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the output (batch, tokens, width) of a block, computed with rotary position embeddings."""
        rope = self.rope[layer] if self.rope is not None and self.backbone.rope_mixed else self.rope
        return cast(Tensor, self.backbone.blocks[layer](tokens, rope=rope))


class LayeredMixer(LayeredModel):
    """timm's MlpMixer, run block by block; a block is an MLP over tokens, followed by an MLP over channels."""

    backbone: "MlpMixer"
    sublayers: ClassVar = {"l0": "mlp_tokens.fc2", "l1": "mlp_channels.fc2"}
    patch_projection = "backbone.stem.proj"

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the embedded patches as tokens (batch, tokens, width).

        A Mixer has neither a class token nor position embeddings.
        """
        return cast(Tensor, self.backbone.stem(pixels))


def mixer_shape(model: str, patch_size: int | None, embed_dim: int | None, num_blocks: int | None) -> dict[str, Any]:
    """Return the arguments for timm's class MlpMixer that build the Mixer `model` with changed sizes.

    For each of the two MLPs, the ratio of its hidden width to the width of a token stays the same.

    Args:
        model: timm's name of the model.
        patch_size: The side length of a patch in pixels; None keeps the model's own value.
        embed_dim: The width of a token; None keeps the model's own value.
        num_blocks: The number of blocks; None keeps the model's own value.

    Raises:
        ValueError: The model is not a Mixer with plain MLPs.
    """
    import timm
    from timm.layers.mlp import Mlp

    with torch.device("meta"):
        plain: Any = timm.create_model(model, num_classes=1)
    block = plain.blocks[0]
    if not _fits(plain, LayeredMixer) or type(block.mlp_tokens) is not Mlp:
        raise ValueError("only the Mixers with plain MLPs (`mixer_*`) can have another shape than timm's")
    tokens, channels = block.mlp_tokens.fc1.out_features, block.mlp_channels.fc1.out_features
    return {
        "patch_size": patch_size or plain.stem.patch_size[0],
        "num_blocks": num_blocks or len(plain.blocks),
        "embed_dim": embed_dim or plain.embed_dim,
        "mlp_ratio": [tokens / plain.embed_dim, channels / plain.embed_dim],
    }


Family = type[LayeredModel]
FAMILIES: dict[Family, tuple[str, ...]] = {
    LayeredViT: (
        "vision_transformer.VisionTransformer",
        "deit.VisionTransformerDistilled",
        "vision_transformer.Block",
        "vision_transformer.ResPostBlock",
    ),
    LayeredMixer: ("mlp_mixer.MlpMixer", "mlp_mixer.MixerBlock"),  # without the blocks of gMLP and ResMLP
    LayeredBeit: ("beit.Beit", "beit.Block"),
    LayeredEva: ("eva.Eva", "eva.EvaBlock", "eva.EvaBlockPostNorm"),
}
"""For each of our classes, the classes of timm's networks and blocks that it can run."""
WHAT_WORKS = (
    "fedsweep can run only timm's VisionTransformer (ViT, DeiT, DINOv2), MlpMixer, Beit and Eva (EVA-02, DINOv3) "
    "block by block, with two sublayers in every block"
)


def family_of(backbone: nn.Module, model: str) -> Family:
    """Return the class that can run `backbone`, the network of the timm model `model`, block by block.

    Raises:
        ValueError: No class can run the network.
    """
    for family in FAMILIES:
        if _fits(backbone, family):
            return family
    raise ValueError(f"`backbone.model` {model} is a {_described(backbone)}, but {WHAT_WORKS}")


def _fits(backbone: Any, family: Family) -> bool:
    """Return whether the class `family` can run `backbone` block by block.

    The classes of the network and of its blocks must be listed in `FAMILIES[family]`, the patch embedding must be
    timm's `PatchEmbed`, and the layers that LoRA adapts must be linear.
    """
    known = [f"timm.models.{name}" for name in FAMILIES[family]]
    stem, _, _ = family.patch_projection.removeprefix("backbone.").rpartition(".")
    return (
        _kind(backbone) in known
        and _kind(backbone.get_submodule(stem)) == "timm.layers.patch_embed.PatchEmbed"
        and all(_kind(block) in known for block in backbone.blocks)
        and all(
            isinstance(block.get_submodule(place), nn.Linear)
            for block in backbone.blocks
            for place in family.sublayers.values()
        )
    )


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _described(backbone: nn.Module) -> str:
    """Return a description of a network, such as `VisionTransformer (blocks: ParallelScalingBlock)`."""
    parts = []
    if isinstance(blocks := getattr(backbone, "blocks", None), nn.Sequential | nn.ModuleList):
        parts.append(f"blocks: {', '.join(sorted({type(block).__name__ for block in blocks}))}")
    if (stem := getattr(backbone, "patch_embed", None)) is not None:
        parts.append(f"stem: {type(stem).__name__}")
    return type(backbone).__name__ + (f" ({'; '.join(parts)})" if parts else "")
