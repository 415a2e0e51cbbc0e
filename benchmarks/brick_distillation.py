"""Time FedBRICK's distillation of all blocks at once against a loop over blocks, and compare the results.

    uv run python benchmarks/brick_distillation.py
    uv run python benchmarks/brick_distillation.py --device cuda --out benchmarks/results/NAME.json

A BRICK is a small module that replaces a block. The loop implements Eq. 20 of FedBRICK directly: it trains one BRICK
per block, each with its own torch.optim.Adam. One variant of the loop uses cached activations. The other variant runs
the backbone up to the block for every batch, as a simple program would.

The models are ViTs of three widths with random weights, and the images belong to one domain. The distillation of all
blocks at once and the two loops are timed in turn. The table shows medians. On a CPU, one thread is used.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fedsweep.methods.fedbrick.bricks import FACTORS, activations, brick, distil
from fedsweep.models import LayeredModel, LoraConfig, TimmBackbone, build_model
from fedsweep.types import ImageSet

LR, RANK, BATCH, LAYERS = 0.01, 8, 32, 12
WIDTHS = {64: (16, 4), 128: (64, 16), 192: (64, 8)}
"""Map the width of a ViT to its image size and patch size in pixels, which give 16, 16 and 64 patches."""


def backbone(width: int) -> LayeredModel:
    """Build a ViT of 12 blocks with random weights and adapters."""
    size, patch = WIDTHS[width]
    shape = TimmBackbone(
        model="vit_tiny_patch16_224", pretrained="none", img_size=size, patch_size=patch, embed_dim=width, num_heads=4
    )
    return build_model(shape, LoraConfig(rank=8, scaling=1.0), 10, seed=0)


def start(width: int, device: str) -> dict[str, Tensor]:
    """Return an untrained BRICK for every block: a tensor (blocks, rows, columns) for each of the BRICK's matrices."""
    generator = torch.Generator().manual_seed(0)
    fresh = {"a1": (RANK, width), "b1": (width, RANK), "a2": (RANK, width), "b2": (width, RANK)}
    return {
        name: (
            torch.randn(LAYERS, *shape, generator=generator) / width if name[0] == "a" else torch.zeros(LAYERS, *shape)
        ).to(device)
        for name, shape in fresh.items()
    }


def side_by_side(model: LayeredModel, images: ImageSet, bricks: dict[str, Tensor], epochs: int) -> dict[str, Tensor]:
    """Return BRICKs that are trained for all blocks at once on cached activations, as in fedsweep."""
    passed = activations(model, [images], BATCH)
    return distil(bricks, passed, "softmax", epochs, LR, BATCH, np.random.default_rng(0))


def loop_cached(model: LayeredModel, images: ImageSet, bricks: dict[str, Tensor], epochs: int) -> dict[str, Tensor]:
    """Return BRICKs that are trained one block after the other on cached activations."""
    passed = activations(model, [images], BATCH)
    return _loop(bricks, epochs, len(images), lambda layer, rows: (passed[layer, rows], passed[layer + 1, rows]))


def loop_plain(model: LayeredModel, images: ImageSet, bricks: dict[str, Tensor], epochs: int) -> dict[str, Tensor]:
    """Return BRICKs that are trained one block after the other; for each batch, the backbone runs up to the block."""

    def pair(layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            tokens = model.walk(images.take(rows)[0], range(layer))
            return tokens, model.block(layer, tokens)

    return _loop(bricks, epochs, len(images), pair)


def _loop(
    bricks: dict[str, Tensor], epochs: int, images: int, pair: Callable[[int, Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    orders = [torch.from_numpy(rng.permutation(images)) for _ in range(epochs)]
    learned: dict[str, list[Tensor]] = {name: [] for name in FACTORS}
    for layer in range(LAYERS):
        factors = {name: bricks[name][layer].clone().requires_grad_() for name in FACTORS}
        optimizer = torch.optim.Adam(factors.values(), lr=LR)
        for order in orders:
            for rows in torch.split(order, BATCH):
                x, y = pair(layer, rows)
                loss = (brick(x, factors, "softmax") - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for name in FACTORS:
            learned[name].append(factors[name].detach())
    return {name: torch.stack(one) for name, one in learned.items()}


WAYS = {"side by side": side_by_side, "loop, cached": loop_cached, "loop, plain": loop_plain}


def measure(width: int, images: int, epochs: int, times: int, device: str) -> dict[str, float]:
    """Time all variants on a ViT of the given width, and compare the BRICKs that they train.

    Returns:
        The median seconds of each variant. The seconds of each loop, divided by those of `side by side`, which
        distils all blocks at once. As `apart`, the largest relative difference (in the Frobenius norm) between the
        matrices of the BRICKs from a loop and those from `side by side`.
    """
    model, bricks = backbone(width).to(device), start(width, device)
    size = WIDTHS[width][0]
    pixels = torch.randint(256, (images, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = ImageSet(pixels, torch.zeros(images, dtype=torch.int64))
    learned = {name: way(model, data, bricks, epochs) for name, way in WAYS.items()}  # the first run warms up
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(times):
        for name, way in WAYS.items():
            begun = time.perf_counter()
            way(model, data, bricks, epochs)
            if device == "cuda":
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - begun)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    ours = learned["side by side"]
    apart = max(
        ((one[name] - ours[name]).norm() / ours[name].norm()).item() for one in learned.values() for name in FACTORS
    )
    ratios = {f"{name} / side by side": seconds[name] / seconds["side by side"] for name in list(WAYS)[1:]}
    return {**seconds, **ratios, "apart": apart}


def main() -> None:
    """Time the variants on ViTs of all widths, print a table and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=96, help="number of images of the domain")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--times", type=int, default=5, help="number of repetitions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for width in track(WIDTHS, description="widths", transient=True):
        found[width] = measure(width, asked.images, asked.epochs, asked.times, asked.device)
    table = Table("width", *next(iter(found.values())))
    for width, values in found.items():
        table.add_row(str(width), *(f"{value:.3g}" for value in values.values()))
    Console().print(table)
    if asked.out:
        machine = torch.cuda.get_device_name() if asked.device == "cuda" else f"{platform.machine()}, one thread"
        content = {"date": str(date.today()), "machine": machine, "torch": version("torch"), "images": asked.images}
        asked.out.write_text(json.dumps({**content, "epochs": asked.epochs, "widths": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
