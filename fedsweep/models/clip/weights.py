"""Functions that read the configuration, weights, normalisation and tokenizer of a CLIP checkpoint."""

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsweep.common.errors import UserError, near, one_line
from fedsweep.models.checkpoint_folder import CONFIG, digest, find, is_folder
from fedsweep.models.weights_file import check_not_compressed

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size")


def _known(width: int, blocks: int, patch: int, size: int, text: int) -> dict[str, Any]:
    # All of OpenAI's CLIP models have 64 features per attention head, MLPs of four times the width and 12 text blocks.
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "patch_size": patch,
        "image_size": size,
    }
    words = {"hidden_size": text, "intermediate_size": 4 * text, "num_attention_heads": text // 64}
    return {"vision_config": vision, "text_config": words, "projection_dim": text}


KNOWN = {
    "openai/clip-vit-base-patch32": _known(768, 12, 32, 224, 512),
    "openai/clip-vit-base-patch16": _known(768, 12, 16, 224, 512),
    "openai/clip-vit-large-patch14": _known(1024, 24, 14, 224, 768),
    "openai/clip-vit-large-patch14-336": _known(1024, 24, 14, 336, 768),
}
"""The sizes of public checkpoints, so that runs can be planned before a checkpoint is downloaded."""


def config_of(model: str) -> Any:
    """Return transformers' CLIPConfig for the checkpoint `model`.

    The checkpoint is downloaded if necessary. OpenAI's models are not downloaded, because `KNOWN` contains their sizes.

    Raises:
        UserError: The checkpoint is missing, or transformers cannot read it as a CLIP model.
    """
    import transformers

    config: Any = transformers.CLIPConfig
    if model in KNOWN and not is_folder(model):
        return config(**deepcopy(KNOWN[model]), attn_implementation="sdpa")
    try:
        folder = find(model)
    except UserError as error:
        raise UserError(str(error).removesuffix(".") + (near(model, KNOWN, cutoff=0.8) or ".")) from None
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if said.get("model_type") != "clip":
            raise ValueError(f"`model_type` is {said.get('model_type')}")
        for encoder in ("vision_config", "text_config"):
            for name, value in (said.get(encoder) or {}).items():  # older releases of transformers accept any value
                if name in SIZES and (type(value) is not int or value < 1):
                    raise ValueError(f"`{encoder}.{name}` must be a whole number above 0, but it is {value}")
        return config.from_pretrained(folder, attn_implementation="sdpa")
    except Exception as error:  # transformers' checks raise exceptions of various classes
        raise UserError(
            f"`backbone.model` {model} is not a CLIP model that transformers can read: {one_line(error)}."
        ) from None


def load(folder: Path, name: str) -> Any:
    """Return transformers' CLIPModel with the weights in `folder`, in single precision and evaluation mode.

    Raises:
        UserError: The checkpoint `name` cannot be loaded or lacks tensors.
    """
    import transformers

    for path in folder.glob("*.bin"):
        check_not_compressed(path)
    model: Any = transformers.CLIPModel
    logging: Any = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        clip, found = model.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # each file format raises its own exceptions
        raise UserError(f"`backbone.model` {name} cannot be loaded: {one_line(error)}.") from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
    if wrong := sorted(found["missing_keys"]) or sorted(map(str, found["mismatched_keys"])):
        raise UserError(
            f"`backbone.model` {name} lacks tensors of a CLIP model or has them in another shape: {wrong[0]}."
        )
    return clip.eval()


def normalisation(path: Path, name: str) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each colour channel, read from a preprocessor's JSON file.

    Raises:
        UserError: The file, which belongs to the checkpoint `name`, is malformed.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        mean, std = ([float(one) for one in said[f"image_{which}"]] for which in ("mean", "std"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"`backbone.model` {name} has a {path.name} that cannot be read: {one_line(error)}.") from None
    if len(mean) != 3 or len(std) != 3 or not all(math.isfinite(one) for one in mean + std) or min(std) <= 0:
        raise UserError(
            f"`backbone.model` {name} must have three finite means and three positive standard deviations in "
            f"{path.name}, but it has {mean} and {std}."
        )
    return mean, std


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of the checkpoint in `folder`. The tokenizer is read from disk when it is first called."""

    folder: Path

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the padded token ids (n, longest) of n texts, and the position (n,) of the last token of each text.

        Raises:
            UserError: The tokenizer cannot be read.
        """
        found = _tokenizer(self.folder, digest(self.folder))(list(texts), padding=True, return_tensors="pt")
        return found["input_ids"], found["attention_mask"].sum(1) - 1


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, _digest: str) -> Any:
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each file format raises its own exceptions
        raise UserError(f"the tokenizer in {folder} cannot be read: {one_line(error)}.") from error


THEIRS = {
    "stem.embeddings.": "vision_model.embeddings.",
    "stem.norm.": "vision_model.pre_layrnorm.",
    "words.": "text_model.embeddings.",
    "top.vision_norm.": "vision_model.post_layernorm.",
    "top.vision_projection.": "visual_projection.",
    "top.text_norm.": "text_model.final_layer_norm.",
    "top.text_projection.": "text_projection.",
}
"""A map from fedsweep's to CLIPModel's prefixes of the names of tensors outside the blocks."""


def in_clip_model(name: str, place: int | None) -> str:
    """Convert fedsweep's name for a CLIP tensor to the tensor's name in transformers' CLIPModel.

    `place` is the index of the tensor's block in its encoder, or None if the tensor is outside the blocks.

    >>> in_clip_model("backbone.blocks.7.text.mlp.fc1.weight", 3), in_clip_model("backbone.stem.norm.bias", None)
    ('text_model.encoder.layers.3.mlp.fc1.weight', 'vision_model.pre_layrnorm.bias')
    """
    bare = name.removeprefix("backbone.")
    if place is not None:
        _, _, tower, rest = bare.split(".", 3)
        return f"{tower}_model.encoder.layers.{place}.{rest}"
    ours = next((prefix for prefix in THEIRS if bare.startswith(prefix)), "")
    return THEIRS[ours] + bare.removeprefix(ours) if ours else bare
