"""The base class of backbone configurations, and a reader that supplies pixels or cached activations to a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fedsweep.models.names import is_folded
from fedsweep.models.resident_images import ResidentImages
from fedsweep.types import AdapterState, Batch, ImageSet, RoundListener

SHAPE = (
    *("img_size", "in_chans", "patch_size", "embed_dim", "depth", "num_blocks"),
    *("num_heads", "mlp_ratio", "num_classes"),
)


class Recipe(Config):
    """A function call that builds a backbone's network with timm or transformers alone, without fedsweep."""

    what_a_name_is = "an entry of a backbone's recipe"
    written_by_hand = False

    call: Literal["timm.create_model", "timm.models.MlpMixer", "transformers.CLIPModel.from_pretrained"]
    model: str = Field("", description="name of the model in the call; empty if the call takes no name")
    arguments: dict[str, Json] = Field(default_factory=dict, description="other arguments of the call, by name")
    fetched: bool = Field(description="whether the library can load or download the weights by the name of the model")

    @field_validator("arguments")
    @classmethod
    def _of_the_shape(cls, arguments: dict[str, Json]) -> dict[str, Json]:
        for name in arguments:
            if name not in SHAPE:  # other arguments of timm could contain paths and URLs
                raise ValueError(f"`arguments` of a backbone's recipe must be among {', '.join(SHAPE)}, not `{name}`")
        return arguments

    @property
    def of_timm(self) -> bool:
        """True for a timm function, and false for a transformers function."""
        return self.call.startswith("timm.")


@dataclass(frozen=True)
class Outline:
    """The number of blocks, the width, the image size and the largest LoRA ranks of a backbone.

    `largest_rank` maps each value of `lora.position` to the largest rank that it allows.
    """

    layers: int
    width: int  # number of features of an image token
    image_size: int  # side length of the square images in pixels
    largest_rank: Mapping[str, int]
    """The largest LoRA rank for each value of `lora.position`: the smallest dimension of the adapted matrices."""


class Backbone(Config, ABC):
    """The base class of backbone configurations."""

    has_head: ClassVar[bool] = True
    """True if a linear classifier is trained in addition to the adapters."""
    has_text: ClassVar[bool] = False
    """True if the backbone has a text encoder."""
    positions: ClassVar[tuple[str, ...]] = ("l0", "l1", "both")
    """The allowed values of `lora.position`."""

    @property
    @abstractmethod
    def _outline(self) -> Outline: ...

    @property
    def depth(self) -> int:
        """L, the number of blocks; for CLIP, the number of blocks in the deeper of its two encoders."""
        return self._outline.layers

    @property
    def width(self) -> int:
        """The number of features of an image token."""
        return self._outline.width

    @property
    def image_size(self) -> int:
        """The side length of the backbone's square input images, in pixels."""
        return self._outline.image_size

    def largest_rank(self, position: str) -> int:
        """Return the largest allowed LoRA rank for `position`, a value of `lora.position` such as `both`."""
        return self._outline.largest_rank[position]

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that identifies the content of the weights.

        The string is `none` for random weights, `timm:` followed by the model's name for timm's weights, or `sha256:`
        followed by a digest of the files that contain the weights.

        Raises:
            UserError: The weights are missing.
        """

    @abstractmethod
    def build(self, num_classes: int, seed: int, class_names: Sequence[str] | None = None) -> Any:
        """Return the model with its weights, in evaluation mode on the CPU.

        Raises:
            UserError: The weights are missing or do not fit the model.
        """

    def check_weights(self, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        """Build the model before a run to check its weights; the same weights are checked only once.

        Raises:
            UserError: The weights are missing or do not fit the model.
        """
        names = None if class_names is None else tuple(class_names)
        _checked(self, num_classes, names, self.fingerprint())

    def identity(self, content: str) -> str:
        """Return a string that identifies the image encoder and its weights.

        The string contains `content` (the fingerprint of the weights) and all options of the backbone except the text
        prompt.
        """
        return f"{self.model_dump_json(exclude={'prompt'})} {content}"


@lru_cache(maxsize=64)
def _checked(backbone: Backbone, num_classes: int, names: tuple[str, ...] | None, _fingerprint: str) -> None:
    backbone.build(num_classes, 0, names)


@torch.no_grad()
def check_walk(
    model: LayeredModel, forward: Callable[[Tensor], Tensor], size: int, name: str, theirs: str, tolerance: float = 0.0
) -> None:
    """Check that running a model block by block gives the same logits as its library's own forward pass.

    The library is timm or transformers. The check uses one random image.

    Args:
        model: The model, which is switched to evaluation mode.
        forward: The library's own forward pass, a function from normalised pixels to logits.
        size: The side length of the square random image, in pixels.
        name: The name of the model in error messages.
        theirs: The name of the library's forward pass in error messages.
        tolerance: The largest allowed relative and absolute difference between logits.

    Raises:
        UserError: The logits differ, or are not finite.
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
            f"`backbone.model` {name} cannot be used: run block by block, it returns other logits than {theirs}."
        )


