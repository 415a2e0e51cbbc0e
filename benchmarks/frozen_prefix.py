"""Time a client's training with and without cached activations of its frozen blocks, and compare the adapters.

    uv run python benchmarks/frozen_prefix.py
    uv run python benchmarks/frozen_prefix.py --device cuda --out benchmarks/results/NAME.json

The model is a CLIP model of the size of ViT-Tiny (12 blocks of width 192 at 224 px), with random weights and rank-1
adapters. As in FedMS's SAL (sparsely activated LoRA), only the topmost 1, 3, 6 or all 12 blocks are trained. A session
is two passes over the images. Without a cache, both passes run all blocks. With a cache, the second pass reads the
activations that the first pass wrote. The table compares the steps of the second passes. Sessions with and without the
cache are timed in turn. On a CPU, one thread is used.
"""

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from fedsweep.models import LoraConfig, add_lora
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.base import Reader
from fedsweep.models.clip.model import LayeredClip, Towers
from fedsweep.models.names import names_within
from fedsweep.training.local_training import cross_entropy
from fedsweep.training.optimizers import AdamConfig
from fedsweep.types import AdapterState, ImageSet

BLOCKS, WIDTH, SIZE, CLASSES = 12, 192, 224, 100
ACTIVE = (1, 3, 6, 12)


def tokens_of(texts: Any) -> tuple[Tensor, Tensor]:
    """Return random tokens (texts, 10), about as many as in a prompt, and the position of each last token (texts,)."""
    drawn = torch.randint(1, 500, (len(texts), 10), generator=torch.Generator().manual_seed(1))
    return drawn, torch.full((len(texts),), 9)


def model() -> LayeredClip:
    """Build a CLIP model of the size of ViT-Tiny, with LoRA and with random weights from a fixed seed."""
    torch.manual_seed(0)
    vision = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 3}
    vision |= {"num_hidden_layers": BLOCKS, "image_size": SIZE, "patch_size": 16}
    text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
    text |= {"vocab_size": 600, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    clip = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=128))
    names = [f"class {number}" for number in range(CLASSES)]
    built = LayeredClip(Towers(clip), [0.5] * 3, [0.5] * 3, tokens_of, "{}", names)
    add_lora(built, LoraConfig(rank=1, scaling=1.0, position="mlp", dropout=0.0), 0)
    return built.eval()


@dataclass
class Client:
    """A client that trains the topmost `active` blocks."""

    model: LayeredClip
    images: ImageSet
    batch: int
    active: int
    start: AdapterState

    def session(self, kept: FrozenRows) -> tuple[list[float], AdapterState]:
        """Train for two passes over the images, with the activations of frozen blocks cached in `kept`.

        Returns:
            The seconds of each step of the second pass, and the trained adapter.
        """
        network, path = self.model, range(BLOCKS)
        network.load_adapter(self.start)
        parameters = network.trainable()
        names = names_within(parameters, range(BLOCKS - self.active, BLOCKS))
        trained = [parameters[name] for name in names]
        optimizer = AdamConfig(clip_norm=None).over([one.data for one in trained])
        done, reader = network.frozen_steps(path, names), Reader(network, "benchmark", kept)
        prefix = reader.prefix(path, done, self.start) if done else None
        seconds: list[float] = []
        network.train()
        with network.frozen(path, done):
            for _ in range(2):
                seconds.clear()
                for rows in torch.arange(len(self.images)).split(self.batch):
                    begun = time.perf_counter()
                    pixels = reader.batch(self.images, rows, prefix, done, {})
                    labels = self.images.labels[rows].to(network.mean.device)
                    loss = cross_entropy(network, pixels, labels, path)
                    optimizer.step(list(torch.autograd.grad(loss, trained)))
                    if network.mean.is_cuda:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begun)
        network.eval()
        return seconds, {name: parameters[name].detach().clone() for name in names}


def main() -> None:
    """Time the training sessions, print a table and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3, help="number of sessions with and without the cache")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    network = model().to(given.device)
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(256, (given.images, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    images = ImageSet(pixels, torch.randint(CLASSES, (given.images,), generator=generator))
    rows = []
    for active in track(ACTIVE, "active blocks"):
        client = Client(network, images, given.batch, active, network.adapter())
        without, kept, same = [], [], True
        with tempfile.TemporaryDirectory() as folder:
            store = FrozenRows({pixels.data_ptr(): "benchmark"}, Path(folder), 10**10)
            for _ in range(given.turns):
                plain, theirs = client.session(FrozenRows())
                known, ours = client.session(store)
                without += plain
                kept += known
                same &= all(torch.equal(ours[name], theirs[name]) for name in ours)
            disk = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
        medians = statistics.median(without), statistics.median(kept)
        rows.append(
            {
                "active": active,
                "seconds_without": round(medians[0], 4),
                "seconds_kept": round(medians[1], 4),
                "ratio": round(medians[0] / medians[1], 2),
                "equal_bits": same,
                "kept_kb_per_image": round(disk / given.images / 1e3, 1),
            }
        )
    table = Table(
        "trained blocks of 12", "s per step", "cached, s per step", "ratio", "bit-identical", "cached KB per image"
    )
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console()
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    console.print(f"Peak resident memory of the process, including images and model: {peak:.0f} MB.")
    if given.out:
        facts = {"date": date.today().isoformat(), "device": given.device, "machine": platform.machine()}
        facts |= {"threads": 1, "batch": given.batch, "images": given.images, "peak_mb": round(peak)}
        versions = {name: version(name) for name in ("torch", "transformers")}
        given.out.write_text(json.dumps({**facts, "versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
