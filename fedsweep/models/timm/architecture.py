"""The architectures of timm models. Their sizes are computed without allocating tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.models.base import Outline, Recipe
from fedsweep.models.timm.transformer_families import WHAT_WORKS, Family, family_of, mixer_shape

if TYPE_CHECKING:
    from timm.models import PretrainedCfg


@dataclass(frozen=True)
class Architecture:
    """The name of a timm model, and optional changes to the model's shape.

    If a size is None, the model keeps its own value.
    """

    model: str
    """timm's name of the model, with or without the tag of its weights."""
    in_chans: int = 3
    img_size: int | None = None
    patch_size: int | None = None
    embed_dim: int | None = None
    num_blocks: int | None = None
    num_heads: int | None = None

    @property
    def name(self) -> str:
        """The name of the model without the tag of its weights."""
        return self.model.partition(".")[0]

    @property
    def image_size(self) -> int:
        """The side length of the square input images, in pixels.

        The side length is `img_size` or, if `img_size` is None, the size in timm's configuration.
        """
        return self.img_size or int(timm_config(self.model).input_size[-1])

    def build(self) -> nn.Module:
        """Return the network with random weights on torch's default device.

        The head has only one output; the caller must replace it.

        Raises:
            ValueError: timm cannot build the model in this shape.
        """
        import timm

        if self._is_mixer and self.num_heads is not None:
            raise ValueError(f"`backbone.num_heads` is given, but {self.name} has no attention heads")
        call = timm.models.MlpMixer if self._is_reshaped else partial(timm.create_model, self.model)
        try:
            return call(num_classes=1, **self.arguments())
        except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"timm cannot build `backbone.model` {self.name} in this shape: {first_line}") from error

    def recipe(self, num_classes: int, fetched: bool) -> Recipe:
        """Return the call of a timm function that builds a network with this architecture.

        Args:
            num_classes: The number of outputs of the head.
            fetched: Whether timm can load or download the weights by the model's name.
        """
        arguments = {**self.arguments(), "num_classes": num_classes}
        if self._is_reshaped:
            return Recipe(call="timm.models.MlpMixer", arguments=arguments, fetched=fetched)
        return Recipe(call="timm.create_model", model=self.model, arguments=arguments, fetched=fetched)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments, except the number of classes, with which timm builds a network of this architecture."""
        size = {"img_size": self.image_size, "in_chans": self.in_chans}
        if self._is_reshaped:
            return size | mixer_shape(self.name, self.patch_size, self.embed_dim, self.num_blocks)
        shape = {"patch_size": self.patch_size, "embed_dim": self.embed_dim}
        shape |= {"depth": self.num_blocks, "num_heads": self.num_heads}
        return size | {name: value for name, value in shape.items() if value is not None}

    def check_recipe(self, card: Mapping[str, Any], path: Path) -> None:
        """Check that the weights in a file belong to this architecture, according to the file's JSON card.

        The tensors alone are not sufficient for this check, because another architecture can have tensors with the
        same names and shapes. A card without the recipe of a timm model passes the check.

        Args:
            card: The contents of the card.
            path: The path of the weights file.

        Raises:
            UserError: The card's recipe differs from this architecture, or is invalid.
        """
        recipe = card.get("recipe")
        backbone = recipe.get("backbone") if isinstance(recipe, dict) else None
        if not isinstance(backbone, dict) or backbone.get("name") != "timm":
            return
        now = outline(self).facts
        try:
            trained = Architecture._of_recipe(backbone)
            # The installed timm may not know another model in a recipe.
            was = outline(trained).facts if trained.name == self.name else {"model": trained.name}
        except ValueError as error:
            raise UserError(f"`recipe.backbone` of the card {path.with_suffix('.json')} is invalid: {error}.") from None
        for field, value in was.items():
            if value != now[field]:
                raise UserError(
                    f"`backbone.{field}` is {now[field]}, but the weights {path} were trained with {value}, "
                    "according to their card."
                )

    @classmethod
    def _of_recipe(cls, backbone: Mapping[str, Any]) -> Self:
        sizes = {
            name: backbone.get(name) for name in ("img_size", "patch_size", "embed_dim", "num_blocks", "num_heads")
        }
        for field, value in {"in_chans": backbone.get("in_chans", 3), **sizes}.items():
            if type(value) is not int and (value is not None or field == "in_chans"):
                raise ValueError(f"its `{field}` must be a whole number, but it is {value}")
        if not isinstance(model := backbone.get("model"), str):
            raise ValueError(f"its `model` must be a name, but it is {model}")
        return cls(model, backbone.get("in_chans", 3), **sizes)

    @property
    def _is_mixer(self) -> bool:
        import timm

        return bool(timm.models.is_model_in_modules(self.name, ["mlp_mixer"]))

    @property
    def _is_reshaped(self) -> bool:
        """True if the model is a Mixer and its patch size, width or number of blocks is changed.

        Only timm's class MlpMixer can build such a model.
        """
        return self._is_mixer and any((self.patch_size, self.embed_dim, self.num_blocks))


@dataclass(frozen=True)
class TimmOutline(Outline):
    """The sizes of a timm model, such as its number of blocks, and the class that runs the model block by block."""

    family: Family
    facts: Mapping[str, str | int | None]
    """The hyperparameters that must be the same as in pre-training.

    The image size and the number of channels are not among them, because weights can be fitted to other values.
    """


@lru_cache(maxsize=64)
def outline(architecture: Architecture) -> TimmOutline:
    """Return the sizes of a timm model and the class that can run it, without allocating the model's tensors.

    Raises:
        ValueError: The model is unknown, cannot be built in this shape, or cannot run block by block.
    """
    import timm

    check_name(architecture.model)
    name = architecture.name
    with torch.device("meta"):
        try:
            plain = timm.create_model(name, num_classes=1)
        except Exception:  # a model without this argument belongs to no supported family
            raise ValueError(f"`backbone.model` {name} cannot be used: {WHAT_WORKS}") from None
        family = family_of(plain, name)  # before changes of the shape, which the family may not support
        backbone = architecture.build()
    stem = backbone.get_submodule(family.patch_projection.removeprefix("backbone."))
    patch_size = int(cast(nn.Conv2d, stem).kernel_size[0])
    size = architecture.image_size
    if (architecture.img_size or architecture.patch_size) and size % patch_size:
        raise ValueError(f"`backbone.img_size` must be a multiple of the patch size {patch_size}, but it is {size}")
    blocks = cast(nn.ModuleList, backbone.blocks)
    heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None)
    largest = {
        position: min(min(cast(nn.Linear, block.get_submodule(place)).weight.shape) for block in blocks)
        for position, place in family.sublayers.items()
    }
    return TimmOutline(
        family=family,
        layers=len(blocks),
        width=cast(int, backbone.embed_dim),
        image_size=size,
        facts={"model": name, "num_heads": heads, "patch_size": patch_size},
        largest_rank=largest | {"both": min(largest.values())},
    )


def timm_config(model: str) -> "PretrainedCfg":
    """Return timm's configuration of a model's weights.

    The weights are those with the tag in `model`, or timm's default weights if `model` contains no tag.
    """
    import timm
    from timm.models import PretrainedCfg

    return timm.get_pretrained_cfg(model) or PretrainedCfg()


@lru_cache(maxsize=64)  # called for every arm of a search space
def check_name(model: str) -> None:
    """Raise ValueError unless timm has the model and, if `model` contains a tag, weights with this tag.

    The message lists similar names.
    """
    import timm

    name, dot, tag = model.partition(".")
    known = timm.list_models()
    if name not in known:
        if now := timm.models.get_deprecated_models().get(name):
            raise ValueError(f"`backbone.model` {name} is an old name: timm now calls it {now}")
        nearest = get_close_matches(name, known)
        hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
        raise ValueError(f"`backbone.model` {name} is not a model of timm{hint}")
    if dot and model not in (tagged := timm.list_models(name, include_tags=True)):
        longer = [one for one in tagged if one.startswith(model)]
        nearest = list(dict.fromkeys([*longer, *get_close_matches(model, tagged, n=len(tagged), cutoff=0)]))
        wrong = f"timm has no weights `{tag}` of {name}" if tag else f"`backbone.model` {model} ends in a dot"
        raise ValueError(f"{wrong}; available are {summarise_list(nearest, most=6, quote='')}")


@lru_cache(maxsize=64)
def check_pinned(model: str) -> None:
    """Raise ValueError unless timm has weights with exactly the name `model`, including the tag.

    The tag is required because timm can change the default tag of a model.
    """
    import timm

    name, _, tag = model.partition(".")
    tagged = timm.list_models(name, include_tags=True)
    with_weights = [one for one in tagged if timm.models.is_model_pretrained(one)]
    if not with_weights:
        raise ValueError(f"timm has no weights of {name}; set `backbone.pretrained` to none or to a file")
    if tag and model not in with_weights:
        raise ValueError(
            f"timm has no weights of {model}; it has weights of {summarise_list(with_weights, most=6, quote='')}"
        )
    if not tag and name not in with_weights:
        default = f"{name}.{timm_config(name).tag}"
        others = [one for one in with_weights if one != default]
        rest = f", and others are {summarise_list(others, most=6, quote='')}" if others else ", and there are no others"
        raise ValueError(
            f"`backbone.model` {name} must include the tag of its weights if `backbone.pretrained` is timm; "
            f"timm's current default is {default}{rest}"
        )