@dataclass(frozen=True)
class Reader:
    """A reader that turns images into a model's inputs: pixels, or cached outputs of the model's frozen blocks.

    Attributes:
        model: The model.
        identity: A string that identifies the model and its pre-trained weights, for cache keys.
        plain_identity: A string that identifies the model without its adapters, and its classes, for cache keys.
        kept: The activation cache, which stores outputs of frozen blocks.
        batch_size: The number of images per forward pass outside training.
        listener: The object that follows the progress within a round.
        resident: The images that have a copy on the GPU; None on a CPU.
    """

    model: LayeredModel
    identity: str
    kept: FrozenRows = field(default_factory=FrozenRows)
    batch_size: int = 256
    listener: RoundListener = field(default_factory=RoundListener)
    plain_identity: str = ""
    resident: ResidentImages | None = None

    def pixels(self, images: ImageSet, index: Tensor) -> Tensor:
        """Return the pixels (k, 3, h, w) of the images at `index` (k,), on the GPU if there is one."""
        return images.take(index)[0] if self.resident is None else self.resident.take(images, index)

    def batches(self, images: ImageSet) -> Iterator[Tensor]:
        """Yield the pixels of all images in order, in batches of `batch_size`. On a CPU, batches can be views."""
        if self.resident is None:
            yield from (pixels for pixels, _ in images.batches(self.batch_size))
        else:
            for start in range(0, len(images), self.batch_size):
                yield self.resident.take(images, torch.arange(start, min(start + self.batch_size, len(images))))

    def prefix(self, walk: Walk, steps: int, adapter: AdapterState) -> FrozenFunction:
        """Return the first `steps` blocks of a forward pass as a function whose outputs can be cached.

        Args:
            walk: The blocks of the forward pass, in order.
            steps: The number of blocks at the start of `walk` that are frozen.
            adapter: The trainable tensors that the model currently holds, keyed by name.
        """
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
        """Return the model's input for the images at `index`.

        Args:
            images: The set that contains the images.
            index: The k positions of the images in the set, as int64 (k,).
            function: The frozen blocks at the start of the forward pass; None if no block is frozen.
            done: The number of blocks in `function`.
            side_inputs: Additional inputs of the method, each a tensor with one row for every image of the set, keyed
                by name.

        Returns:
            The pixels (k, 3, h, w) if there are neither frozen blocks nor additional inputs. Otherwise, a `Batch` with
            the cached outputs of the frozen blocks and the additional inputs.
        """
        if function is None and not side_inputs:
            return self.pixels(images, index)
        rows = {name: known[index] for name, known in side_inputs.items()}
        tokens = None if function is None else self.kept.rows(function, images, index)
        return Batch(images, index, tokens, done, rows)

    def untuned_logits(self, walk: Walk, adapter: AdapterState, images: ImageSet, *, domain: str | None) -> Tensor:
        """Return the logits (n, classes) of a model whose trained tensors have their first values.

        LoRA's factors B are zero at first, so the logits do not depend on the factors A. They are cached for all runs
        that start from the same model, also with other ranks or positions. Folded changes are zero at first too.

        Args:
            walk: The blocks of the forward pass.
            adapter: The trainable tensors that the model currently holds, keyed by name.
            images: The n images.
            domain: The domain of the images, which does not affect the logits.
        """
        idle = [name for name, tensor in adapter.items() if ".lora_B." in name and not tensor.any()]
        left_out = {*idle, *(name.replace(".lora_B.", ".lora_A.") for name in idle)}
        left_out |= {name for name, tensor in adapter.items() if is_folded(name) and not tensor.any()}
        state = {name: tensor for name, tensor in adapter.items() if name not in left_out}
        key = walk_key(f"logits {self.plain_identity}", tuple(walk), True, state, self.model.mean.device)
        function = FrozenFunction(key, lambda pixels: self.model(pixels, walk))
        logits = self.kept.all(function, images, self.batch_size)
        self.listener.tested(len(images))
        return logits
