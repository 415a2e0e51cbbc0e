"""Code shared by the scripts that train small CLIP models: vocabulary, configuration, loss, training, checkpoint."""

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
"""The maximum number of tokens of a text."""
START, END = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training with AdamW, warm-up and cosine decay."""

    epochs: int
    batch: int
    lr: float
    decay: float
    smoothing: float
    seed: int
    augmentation: AugmentationConfig


class Captioned(nn.Module):
    """A CLIP model with its tokenizer: it maps images (n, 3, h, w) in [0, 1] and m class names to logits (n, m)."""

    def __init__(self, clip: Any, tokenizer: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.clip, self.tokenizer, self.names = clip, tokenizer, names
        self._tokens: dict[str, Any] = {}

    def forward(self, images: Tensor, template: str) -> Tensor:
        """Return scaled cosine similarities (n, m) of the images and of `template` filled with each class name."""
        logits: Tensor = self.output(images, template).logits_per_image
        return logits

    def output(self, images: Tensor, template: str) -> Any:
        """Return the CLIP model's output for the images and for `template` filled with each class name."""
        if template not in self._tokens:
            texts = [template.format(name) for name in self.names]
            self._tokens[template] = self.tokenizer(texts, padding=True, return_tensors="pt")
        return self.clip(pixel_values=(images - 0.5) / 0.5, **self._tokens[template])


def write_vocabulary(folder: Path, captions: Iterable[str], size: int) -> None:
    """Learn a byte-pair encoding like CLIP's from captions, and write its vocabulary to a folder.

    Words that the captions do not contain are encoded in smaller pieces, down to single bytes. Pairs of letters with
    the same frequency are merged in any order, so the tokens may differ between runs.
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
    """Return the configuration of a CLIP encoder with four attention heads and MLPs of width `mlp * width`."""
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
    """Return the configuration of a CLIP model with the given encoders, for images of `size` by `size` pixels."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "pad_token_id": special["eos_token_id"]}
    both = {"projection_dim": projection}
    return CLIPConfig(
        vision_config={**vision, **both, "image_size": size, "patch_size": patch},
        text_config={**text, **both, **words, **special},
        projection_dim=projection,
    )


def contrast(logits: Tensor, matches: Tensor, smoothing: float) -> Tensor:
    """Return CLIP's contrastive loss: the mean of its image-to-caption and caption-to-image cross-entropies.

    Args:
        logits: Similarities of images and captions, (n, m).
        matches: 1 if an image matches a caption, else 0, (n, m). All captions that match an image share the image's
            weight, and all images that match a caption share the caption's weight.
        smoothing: Label smoothing of the images' targets.
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
    """Train a network and return the duration in seconds.

    Args:
        name: Label of the progress bar.
        network: The network to train.
        train_set: The training images.
        recipe: The hyperparameters.
        loss_of: The loss of pixels (n, 3, h, w) in [0, 1] and labels (n,), with a generator for its random choices.
        at_epoch: A function that is called after the first step of each epoch, with the number of finished epochs and
            the loss of this step.
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
    """Write a CLIP model for transformers: weights in half precision, configuration and image normalisation."""
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
    """Write a JSON file that describes trained weights: the facts, the recipe and the SHA-256 of the weights file."""
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
