"""Which walk a timm model has, and the proof that the walk is timm's own forward."""

import torch
from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.models.beit import LayeredBeit
from fedsweep.models.eva import LayeredEva
from fedsweep.models.layered import LayeredModel
from fedsweep.models.mixer import LayeredMixer
from fedsweep.models.vit import LayeredViT

Family = type[LayeredModel]
FAMILIES: tuple[Family, ...] = (LayeredViT, LayeredMixer, LayeredBeit, LayeredEva)
WHAT_WORKS = (
    "only timm's VisionTransformer (ViT, DeiT, DINOv2), MlpMixer, Beit and Eva (EVA-02, DINOv3) "
    "with two sublayers in every block can be walked block by block"
)


def family_of(backbone: nn.Module, model: str) -> Family:
    """The walk of a timm model, called `model` in the refusal.

    Raises:
        ValueError: it has none: another class, another stem, blocks of another structure.
    """
    for family in FAMILIES:
        if family.fits(backbone) and _has_places(backbone, family):
            return family
    raise ValueError(f"`backbone.model` {model} is a {_described(backbone)}, but {WHAT_WORKS}")


def _has_places(backbone: nn.Module, family: Family) -> bool:
    """Whether the last module of each sublayer is a linear one, where LoRA can sit."""
    places = [
        block.get_submodule(name)
        for block in backbone.get_submodule("blocks").children()
        for name in family.sublayers.values()
    ]
    return all(isinstance(place, nn.Linear) for place in places)


def _described(backbone: nn.Module) -> str:
    """The class of a model with what its walk depends on, e.g. "VisionTransformer (blocks: ParallelScalingBlock)"."""
    parts = []
    if isinstance(blocks := getattr(backbone, "blocks", None), nn.Sequential | nn.ModuleList):
        parts.append(f"blocks: {', '.join(sorted({type(block).__name__ for block in blocks}))}")
    if (stem := getattr(backbone, "patch_embed", None)) is not None:
        parts.append(f"stem: {type(stem).__name__}")
    return type(backbone).__name__ + (f" ({'; '.join(parts)})" if parts else "")


@torch.no_grad()
def check_walk(model: LayeredModel, image_size: int, name: str) -> None:
    """Compare embed, all blocks and classify with timm's own forward, on one random image, to the last bit.

    Raises:
        UserError: they differ, or the weights give no numbers at all.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(1, len(model.mean), image_size, image_size, generator=generator)
    expected = model.backbone(pixels)
    if not expected.isfinite().all():
        raise UserError(f"the weights of `backbone.model` {name} give logits that are not finite numbers.")
    tokens = model.embed(pixels)
    for layer in range(model.num_layers):
        tokens = model.block(layer, tokens)
    if not torch.equal(model.classify(tokens), expected):
        raise UserError(
            f"`backbone.model` {name} cannot be used: walked block by block it gives other logits than timm's forward."
        )
