"""The images of a pre-training, its training loop, and its progress display."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.data.partition import pool
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.network import EpochRecord, Network, Saved, TrainingState, build_network, cosine, mixer
from fedsweep.types import ImageSet

VALIDATION_BATCH = 500
STEPS_PER_CHECK = 50
"""Steps between two checks of the loss, because reading it makes a GPU wait."""

OnStep = Callable[[int, Tensor], None]
"""Callback after each step with the number of images and the loss, a scalar on the device."""


@dataclass(frozen=True)
class TrainingData:
    """Training images, validation images (the test split), the class names, and the digest of all of these."""

    train: ImageSet
    validation: ImageSet
    class_names: tuple[str, ...]
    digest: str


def load_images(config: PretrainConfig) -> TrainingData:
    """Map the data set into memory, with its domains joined; raise UserError if it is missing or too small."""
    data = config.data.load()
    train = pool([domain.train for domain in data.domains])
    validation = pool([domain.test for domain in data.domains])
    for name in ("batch_size", "images_per_epoch"):
        if (asked := getattr(config, name)) is not None and asked > len(train):
            raise UserError(
                f"`{name}` must be at most {len(train)}, the training images of {config.data.set}, but it is {asked}."
            )
    if not len(validation):
        raise UserError(f"`data.set`: {config.data.set} has no test images to validate on.")
    return TrainingData(train, validation, data.class_names, data.digest)


@dataclass(frozen=True)
class Session:
    """The configuration, data and device of a pre-training, which stay constant."""

    config: PretrainConfig
    data: TrainingData
    checkpoint: Path
    device: torch.device
    threads: int

    @property
    def images(self) -> int:
        """Number of training images of an epoch, without those of the incomplete batch."""
        wanted = self.config.images_per_epoch or len(self.data.train)
        return wanted // self.config.batch_size * self.config.batch_size

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        return self.images // self.config.batch_size

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the network computes with the configured precision."""
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move uint8 images and labels to the device, pixels as float32 in [0, 1]; a GPU copies asynchronously."""
        if self.device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        return images.float().div_(255), labels


def train(session: Session, saved: Saved | None, on_step: OnStep) -> Iterator[EpochRecord]:
    """Train and yield all epochs, first those of `saved`; each is saved before it is yielded.

    The random numbers of an epoch depend on (seed, epoch) only, so that a resumed training is bit-identical on a CPU.

    Raises:
        UserError: The loss is not finite.
    """
    config, data = session.config, session.data
    network = build_network(config, len(data.class_names)).to(session.device)
    state = TrainingState.fresh(network, config)
    history: tuple[EpochRecord, ...] = ()
    if saved is not None:
        state.restore(saved.tensors)
        history = saved.history
        yield from history
    for epoch in range(len(history) + 1, config.epochs + 1):
        started = time.monotonic()
        train_loss = _train_epoch(session, state, epoch, on_step)
        accuracy, loss = validate(session, state.result, data.validation)
        lr = float(state.optimizer.param_groups[0]["lr"])
        record = EpochRecord(epoch, train_loss, accuracy, loss, lr, time.monotonic() - started)
        history = (*history, record)
        state.save(session.checkpoint, history, config, data.digest, session.threads)
        yield record


def _train_epoch(session: Session, state: TrainingState, epoch: int, on_step: OnStep) -> float:
    """Train for one epoch, and return the mean loss of its steps."""
    config, device, images = session.config, session.device, session.data.train
    schedule = cosine(state.optimizer, config.schedule, config.optimizer.lr, config.epochs * session.steps)
    mix = mixer(config.mix, len(session.data.class_names))
    shuffle, vary = (
        torch.Generator().manual_seed(derived_seed(config.seed, f"pretrain/{purpose}", epoch))
        for purpose in ("order", "augmentation")
    )
    order = torch.randperm(len(images), generator=shuffle)[: session.images]
    total = torch.zeros((), device=device)
    state.network.train()
    # Stochastic depth and mixing draw from torch's global stream: seed it here and restore it afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(config.seed, "pretrain/dropout", epoch))
        for place, batch in enumerate(torch.split(order, config.batch_size)):
            number = (epoch - 1) * session.steps + place
            schedule.step_update(number)
            pixels, targets = session.batch(*images.take(batch))
            pixels = config.augmentation(pixels, vary)
            if mix is not None:
                pixels, targets = mix(pixels, targets)
            loss = _step(session, state, pixels, targets, number)
            total += loss
            if place % STEPS_PER_CHECK == 0:
                _check_finite(loss, epoch)
            on_step(len(batch), loss)
    mean = total / session.steps
    _check_finite(mean, epoch)
    return float(mean)


def _step(session: Session, state: TrainingState, pixels: Tensor, targets: Tensor, number: int) -> Tensor:
    """Take one step on images in [0, 1] and labels or shares of classes, and return the detached loss."""
    config, network = session.config, state.network
    with session.autocast():
        logits = network(pixels)
    loss = F.cross_entropy(logits.float(), targets, label_smoothing=config.label_smoothing)
    state.optimizer.zero_grad()
    torch.autograd.backward(loss)
    if config.optimizer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.clip_norm)
    state.optimizer.step()
    if state.average is not None:
        state.average.update(network, step=number + 1)
    return loss.detach()


def _check_finite(loss: Tensor, epoch: int) -> None:
    if not math.isfinite(float(loss)):
        raise UserError(
            f"the loss became {float(loss)} in epoch {epoch}; "
            "try a smaller `optimizer.lr` or a longer `schedule.warmup`."
        )


@torch.inference_mode()
def validate(session: Session, network: Network, images: ImageSet) -> tuple[float, float]:
    """Return the accuracy in [0, 1] and the mean cross-entropy on images without augmentation."""
    network.eval()
    right, loss = torch.zeros(2, dtype=torch.float64, device=session.device)
    for batch in images.batches(VALIDATION_BATCH):
        pixels, labels = session.batch(*batch)
        with session.autocast():
            logits = network(pixels)
        logits = logits.float()
        right += (logits.argmax(1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
    return float(right) / len(images), float(loss) / len(images)


REFRESH = 0.5
"""Seconds between two displays of the loss, because reading it makes a GPU wait."""


class EpochTable:
    """A table with a row per epoch and a progress bar, updated by `on_step`."""

    def __init__(self, session: Session, finished: int, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.fields[speed]:.0f} images/s, loss {task.fields[loss]:.3f}, left about"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # rows stand above the bar; in a pipe they stay in the pipe
        )
        total, done = session.config.epochs * session.images, finished * session.images
        self.task = self.progress.add_task(
            "images", total=total, completed=done, epoch=f"{finished + 1}/{session.config.epochs}", speed=0.0, loss=0.0
        )
        self.session, self.trained, self.seen, self.looked = session, done, 0, time.monotonic()

    def __enter__(self) -> Self:
        headings = ("epoch", "train loss", "val acc", "val loss", "lr", "seconds")
        print("  ".join(f"{heading:>10}" for heading in headings), flush=True)
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def on_step(self, images: int, loss: Tensor) -> None:
        """Count the images, and display the loss every `REFRESH` seconds."""
        self.trained, self.seen = self.trained + images, self.seen + images
        now = time.monotonic()
        if self.console.is_terminal and now - self.looked > REFRESH:
            speed = self.seen / (now - self.looked)
            self.seen, self.looked = 0, now
            epoch = f"{1 + (self.trained - 1) // self.session.images}/{self.session.config.epochs}"
            self.progress.update(self.task, completed=self.trained, epoch=epoch, speed=speed, loss=float(loss))

    def add(self, record: EpochRecord) -> None:
        """Print the row of an epoch."""
        cells = [f"{record.epoch}", f"{record.train_loss:.4f}", f"{record.accuracy:.2%}", f"{record.loss:.4f}"]
        cells += [f"{record.lr:.2e}", f"{record.seconds:.1f}"]
        print("  ".join(f"{cell:>10}" for cell in cells), flush=True)
