"""Train the CLIP-shaped models and the gate's trunk that ship with fedsweep, on MNIST's digits and their names.

    fedsweep data prepare mnist --root DIR --size 16     # DIR: a folder with mnist.parquet
    python scripts/train_digits_clip.py base             # or patch8, large, trunk; 10 to 30 minutes each on one core

Everything is drawn from one seed. Training images are varied as for `fedsweep pretrain digits_vit`, and none is of a
domain of the experiments. What is written is a checkpoint as transformers saves it, in half precision, with a card.
"""

import argparse
import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Whitespace
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from fedsweep.data.prepared import PreparedData
from fedsweep.models.trunk import WEIGHTS as TRUNK
from fedsweep.models.trunk import DigitsTrunk
from fedsweep.pretraining.augmentation import GlyphAugmentation
from fedsweep.types import ImageSet

WEIGHTS = Path(__file__).parents[1] / "fedsweep" / "models" / "weights"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "{}",
    "a photo of a {}",
    "an image of the digit {}",
    "the number {}",
    "this is a picture of {}",
    "a drawing of a {}",
    "a handwritten {}",
    "a {} on some background",
    "the digit {}, written by hand",
    "somebody wrote the number {}",
    "{} as a picture",
    "one sees a {}",
)
SHAPES = {
    "base": {"width": 64, "blocks": 6, "patch": 4},
    "patch8": {"width": 64, "blocks": 6, "patch": 8},
    "large": {"width": 96, "blocks": 8, "patch": 4},
}
CONTEXT = 32
"""Tokens of the longest text."""
START, END = "<|startoftext|>", "<|endoftext|>"
SEED, BATCH, LR, DECAY, SMOOTHING = 0, 128, 1e-3, 0.05, 0.1
EPOCHS = {"base": 60, "patch8": 60, "large": 45, "trunk": 25}
AUGMENTATION = GlyphAugmentation(bold=1.4)


