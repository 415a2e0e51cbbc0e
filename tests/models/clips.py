"""Functions that write small CLIP checkpoints and compute the results of transformers' own forward pass."""

import copy
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.models import ClipBackbone, LoraConfig, add_lora
from fedsweep.models.clip.backbone import SHIPPED
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.weight_cache import Mould
from tests.models.small import stirred

NAMES = ("7", "no_one", "OneHand", "three")
READ = ("7", "no one", "One Hand", "three")
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
VOCABULARY, LONGEST, START, END = 609, 32, 607, 608
EQUAL, DEEP_IMAGES, DEEP_TEXT = (3, 3), (4, 2), (2, 4)
INNER = {
    "l0": ["self_attn.out_proj"],
    "l1": ["mlp.fc2"],
    "both": ["self_attn.out_proj", "mlp.fc2"],
    "mlp": ["mlp.fc1", "mlp.fc2"],
    "attention": [f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")],
    "all": [*(f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"],
}
"""The adapted linear layers of a block, by LoRA position."""


@cache
def network(vision: int = 3, text: int = 3, seed: int = 0) -> Any:
    """Return a very small CLIP network of transformers in which every tensor influences the output."""
    from transformers import CLIPConfig, CLIPModel

    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    shape = {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    config = CLIPConfig(
        vision_config=shape
        | {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": vision, "image_size": 16, "patch_size": 8},
        text_config=shape
        | special
        | {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": text}
        | {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST},
        projection_dim=12,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return stirred(CLIPModel(config), seed)


def write(folder: Path, clip: Any, weights: str = "model.safetensors") -> Path:
    """Write a checkpoint in transformers' layout, and return its folder."""
    clip.save_pretrained(folder)
    if weights != "model.safetensors":
        torch.save(dict(clip.state_dict()), folder / weights)
        (folder / "model.safetensors").unlink()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(SHIPPED / "digits_clip" / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return folder


def backbone(folder: Path | str, **changes: Any) -> ClipBackbone:
    return ClipBackbone.of({"name": "clip", "model": str(folder), **changes}, "test")


def built(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> LayeredClip:
    return backbone(folder, **changes).build(len(names), class_names=names)


@cache
def mould(folder: Path, names: Sequence[str], prompt: str) -> Mould:
    return Mould(built(folder, names, prompt=prompt))


def copied(folder: Path, names: Sequence[str] = NAMES, prompt: str = "This is a picture of {}") -> LayeredClip:
    """Return a copy of the model that `built` returns; a checkpoint is read only once and must not change."""
    model: LayeredClip = mould(folder, names, prompt).cast()
    return model


def noise(count: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)


def pixels(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def padded(folder: Path, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return the tokens of transformers' tokenizer, padded to the longest allowed length as in OpenAI's code."""
    from transformers import CLIPTokenizer

    found = CLIPTokenizer.from_pretrained(folder)(
        list(texts), padding="max_length", max_length=LONGEST, return_tensors="pt"
    )
    return dict(found)


@torch.no_grad()
def logits_of(clip: Any, folder: Path, images: Tensor, template: str = "This is a picture of {}") -> Tensor:
    """Return the logits (images, classes) of transformers' own forward pass."""
    tokens = padded(folder, [template.format(name) for name in READ])
    return clip(pixel_values=pixels(images), **tokens).logits_per_image


def shortened(clip: Any, path: Sequence[int]) -> Any:
    """Return a copy of transformers' CLIP with only the blocks in `path`.

    The last blocks of both encoders have the same number, so a shorter encoder has no blocks with small numbers.
    """
    clip = copy.deepcopy(clip)
    encoders = [clip.vision_model.encoder, clip.text_model.encoder]
    depth = max(len(one.layers) for one in encoders)
    for one in encoders:
        missing = depth - len(one.layers)
        one.layers = nn.ModuleList(one.layers[layer - missing] for layer in path if layer >= missing)
    return clip


def adapted(folder: Path, position: str = "all", **changes: Any) -> LayeredClip:
    """Return a model with random adapters of rank 2, so that the adapters change the output."""
    lora = LoraConfig(**{"rank": 2, "scaling": 1.0, "dropout": 0.0, "position": position, **changes})
    model = copied(folder)
    add_lora(model, lora, seed=0)
    model.load_adapter(drawn(model.eval(), seed=1))
    return model


def drawn(model: LayeredClip, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}


def counted(module: nn.Module) -> list[int]:
    """Return a list whose only entry counts the calls of a module from now on."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    module.register_forward_hook(note)
    return calls
