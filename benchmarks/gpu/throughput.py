"""Images per second of local training and evaluation, compared with a plain PyTorch loop that does the same work."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.common.randomness import stream
from fedsweep.federation.build_and_run import Device
from fedsweep.methods.bounds import AllLarge
from fedsweep.methods.capabilities import predicted
from fedsweep.models import BackboneConfig, DigitsViT, LoraConfig, TimmBackbone, build_model
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.base import Reader
from fedsweep.models.layered import LayeredModel
from fedsweep.models.resident_images import ResidentImages
from fedsweep.training.base_optimizers import FedAvg
from fedsweep.training.evaluation import evaluate
from fedsweep.training.local_training import CohortTrainer, LocalConfig, LocalTask, batches, cross_entropy
from fedsweep.training.optimizers import SGDConfig
from fedsweep.training.precision import Precision, arithmetic
from fedsweep.types import Client, Domain, ImageSet, LayerAllocation, ServerState

CLASSES, TESTED, TURNS, SMALL = 10, 256, 3, 16
SGD = SGDConfig(lr=0.01)
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Work:
    """A backbone, the side length of its images in pixels, the batch size of training, and numbers of batches."""

    name: str
    backbone: BackboneConfig
    size: int
    batch: int
    steps: int
    tests: int


def works(quick: bool) -> list[Work]:
    """Return the work to measure: ViT-B/16 at 224 px, or ViT-Ti/16 at 64 px if `quick`, and the embedded ViT."""
    digits = DigitsViT()
    if quick:
        tiny = TimmBackbone(model="vit_tiny_patch16_224", pretrained="none", img_size=64)
        return [Work("ViT-Ti/16, 64 px", tiny, 64, 8, 2, 1), Work("embedded ViT, 16 px", digits, SMALL, 32, 4, 1)]
    large = TimmBackbone(model="vit_base_patch16_224", pretrained="none")
    return [
        Work("ViT-B/16, 224 px", large, 224, 32, 8, 1),
        Work("embedded ViT, 16 px", digits, SMALL, 32, 40, 20),
        Work("embedded ViT, 16 px", digits, SMALL, 256, 40, 20),
    ]


class Bench:
    """A model on a device with random images, trained and tested by fedsweep and by a plain PyTorch loop."""

    def __init__(self, work: Work, device: Device) -> None:
        self.work, self.device = work, torch.device(device)
        lora = LoraConfig(rank=8, scaling=1.0, position="both", dropout=0.0)
        self.model: LayeredModel = build_model(work.backbone, lora, CLASSES, 0).to(device)
        generator = torch.Generator().manual_seed(0)
        count = max(work.batch * work.steps, TESTED * work.tests)
        pixels = torch.randint(256, (count, 3, work.size, work.size), dtype=torch.uint8, generator=generator)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        self.train = ImageSet(pixels[: work.batch * work.steps], labels[: work.batch * work.steps])
        self.test = ImageSet(pixels[: TESTED * work.tests], labels[: TESTED * work.tests])
        self.start = self.model.adapter()
        resident = ResidentImages.on(self.device)
        self.reader = Reader(self.model, "benchmark", FrozenRows(), TESTED, resident=resident)
        self.plain = copy.deepcopy(self.model)

    def fit(self) -> float:
        """Train one client with fedsweep, and return its mean loss."""
        local = LocalConfig(batch_size=self.work.batch, steps=self.work.steps)
        client = Client("one", "noise", self.train, self.model.num_layers)
        trainer = CohortTrainer(self.model, SGD, FedAvg(), local, 0, 1, len(self.train), self.reader)
        row = LayerAllocation.of(list(range(self.model.num_layers)))
        (update,) = trainer.fit([LocalTask(client, self.start, row, cross_entropy)])
        return update.metrics["loss"]

    def score(self) -> float:
        """Test the model with fedsweep, and return the mean loss."""
        self.model.load_adapter(self.start)
        state = ServerState(self.start, tuple(range(self.model.num_layers)))
        predict = partial(predicted, AllLarge(), state, self.reader)
        return evaluate(predict, [Domain("noise", self.test, self.test)])["loss/test"]

    def plain_fit(self, pixels: Tensor, labels: Tensor) -> float:
        """Train the same network on the same batches with torch's own optimizer, and return the mean loss."""
        self.plain.load_adapter(self.start)
        network: nn.Module = self.plain.backbone.train()
        trained = [one for one in network.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, SGD.lr, SGD.momentum, weight_decay=SGD.weight_decay)
        total = torch.zeros((), device=self.device)
        order = batches(len(labels), self.work.batch, self.work.steps, stream(0, "batches", 0, "one"))
        for rows in map(torch.from_numpy, order):
            here = rows.to(pixels.device)
            loss = F.cross_entropy(network(self._normalized(pixels[here])), labels[here].to(self.device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, SGD.clip_norm or 0.0)
            optimizer.step()
            total += loss.detach()
        return total.item() / self.work.steps

    @torch.no_grad()
    def plain_score(self, pixels: Tensor, labels: Tensor) -> float:
        """Test the same network in a plain loop, and return the mean loss."""
        self.plain.load_adapter(self.start)
        network: nn.Module = self.plain.backbone.eval()
        logits = [network(self._normalized(part)) for part in pixels.split(TESTED)]  # type: ignore[no-untyped-call]
        return F.cross_entropy(torch.cat(logits), labels.to(self.device)).item()

    def _normalized(self, pixels: Tensor) -> Tensor:
        floats = pixels.to(self.device, non_blocking=True).float() / 255
        if len(self.plain.mean) == 1:
            floats = floats.mean(1, keepdim=True)
        return (floats - self.plain.mean.view(-1, 1, 1)) / self.plain.std.view(-1, 1, 1)

    def timed(self, work: Callable[[], float]) -> tuple[float, float]:
        """Return the median seconds of `work` after one run that is left out, and the value that it returned."""
        value, seconds = work(), []
        for _ in range(TURNS):
            self._wait()
            begun = time.perf_counter()
            value = work()
            self._wait()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds), value

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def ceiling(device: Device, quick: bool, precision: Precision) -> float:
    """Return the measured floating-point operations per second of a large matrix product."""
    size, dtype = 512 if quick else 8192, torch.bfloat16 if precision == "bfloat16" else torch.float32
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        (one @ other).sum().item()
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / statistics.median(seconds[1:])


