"""Pre-train the embedded backbone on MNIST and write it with its card.

    uv run python scripts/pretrain_digits_vit.py PATH/TO/mnist.parquet

The Parquet file has the columns `image` (PNG or JPEG bytes), `label` and `split` (`train`/`test`). Weights go to
fedsweep/models/weights/digits_vit.safetensors (float16), the card beside them.
"""

import argparse
import hashlib
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from fedsweep.data.digits import enlarge, rotate, stripes, thicken
from fedsweep.models.vit import WEIGHTS, DigitsViT, LayeredViT

MEAN, STD = [0.5] * 3, [0.5] * 3
RECIPE: dict[str, Any] = {
    "optimizer": "AdamW, weight decay 0.05, gradient norm clipped at 1",
    "schedule": "cosine with one epoch of warm-up",
    "epochs": 60,
    "batch_size": 128,
    "lr": 1e-3,
    "label_smoothing": 0.1,
    "drop_path": 0.25,
    "augmentation": "turn up to 15 degrees, scale 0.85-1.1, shift; thickening, stripes, noise, contrast and inversion "
    "now and then",
    "seed": 0,
    "threads": 1,
}


def read(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """Glyphs cropped to their ink, (n, 1, 16, 16) in [0, 1], and labels."""
    table = pq.read_table(path, columns=["image", "label", "split"]).to_pandas()
    table = table[table["split"] == split]
    glyphs = []
    for data in track(table["image"], description=f"decode {split}"):
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=np.float32) / 255
        rows, columns = np.nonzero(pixels > 0.2)
        crop = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        side = max(crop.shape[0], round(1.6 * crop.shape[1]) if crop.shape[1] > crop.shape[0] else crop.shape[0])
        canvas = np.zeros((crop.shape[0], max(crop.shape[1], side * 3 // 4)), dtype=np.float32)
        left = (canvas.shape[1] - crop.shape[1]) // 2
        canvas[:, left : left + crop.shape[1]] = crop
        glyphs.append(enlarge(torch.from_numpy(canvas)[None, None]))
    return torch.cat(glyphs), torch.tensor(table["label"].to_numpy(), dtype=torch.int64)


def augment(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """Varied digits (n, 3, 16, 16): what a general backbone has seen a little of, never a domain of the experiment."""
    n = len(glyphs)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def sometimes(share: float) -> Tensor:
        return (torch.rand(n, 1, 1, 1, generator=generator) < share).float()

    varied = rotate(glyphs, uniform(-15, 15, n), uniform(0.85, 1.1, n), uniform(-0.1, 0.1, n, 2))
    mask = sometimes(0.15)
    varied = mask * thicken(varied) + (1 - mask) * varied
    background = stripes(n, generator) * uniform(0, 0.5, n, 3, 1, 1) * sometimes(0.15)
    images = background * (1 - varied) + varied * uniform(0.6, 1, n, 3, 1, 1)
    images = images + 0.15 * torch.randn(n, 3, 16, 16, generator=generator) * sometimes(0.15)
    mask = sometimes(0.1)
    return (mask * (1 - images) + (1 - mask) * images).clamp(0, 1)


def train(model: LayeredViT, glyphs: Tensor, labels: Tensor, recipe: dict[str, Any]) -> None:
    """AdamW with a cosine schedule; one progress bar over the epochs."""
    generator = torch.Generator().manual_seed(recipe["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], weight_decay=0.05)
    steps = recipe["epochs"] * (len(glyphs) // recipe["batch_size"])
    warmup = steps // recipe["epochs"]
    step = 0
    for _ in track(range(recipe["epochs"]), description="pre-train"):
        model.train()
        order = torch.randperm(len(glyphs), generator=generator)
        for batch in torch.split(order, recipe["batch_size"]):
            if len(batch) < recipe["batch_size"]:
                continue
            factor = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = recipe["lr"] * factor
            pixels = (augment(glyphs[batch], generator) - 0.5) / 0.5
            loss = F.cross_entropy(model.backbone(pixels), labels[batch], label_smoothing=recipe["label_smoothing"])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1


@torch.inference_mode()
def accuracy(model: LayeredViT, glyphs: Tensor, labels: Tensor) -> float:
    """Share of correct answers on plain glyphs."""
    model.eval()
    pixels = (glyphs.expand(-1, 3, -1, -1) - 0.5) / 0.5
    return float((model.backbone(pixels).argmax(1) == labels).double().mean())


def main() -> None:
    """Parse arguments, train, write the weights and the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", type=Path)
    parser.add_argument("--epochs", type=int, default=RECIPE["epochs"])
    parser.add_argument("--drop-path", type=float, default=RECIPE["drop_path"])
    parser.add_argument("--threads", type=int, default=RECIPE["threads"])
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    changes = {"epochs": arguments.epochs, "drop_path": arguments.drop_path, "threads": arguments.threads}
    recipe = RECIPE | changes
    torch.manual_seed(recipe["seed"])
    started = time.monotonic()
    model = LayeredViT(DigitsViT().architecture(recipe["drop_path"]), MEAN, STD)
    train(model, *read(arguments.parquet, "train"), recipe)
    test_accuracy = accuracy(model, *read(arguments.parquet, "test"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().contiguous() for name, tensor in model.backbone.state_dict().items()}, arguments.out)
    card = {
        "what": "12-block ViT at 16 px with ten classes, the embedded default of fedsweep",
        "origin": "trained from scratch on MNIST (LeCun, Cortes, Burges) by scripts/pretrain_digits_vit.py",
        "data_sha256": hashlib.sha256(arguments.parquet.read_bytes()).hexdigest(),
        "images": pq.read_table(arguments.parquet, columns=["split"])["split"].to_pylist().count("train"),
        "recipe": recipe,
        "mean": MEAN,
        "std": STD,
        "parameters": sum(parameter.numel() for parameter in model.backbone.parameters()),
        "mnist_test_accuracy": round(test_accuracy, 4),
        "seconds": round(time.monotonic() - started),
        "sha256": hashlib.sha256(arguments.out.read_bytes()).hexdigest(),
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
