"""What the scripts that train small CLIPs share: tokens from captions, shape, contrast, training, checkpoint, card."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.pre_tokenizers import Sequence as Each
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPTokenizer

from fedsweep.pretraining.augmentation import AugmentationConfig
from fedsweep.types import ImageSet

CONTEXT = 32
"""Tokens of the longest text."""
START, END = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """How one network is trained; AdamW with a warm-up and a cosine."""

    epochs: int
    batch: int
    lr: float
    decay: float
    smoothing: float
    seed: int
    augmentation: AugmentationConfig


class Captioned(nn.Module):
    """A CLIP with its tokenizer: images (n, 3, h, w) in [0, 1] and names (m,) to logits (n, m)."""

    def __init__(self, clip: Any, tokenizer: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.clip, self.tokenizer, self.names = clip, tokenizer, names
        self._tokens: dict[str, Any] = {}

    def forward(self, images: Tensor, template: str) -> Tensor:
        """Cosines, scaled, of the images with all names in this sentence."""
        logits: Tensor = self.output(images, template).logits_per_image
        return logits

    def output(self, images: Tensor, template: str) -> Any:
        """All that transformers' CLIP says of the images and of all names in this sentence."""
        if template not in self._tokens:
            texts = [template.format(name) for name in self.names]
            self._tokens[template] = self.tokenizer(texts, padding=True, return_tensors="pt")
        return self.clip(pixel_values=(images - 0.5) / 0.5, **self._tokens[template])


def write_vocabulary(folder: Path, captions: Iterable[str], size: int) -> None:
    """CLIP's kind of byte-level pair encoding, learnt from our own captions; any other text falls apart into bytes.

    Pairs of letters that are equally frequent are merged in any order, so that tokens may differ from run to run.
    """
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = Each([Whitespace(), ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(
        vocab_size=size, end_of_word_suffix="</w>", initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *(merge.replace(" ", "") for merge in merges)]
    tokens = [*dict.fromkeys(tokens), START, END]
    (folder / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    settings = {"model_max_length": CONTEXT, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def encoder(width: int, blocks: int, mlp: int, activation: str = "quick_gelu") -> dict[str, Any]:
    """One of the two encoders, of four heads; its MLPs are `mlp` times as wide."""
    return {
        "hidden_size": width,
        "intermediate_size": mlp * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "hidden_act": activation,
    }


def clip_config(
    vision: Mapping[str, Any], text: Mapping[str, Any], size: int, patch: int, projection: int, tokenizer: CLIPTokenizer
) -> CLIPConfig:
    """A CLIP of these encoders for images of `size` pixels and the tokenizer's texts."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "pad_token_id": special["eos_token_id"]}
    both = {"projection_dim": projection}
    return CLIPConfig(
        vision_config={**vision, **both, "image_size": size, "patch_size": patch},
        text_config={**text, **both, **words, **special},
        projection_dim=projection,
    )


def contrast(logits: Tensor, matches: Tensor, smoothing: float) -> Tensor:
    """The contrast of images and captions in both directions; `matches` (n, m) is 1 where an image goes with a caption.

    All captions of an image share its weight, and all images of a caption that caption's.
    """
    rows = matches / matches.sum(1, keepdim=True)
    columns = (matches / matches.sum(0).clamp(min=1)).T
    present = matches.any(0)
    images = F.cross_entropy(logits, (1 - smoothing) * rows + smoothing / logits.shape[1])
    return (images + F.cross_entropy(logits.T[present], columns[present])) / 2


def train(
    name: str,
    network: nn.Module,
    train_set: ImageSet,
    recipe: Recipe,
    loss_of: Callable[[Tensor, Tensor, torch.Generator], Tensor],
    at_epoch: Callable[[int, float], None],
) -> float:
    """Train on pixels (n, 3, h, w) in [0, 1] and their labels; the seconds that it took.

    `at_epoch` is called behind the first step of each epoch, with how many are done and that step's loss.
    """
    matrices = [one for one in network.parameters() if one.ndim > 1]
    others = [one for one in network.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, fused=True)
    per_epoch = len(train_set) // recipe.batch
    steps = recipe.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(recipe.seed)
    order, begun = torch.empty(0, dtype=torch.int64), time.monotonic()
    network.train()
    for step in track(range(steps), name):
        if len(order) < recipe.batch:
            order = torch.randperm(len(train_set), generator=generator)
        images, labels = train_set.take(order[: recipe.batch])
        order = order[recipe.batch :]
        pixels = recipe.augmentation(images.float() / 255, generator)
        loss = loss_of(pixels, labels, generator)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % per_epoch == 0:
            at_epoch(step // per_epoch, float(loss.detach()))
    network.eval()
    return time.monotonic() - begun


def write_clip(folder: Path, clip: Any, size: int) -> None:
    """The weights in half precision, the shape and the normalisation, as transformers has them."""
    clip.half().save_pretrained(folder)
    clip.float()
    settings = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": size,
        "image_processor_type": "CLIPImageProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_card(path: Path, weights: Path, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """What the weights are, and their digest."""
    card = {
        **facts,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "batch": recipe.batch,
        "lr": recipe.lr,
        "weight_decay": recipe.decay,
        "label_smoothing": recipe.smoothing,
        "augmentation": recipe.augmentation.model_dump(mode="json"),
        "seed": recipe.seed,
        "versions": {package: version(package) for package in ("torch", "transformers", "timm", "tokenizers")},
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    path.write_text(json.dumps(card, indent=2) + "\n")
