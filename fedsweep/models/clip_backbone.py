"""CLIP by the name of its checkpoint, as a folder, or the small ones that ship with fedsweep."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedsweep.errors import UserError, near, one_line
from fedsweep.models.backbone import Backbone
from fedsweep.models.checkpoint_folder import CONFIG, PREPROCESSOR, digest, find, is_folder
from fedsweep.models.clip import LayeredClip, Towers
from fedsweep.models.layered import Position

SHIPPED = Path(__file__).parent / "weights"
Shape = Mapping[str, Mapping[str, int]]


def _known(width: int, blocks: int, patch: int, size: int, text: int) -> Shape:
    """OpenAI's shapes: heads of 64 features, MLPs four times as wide, twelve blocks for the text."""
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "patch_size": patch,
        "image_size": size,
    }
    words = {"hidden_size": text, "intermediate_size": 4 * text, "num_attention_heads": text // 64}
    return {"vision_config": vision, "text_config": words, "projection": {"dim": text}}


KNOWN: dict[str, Shape] = {
    "openai/clip-vit-base-patch32": _known(768, 12, 32, 224, 512),
    "openai/clip-vit-base-patch16": _known(768, 12, 16, 224, 512),
    "openai/clip-vit-large-patch14": _known(1024, 24, 14, 224, 768),
    "openai/clip-vit-large-patch14-336": _known(1024, 24, 14, 336, 768),
}
"""Shapes of public checkpoints, so that they can be planned and counted before they are there."""


@dataclass(frozen=True)
class Outline:
    """What is known of a CLIP before it has tensors."""

    layers: int
    width: int
    image_size: int
    largest_rank: int


class _Clip(Backbone, ABC):
    """What the two kinds of CLIP share; prompts stand in a head's place."""

    has_head: ClassVar = False
    has_text: ClassVar = True
    positions: ClassVar = tuple(LayeredClip.positions())

    prompt: str = Field("This is a picture of {}", description="the text of a class; {} stands for its name")

    @field_validator("prompt")
    @classmethod
    def _one_place(cls, prompt: str) -> str:
        if prompt.count("{}") != 1 or {"{", "}"} & set(prompt.replace("{}", "")):
            raise ValueError(f"`backbone.prompt` must have {{}} once, for the class's name, but it is `{prompt}`")
        return prompt

    @property
    def _outline(self) -> Outline:
        return _outline(self._model)

    @property
    @abstractmethod
    def _model(self) -> str:
        """The checkpoint's name or folder."""

    @property
    def depth(self) -> int:
        """L, the blocks of the deeper encoder."""
        return self._outline.layers

    @property
    def width(self) -> int:
        """Features of an image's token."""
        return self._outline.width

    @property
    def image_size(self) -> int:
        """Height and width of the images that it takes, in pixels."""
        return self._outline.image_size

    def largest_rank(self, position: Position) -> int:
        """The largest LoRA rank: the narrower encoder's width."""
        return self._outline.largest_rank

    def fingerprint(self) -> str:
        """What pins the content: the digest of weights, shape, tokens and normalisation.

        Raises:
            UserError: the checkpoint is missing.
        """
        return f"sha256:{digest(find(self._model))}"

    def check_weights(self, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        """Load the checkpoint as a run will; once per process for each content.

        Raises:
            UserError: what `build` raises.
        """
        _checked(self, tuple(class_names or _numbers(num_classes)), self.fingerprint())

    def build(self, num_classes: int, seed: int = 0, class_names: Sequence[str] | None = None) -> LayeredClip:
        """The pre-trained model in evaluation mode, on the CPU; no seed is drawn from.

        Raises:
            UserError: the checkpoint is missing, broken or none of a CLIP, a prompt is too long, or the walk is not
                transformers' forward.
        """
        folder = find(self._model)
        names = tuple(class_names or _numbers(num_classes))
        clip = _load(folder, self._model)
        mean, std = _normalisation(folder / PREPROCESSOR, self._model)
        model = LayeredClip(Towers(clip), mean, std, Tokenizer(folder), self.prompt, names)
        _check_walk(model.eval(), clip, self.image_size, self._model)
        return model

    def outlined(self, num_classes: int) -> LayeredClip:
        """The model on the meta device: shapes without tensors, no weights are looked for."""
        from transformers import CLIPModel

        with torch.device("meta"):
            towers = Towers(CLIPModel(_config(self._model)))
            return LayeredClip(towers, [0.5] * 3, [0.5] * 3, _no_tokens, self.prompt, _numbers(num_classes))


class ClipBackbone(_Clip):
    """A CLIP as transformers keeps it: OpenAI's, or any other of the class CLIPModel."""

    name: Literal["clip"] = "clip"
    model: str = Field(min_length=1, description="the checkpoint: its name on the hub, or a folder that holds it")

    @field_validator("model")
    @classmethod
    def _is_there(cls, model: str) -> str:
        _outline(model)
        return model

    @property
    def _model(self) -> str:
        return self.model


class DigitsClip(_Clip):
    """The embedded CLIPs: trained on MNIST's digits and their names by scripts/train_digits_clip.py."""

    name: Literal["digits_clip"] = "digits_clip"
    encoder: Literal["base", "patch8", "large"] = Field(
        "base", description="6 blocks of width 64, patches of 4 px; the same with 8 px; or 8 blocks of width 96"
    )

    @property
    def _model(self) -> str:
        name = "digits_clip" if self.encoder == "base" else f"digits_clip_{self.encoder}"
        return str(SHIPPED / name)


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


@lru_cache(maxsize=64)
def _outline(model: str) -> Outline:
    """Raises ValueError where neither the name is known nor a folder is there."""
    try:
        config = _config(model)
    except UserError as error:
        raise ValueError(str(error).removesuffix(".")) from None
    vision, text = config.vision_config, config.text_config
    return Outline(
        layers=max(vision.num_hidden_layers, text.num_hidden_layers),
        width=vision.hidden_size,
        image_size=vision.image_size,
        largest_rank=min(vision.hidden_size, text.hidden_size),
    )


def _config(model: str) -> Any:
    """The shape, from the table above or from the checkpoint.

    Raises:
        UserError: there is no such checkpoint, or its config is not that of a CLIP.
    """
    import transformers

    config: Any = transformers.CLIPConfig
    if model in KNOWN and not is_folder(model):
        shape = KNOWN[model]
        return config(
            vision_config=dict(shape["vision_config"]),
            text_config=dict(shape["text_config"]),
            projection_dim=shape["projection"]["dim"],
            attn_implementation="sdpa",
        )
    try:
        folder = find(model)
    except UserError as error:
        raise UserError(str(error).removesuffix(".") + (near(model, KNOWN, cutoff=0.8) or ".")) from None
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if said.get("model_type") != "clip":
            raise ValueError(f"`model_type` is {said.get('model_type')}")
        return config.from_pretrained(folder, attn_implementation="sdpa")
    except Exception as error:  # transformers' checks have kinds of their own
        raise UserError(
            f"`backbone.model` {model} is not a CLIP that transformers can read: {one_line(error)}."
        ) from None


def _load(folder: Path, name: str) -> Any:
    """All tensors of the checkpoint, in single precision.

    Raises:
        UserError: some are missing, of another shape, or cannot be read.
    """
    import transformers

    model: Any = transformers.CLIPModel
    logging: Any = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        clip, found = model.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # each format has its own
        raise UserError(f"`backbone.model` {name} cannot be loaded: {one_line(error)}.") from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
    if wrong := sorted(found["missing_keys"]) or sorted(map(str, found["mismatched_keys"])):
        raise UserError(f"`backbone.model` {name} lacks tensors of a CLIP or has them in another shape: {wrong[0]}.")
    return clip.eval()


def _normalisation(path: Path, name: str) -> tuple[list[float], list[float]]:
    """Mean and deviation of each colour.

    Raises:
        UserError: they are not there, or not three numbers each.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        mean, std = ([float(one) for one in said[f"image_{which}"]] for which in ("mean", "std"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"`backbone.model` {name} has a {path.name} that cannot be read: {one_line(error)}.") from None
    if len(mean) != 3 or len(std) != 3 or not all(math.isfinite(one) for one in mean + std) or min(std) <= 0:
        raise UserError(
            f"`backbone.model` {name} must have three means and deviations in {path.name}, not {mean}, {std}."
        )
    return mean, std


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint, read when it is first asked."""

    folder: Path

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens (n, longest) and the places of the last ones (n,).

        Raises:
            UserError: it cannot be read.
        """
        found = _tokenizer(self.folder, digest(self.folder))(list(texts), padding=True, return_tensors="pt")
        return found["input_ids"], found["attention_mask"].sum(1) - 1


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, _digest: str) -> Any:
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each format has its own
        raise UserError(f"the tokenizer in {folder} cannot be read: {one_line(error)}.") from error


def _no_tokens(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Two tokens for each text, on the device of shapes without tensors."""
    return torch.zeros(len(texts), 2, dtype=torch.int64), torch.ones(len(texts), dtype=torch.int64)


@torch.no_grad()
def _check_walk(model: LayeredClip, clip: Any, image_size: int, name: str) -> None:
    """Compare the walk with transformers' own forward on one random image and all prompts.

    Raises:
        UserError: they differ, or the weights give no numbers at all.
    """
    pixels = torch.rand(1, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(model.prompts.shape[1]) <= model.ends[:, None]
    said = clip(input_ids=model.prompts, pixel_values=pixels, attention_mask=padding.long()).logits_per_image
    if not said.isfinite().all():
        raise UserError(f"the weights of `backbone.model` {name} give logits that are not finite numbers.")
    tokens = model.embed(pixels)
    for layer in range(model.num_layers):
        tokens = model.block(layer, tokens)
    features = model.features(tokens) @ model.text_features(range(model.num_layers)).T
    if not torch.allclose(features * clip.logit_scale.exp(), said, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"`backbone.model` {name} cannot be used: walked block by block it gives other logits than transformers."
        )


@lru_cache(maxsize=64)
def _checked(backbone: _Clip, names: tuple[str, ...], _fingerprint: str) -> None:
    backbone.build(len(names), class_names=names)
