"""CLIP backbones: checkpoints on the Hugging Face Hub or in folders, and small CLIP models shipped with fedsweep."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import readable
from fedsweep.models.base import Backbone, Outline, Recipe, check_walk
from fedsweep.models.checkpoint_folder import PREPROCESSOR, digest, find, is_folder
from fedsweep.models.clip.model import LayeredClip, Tokenize, Towers
from fedsweep.models.clip.weights import Tokenizer, config_of, load, normalisation

SHIPPED = Path(__file__).parents[1] / "weights"


class _Clip(Backbone):
    """The base class of CLIP backbones, which classify images with one text prompt per class instead of a head."""

    has_head: ClassVar = False
    has_text: ClassVar = True
    positions: ClassVar = tuple(LayeredClip.positions())

    prompt: str = Field("This is a picture of {}", description="prompt of a class; {} is replaced with the class name")

    @field_validator("prompt")
    @classmethod
    def _one_place(cls, prompt: str) -> str:
        if prompt.count("{}") != 1 or {"{", "}"} & set(prompt.replace("{}", "")):
            raise ValueError(f"`backbone.prompt` must contain {{}} once, for the class name, but it is `{prompt}`")
        return prompt

    @property
    def _outline(self) -> Outline:
        return _outline(self._model)

    @property
    @abstractmethod
    def _model(self) -> str:
        """The name of the checkpoint on the Hugging Face Hub, or the checkpoint's folder."""

    def fingerprint(self) -> str:
        return f"sha256:{digest(find(self._model))}"

    def build(self, num_classes: int, seed: int = 0, class_names: Sequence[str] | None = None) -> LayeredClip:
        """Return the model with its weights, in evaluation mode on the CPU.

        `seed` has no effect, because no parameter is random. If `class_names` is None, the numbers of the classes serve
        as their names.

        Raises:
            UserError: The checkpoint is missing or unsuitable, or a prompt is longer than the text encoder allows.
        """
        folder = find(self._model)
        names = class_names or list(map(str, range(num_classes)))
        clip = load(folder, self._model)
        mean, std = normalisation(folder / PREPROCESSOR, self._model)
        model = LayeredClip(Towers(clip), mean, std, Tokenizer(folder), self.prompt, names)
        padding = torch.arange(model.prompts.shape[1]) <= model.ends[:, None]

        def forward(pixels: Tensor) -> Tensor:
            out = clip(input_ids=model.prompts, pixel_values=pixels, attention_mask=padding.long())
            return cast(Tensor, out.logits_per_image)

        check_walk(model, forward, self.image_size, self._model, "transformers", tolerance=1e-3)
        return model

    def recipe(self, num_classes: int) -> Recipe:
        fetched = not is_folder(self._model)
        return Recipe(call="transformers.CLIPModel.from_pretrained", model=self._model, fetched=fetched)

    def folder(self) -> Path:
        """Return the folder with the checkpoint's files; download them if necessary.

        Raises:
            UserError: The checkpoint is missing or cannot be downloaded.
        """
        return find(self._model)

    def prompts(self, class_names: Sequence[str]) -> list[str]:
        """Return the text prompt of each class, in the order of `class_names`."""
        return [self.prompt.format(readable(name)) for name in class_names]

    def outlined(self, num_classes: int, class_names: Sequence[str] | None = None) -> LayeredClip:
        """Return the model on torch's meta device, where tensors have shapes but no values.

        With `class_names`, the prompts have the same number of tokens as those of `build`, and the checkpoint must be
        present. Without names, every prompt has two tokens.
        """
        from transformers import CLIPModel

        names = class_names or list(map(str, range(num_classes)))
        tokenize = _no_tokens if class_names is None else _meta_tokens(Tokenizer(find(self._model)))
        with torch.device("meta"):
            towers = Towers(CLIPModel(config_of(self._model)))
            return LayeredClip(towers, [0.5] * 3, [0.5] * 3, tokenize, self.prompt, names)


class ClipBackbone(_Clip):
    """A CLIP checkpoint that transformers can load as a CLIPModel, for example a checkpoint from OpenAI."""

    name: Literal["clip"] = "clip"
    model: str = Field(min_length=1, description="checkpoint: a name on the Hugging Face Hub, or a folder")

    @field_validator("model")
    @classmethod
    def _is_there(cls, model: str) -> str:
        _outline(model)
        return model

    @property
    def _model(self) -> str:
        return self.model


class DigitsClip(_Clip):
    """A small CLIP model, shipped with fedsweep and trained on MNIST images whose captions name the digits."""

    name: Literal["digits_clip"] = "digits_clip"
    encoder: Literal["base", "patch8", "large"] = Field(
        "base",
        description="size of each encoder: `base` (6 blocks of width 64, patches of 4 px), `patch8` (the same, but "
        "patches of 8 px), or `large` (8 blocks of width 96, patches of 4 px)",
    )

    @property
    def _model(self) -> str:
        name = "digits_clip" if self.encoder == "base" else f"digits_clip_{self.encoder}"
        return str(SHIPPED / name)


@lru_cache(maxsize=64)
def _outline(model: str) -> Outline:
    try:
        config = config_of(model)
    except UserError as error:
        raise ValueError(str(error).removesuffix(".")) from None
    vision, text = config.vision_config, config.text_config
    return Outline(
        layers=max(vision.num_hidden_layers, text.num_hidden_layers),
        width=vision.hidden_size,
        image_size=vision.image_size,
        largest_rank=dict.fromkeys(LayeredClip.positions(), min(vision.hidden_size, text.hidden_size)),
    )


def _meta_tokens(tokenizer: Tokenizer) -> Tokenize:
    """Return a tokenizer whose tensors have the shapes of those of `tokenizer`, but no values."""

    def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        with torch.device("cpu"):
            tokens, ends = tokenizer(texts)
        return tokens.to("meta"), ends.to("meta")

    return tokenize


def _no_tokens(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(texts), 2, dtype=torch.int64), torch.ones(len(texts), dtype=torch.int64)