def row(bench: Bench, phase: str, precision: Precision, peak: float) -> dict[str, Any]:
    """Measure one phase, `train` or `test`, with fedsweep and with the plain loop."""
    images = bench.train if phase == "train" else bench.test
    ours, theirs = (bench.fit, bench.plain_fit) if phase == "train" else (bench.score, bench.plain_score)
    pixels = images.images
    assert isinstance(pixels, Tensor)  # noqa: S101 - this set is one tensor
    with FlopCounterMode(display=False) as counter:
        theirs(pixels, images.labels)
    operations = counter.get_total_flops() / len(images)
    found = {
        "fedsweep": bench.timed(ours),
        "plain": bench.timed(partial(theirs, pixels, images.labels)),
        "resident": bench.timed(partial(theirs, pixels.to(bench.device), images.labels.to(bench.device))),
    }
    rates = {name: len(images) / seconds for name, (seconds, _) in found.items()}
    return {
        "model": bench.work.name,
        "phase": phase,
        "batch": bench.work.batch if phase == "train" else TESTED,
        "precision": precision,
        **{f"images_per_second_{name}": round(rate, 1) for name, rate in rates.items()},
        "ratio_to_plain": round(rates["fedsweep"] / rates["plain"], 3),
        "gflop_per_image": round(operations / 1e9, 3),
        "share_of_peak": round(rates["fedsweep"] * operations / peak, 3),
        "peak_tflops": round(peak / 1e12, 1),
        "loss": found["fedsweep"][1],
        "loss_plain": found["plain"][1],
    }


def measure(device: Device, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each phase, in each arithmetic that suits the work."""
    for work in works(quick):
        bench = Bench(work, device)
        # On a GPU, the embedded ViT is bound by the launches of its kernels. Many CPUs emulate bfloat16.
        few = work.size == SMALL or device == "cpu"
        for precision in PRECISIONS[:1] if few else PRECISIONS:
            with arithmetic(precision, bench.device):
                peak = ceiling(device, quick, precision)
                rows = [row(bench, phase, precision, peak) for phase in ("train", "test")]
            yield from rows


def accepted(row: dict[str, Any]) -> bool:
    """Return whether fedsweep and the plain loop computed the same loss."""
    return bool(abs(row["loss"] - row["loss_plain"]) <= 0.01 * row["loss_plain"])


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all phases."""
    found = Table("model", "phase", "batch", "precision", "images/s", "plain loop", "pixels on GPU", "share of peak")
    for one in rows:
        rates = [f"{one[f'images_per_second_{name}']:,.0f}" for name in ("fedsweep", "plain", "resident")]
        found.add_row(
            one["model"], one["phase"], str(one["batch"]), one["precision"], *rates, f"{one['share_of_peak']:.0%}"
        )
    return found
