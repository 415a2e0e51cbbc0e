"""The base class of backbones, and the Reader, which gives a model pixels or cached outputs of its frozen steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.models.activation_cache import FrozenFunction, FrozenRows, walk_key
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.types import AdapterState, Batch, ImageSet

SHAPE = (
    *("img_size", "in_chans", "patch_size", "embed_dim", "depth", "num_blocks"),
    *("num_heads", "mlp_ratio", "num_classes"),
)


class Recipe(Config):
    """The call of a backbone's own library that builds the same network without fedsweep."""

    what_a_name_is = "an entry of a backbone's recipe"

    call: Literal["timm.create_model", "timm.models.MlpMixer", "transformers.CLIPModel.from_pretrained"]
    model: str = Field("", description="the name that it is called with; empty where it takes none")
    arguments: dict[str, Json] = Field(default_factory=dict, description="the others, by name")
    fetched: bool = Field(description="whether the library has the weights by that name, or can fetch them")

    @field_validator("arguments")
    @classmethod
    def _of_the_shape(cls, arguments: dict[str, Json]) -> dict[str, Json]:
        for name in arguments:
            if name not in SHAPE:  # timm's others name files and addresses
                raise ValueError(f"`arguments` of a backbone's recipe must be among {', '.join(SHAPE)}, not `{name}`")
        return arguments

    @property
    def of_timm(self) -> bool:
        """True if the library is timm, false if it is transformers."""
        return self.call.startswith("timm.")


@dataclass(frozen=True)
class Outline:
    """The sizes of a backbone."""

    layers: int
    width: int  # features of an image's token
    image_size: int  # height and width in pixels
    largest_rank: Mapping[str, int]
    """By position: the smallest side of the matrices that LoRA sits beside; with more, it would not be of low rank."""


class Backbone(Config, ABC):
    """The base of the backbones' records."""

    has_head: ClassVar[bool] = True
    """Whether a linear classifier is trained beside the adapters."""
    has_text: ClassVar[bool] = False
    """Whether there is a text encoder."""
    positions: ClassVar[tuple[str, ...]] = ("l0", "l1", "both")
    """Where adapters can sit."""

    @property
    @abstractmethod
    def _outline(self) -> Outline: ...

    @property
    def depth(self) -> int:
        """L, the number of blocks; of a CLIP, those of its deeper encoder."""
        return self._outline.layers

    @property
    def width(self) -> int:
        """Features of an image's token."""
        return self._outline.width

    @property
    def image_size(self) -> int:
        """Height and width of its images in pixels."""
        return self._outline.image_size

    def largest_rank(self, position: str) -> int:
        """Return the largest LoRA rank at a position."""
        return self._outline.largest_rank[position]

    @abstractmethod
    def fingerprint(self) -> str:
        """Return what pins the weights' content: `none`, a tag, or a digest. Raise UserError if they are missing."""

    @abstractmethod
    def build(self, num_classes: int, seed: int, class_names: Sequence[str] | None = None) -> Any:
        """Return the model in evaluation mode, on the CPU. Raise UserError if the weights are missing or do not fit."""

    def check_weights(self, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        """Load the weights as a run will, once per process for each content; raise UserError if `build` does."""
        names = None if class_names is None else tuple(class_names)
        _checked(self, num_classes, names, self.fingerprint())

    def identity(self, content: str) -> str:
        """Return the key of the image encoder: its configuration and the fingerprint of its weights, without texts."""
        return f"{self.model_dump_json(exclude={'prompt'})} {content}"


@lru_cache(maxsize=64)
def _checked(backbone: Backbone, num_classes: int, names: tuple[str, ...] | None, _fingerprint: str) -> None:
    backbone.build(num_classes, 0, names)


@torch.no_grad()
def check_walk(
    model: LayeredModel, forward: Callable[[Tensor], Tensor], size: int, name: str, theirs: str, tolerance: float = 0.0
) -> None:
    """Raise UserError unless embed, all blocks and classify give the finite logits of the library's own `forward`.

    One random image of height and width `size` is tried. The message calls that forward `theirs`.
    """
    model.eval()
    pixels = torch.rand(1, len(model.mean), size, size, generator=torch.Generator().manual_seed(0))
    expected = forward(pixels)
    if not expected.isfinite().all():
        raise UserError(f"the weights of `backbone.model` {name} give logits that are not finite numbers.")
    tokens = model.embed(pixels)
    for layer in range(model.num_layers):
        tokens = model.block(layer, tokens)
    found = model.classify(tokens)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise UserError(
            f"`backbone.model` {name} cannot be used: walked block by block it gives other logits than {theirs}."
        )


@dataclass(frozen=True)
class Reader:
    """A resident model's access to images: its frozen steps are run once for each image.

    `identity` is a key of the model's origin; `batch_size` is used in evaluation.
    """

    model: LayeredModel
    identity: str
    kept: FrozenRows = field(default_factory=FrozenRows)
    batch_size: int = 256

    def prefix(self, walk: Walk, steps: int, adapter: AdapterState) -> FrozenFunction:
        """Return the frozen function of the first steps of a walk; `adapter` is the one that the model holds."""
        model, ahead = self.model, self.model.ahead(adapter, walk, steps)
        key = walk_key(self.identity, tuple(walk[:steps]), steps == len(walk), ahead, model.mean.device)
        if steps == len(walk):
            return FrozenFunction(key, lambda images: model.passed(images, walk))
        return FrozenFunction(key, lambda images: model.walk(images, walk[:steps]))

    def batch(
        self,
        images: ImageSet,
        index: Tensor,
        function: FrozenFunction | None,
        done: int,
        side_inputs: Mapping[str, Tensor],
    ) -> Images:
        """Return the examples at `index`: their pixels, unless cached tokens or side inputs are known."""
        if function is None and not side_inputs:
            return images.take(index)[0]
        rows = {name: known[index] for name, known in side_inputs.items()}
        tokens = None if function is None else self.kept.rows(function, images, index)
        return Batch(images, index, tokens, done, rows)