def write_vocabulary(folder: Path) -> None:
    """CLIP's kind of byte-level pair encoding, learnt from our own captions; any other text falls apart into bytes."""
    captions = [template.format(name) for template in TEMPLATES for name in (*WORDS, *map(str, range(10)))]
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = Sequence([Whitespace(), ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(
        vocab_size=700, end_of_word_suffix="</w>", initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
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


def clip_config(shape: dict[str, int], tokenizer: CLIPTokenizer) -> CLIPConfig:
    """A CLIP of this shape, with as many blocks in its text encoder as in its image encoder."""
    encoder = {
        "hidden_size": shape["width"],
        "intermediate_size": 2 * shape["width"],
        "num_hidden_layers": shape["blocks"],
        "num_attention_heads": 4,
        "projection_dim": 64,
        "hidden_act": "quick_gelu",
    }
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "pad_token_id": special["eos_token_id"]}
    return CLIPConfig(
        vision_config=encoder | {"image_size": 16, "patch_size": shape["patch"]},
        text_config=encoder | text | special,
        projection_dim=64,
    )


class Captioned(nn.Module):
    """A CLIP with its tokenizer: images (n, 3, 16, 16) in [0, 1] and two names of each class to logits (n, 20)."""

    def __init__(self, clip: Any, tokenizer: Any) -> None:
        super().__init__()
        self.clip, self.tokenizer = clip, tokenizer

    def forward(self, images: Tensor, template: str) -> Tensor:
        """Cosines, scaled, of the images with all names in this sentence."""
        names = [*map(str, range(10)), *WORDS]
        tokens = self.tokenizer([template.format(name) for name in names], padding=True, return_tensors="pt")
        logits: Tensor = self.clip(pixel_values=(images - 0.5) / 0.5, **tokens).logits_per_image
        return logits


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    """The contrast of images and captions in both directions; whatever has an image's class goes with it."""
    matches = torch.cat([F.one_hot(labels, 10)] * 2, dim=1).float()
    rows = matches / matches.sum(1, keepdim=True)
    columns = (matches / matches.sum(0).clamp(min=1)).T
    present = matches.any(0)
    images = F.cross_entropy(logits, (1 - SMOOTHING) * rows + SMOOTHING / logits.shape[1])
    return (images + F.cross_entropy(logits.T[present], columns[present])) / 2


def train(name: str, network: nn.Module, train_set: ImageSet) -> float:
    """AdamW with a warm-up and a cosine; the seconds that it took."""
    matrices = [one for one in network.parameters() if one.ndim > 1]
    others = [one for one in network.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    per_epoch = len(train_set) // BATCH
    steps = EPOCHS[name] * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(SEED)
    order, begun = torch.empty(0, dtype=torch.int64), time.monotonic()
    network.train()
    for step in track(range(steps), name):
        if len(order) < BATCH:
            order = torch.randperm(len(train_set), generator=generator)
        images, labels = train_set.take(order[:BATCH])
        order = order[BATCH:]
        pixels = AUGMENTATION(images.float() / 255, generator)
        if isinstance(network, Captioned):
            template = TEMPLATES[int(torch.randint(len(TEMPLATES), (), generator=generator))]
            loss = contrast(network(pixels, template), labels)
        else:
            loss = F.cross_entropy(network((pixels - 0.5) / 0.5), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % per_epoch == 0:
            print(name, step // per_epoch, round(float(loss.detach()), 4), flush=True)
    network.eval()
    return time.monotonic() - begun


@torch.inference_mode()
def accuracy(network: nn.Module, images: ImageSet) -> float:
    """Share of right answers; a CLIP's are zero-shot, by the digits' signs in a sentence."""
    right = 0
    for pixels, labels in images.batches(500):
        if isinstance(network, Captioned):
            logits = network(pixels.float() / 255, "This is a picture of {}")[:, :10]
        else:
            logits = network((pixels.float() / 255 - 0.5) / 0.5)
        right += int((logits.argmax(1) == labels).sum())
    return right / len(images)


def write_card(path: Path, weights: Path, facts: dict[str, Any]) -> None:
    """What the weights are, and their digest."""
    card = facts | {
        "origin": "trained from scratch on mnist (LeCun, Cortes and Burges) by scripts/train_digits_clip.py",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "batch": BATCH,
        "lr": LR,
        "weight_decay": DECAY,
        "label_smoothing": SMOOTHING,
        "augmentation": AUGMENTATION.model_dump(mode="json"),
        "seed": SEED,
        "versions": {package: version(package) for package in ("torch", "transformers", "timm", "tokenizers")},
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    path.write_text(json.dumps(card, indent=2) + "\n")


def main() -> None:
    """Train one of them and write it among the weights that ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=EPOCHS)
    what = parser.parse_args().what
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data = PreparedData(set="mnist", size=16, domains=("mnist",)).load()
    (domain,) = data.domains
    facts: dict[str, Any] = {"images": len(domain.train), "data_digest": data.digest, "epochs": EPOCHS[what]}
    if what == "trunk":
        trunk: Any = DigitsTrunk().outlined()
        trunk.reset_classifier(10)
        facts |= {"seconds": round(train(what, trunk, domain.train)), "accuracy": accuracy(trunk, domain.test)}
        trunk.reset_classifier(0)
        tensors = {key: one.half() if one.is_floating_point() else one for key, one in trunk.state_dict().items()}
        save_file(tensors, TRUNK)
        facts |= {"what": "ResNet-18 of channels 16, 32, 64, 64 at 16 px, without its classifier"}
        write_card(TRUNK.with_suffix(".json"), TRUNK, facts)
        return
    folder = WEIGHTS / ("digits_clip" if what == "base" else f"digits_clip_{what}")
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    shape = SHAPES[what]
    network = Captioned(CLIPModel(clip_config(shape, tokenizer)), tokenizer)
    facts |= {"seconds": round(train(what, network, domain.train))}
    network.clip.half().save_pretrained(folder)
    network.clip.float()
    settings = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": 16,
        "image_processor_type": "CLIPImageProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    facts |= {
        "what": "a CLIP of {blocks} blocks and width {width} in each encoder, patches of {patch} px".format(
            **SHAPES[what]
        ),
        "templates": TEMPLATES,
        "names": [*map(str, range(10)), *WORDS],
        "zero_shot_accuracy": accuracy(network, domain.test),
    }
    write_card(folder / "card.json", folder / "model.safetensors", facts)


if __name__ == "__main__":
    main()
