"""Functions that pre-train a backbone: they check the inputs, train, write the weights and show the progress."""

import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save as to_bytes
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.paths import data_folder
from fedsweep.common.randomness import derived_seed
from fedsweep.pretraining.config import PretrainConfig, TrainingData, load_images
from fedsweep.pretraining.network import EpochRecord, Network, Saved, TrainingState, build_network, cosine, mixer

VALIDATION_BATCH = 500
STEPS_PER_CHECK = 50
"""Steps between two checks of the loss, because reading it makes a GPU wait."""


@dataclass(frozen=True)
class Session:
    """The configuration, data and device of a pre-training run, which do not change during the run."""

    config: PretrainConfig
    data: TrainingData
    checkpoint: Path
    device: torch.device
    threads: int

    @property
    def images(self) -> int:
        """The number of training images per epoch, not counting an incomplete last batch."""
        wanted = self.config.images_per_epoch or len(self.data.train)
        return wanted // self.config.batch_size * self.config.batch_size

    def logits(self, network: Network, pixels: Tensor) -> Tensor:
        """Return the network's logits (n, classes) in float32, computed with the configured precision."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits: Tensor = network(pixels)
        return logits.float()

    def batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Copy uint8 images and their labels to the device, and convert the images to float32 pixels in [0, 1].

        The copy to a GPU is asynchronous.

        Returns:
            The converted images and the labels.
        """
        if self.device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        return images.float().div_(255), labels


def default_out(name: str) -> Path:
    """Return the default path of the pre-trained weights, `<data folder>/backbones/<name>.safetensors`."""
    return data_folder() / "backbones" / f"{name}.safetensors"


def checkpoint_path(out: Path) -> Path:
    """Return the path of the checkpoint of a pre-training run whose final weights are written to `out`."""
    return out.with_suffix(".checkpoint.safetensors")


def start(
    config: PretrainConfig, out: Path, device: str = "cpu", threads: int | None = None, resume: bool = False
) -> tuple[Session, Saved | None]:
    """Check the inputs of a pre-training run, and return the run's `Session` and the checkpoint to resume from.

    The checkpoint is None for a new run.

    Args:
        config: The configuration of the run.
        out: The file for the final weights.
        device: The device to train on, cpu or cuda.
        threads: The number of CPU threads; by default, the number in the checkpoint, or 1 without a checkpoint.
        resume: Whether to continue from the checkpoint of an interrupted run.

    Raises:
        UserError: `out` cannot be written, the images or the backbone are invalid, or a new run would replace existing
            files. A resumed run also raises the error if the checkpoint is missing or was written with another
            configuration or with other images.
    """
    checkpoint = checkpoint_path(out)
    _check_out(out, checkpoint, resume)
    data = load_images(config)
    build_network(config, len(data.class_names))
    saved = None
    if resume:
        saved = Saved.read(checkpoint)
        saved.check_same(checkpoint, config, data.digest)
    threads = threads or (saved.threads if saved else 1)
    return Session(config, data, checkpoint, torch.device(device), threads), saved


def exclusively(out: Path) -> AbstractContextManager[None]:
    """Return a context manager that locks `out`, or that raises UserError if another process is writing `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return locked(out.with_name(f".{out.name}.lock"), f"another `fedsweep pretrain` is writing {out} now.")


def _check_out(out: Path, checkpoint: Path, resume: bool) -> None:
    """Raise UserError if a pre-training run cannot write its weights to `out`.

    `out` must end in `.safetensors`, and its folder must be writable. A resumed run needs the file `checkpoint`. A new
    run must not replace an existing checkpoint, weights file or card.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"`--out` must end in .safetensors, but it is {out}.")
    if resume and not checkpoint.exists():
        finished = f", because {out} is finished" if out.exists() else ""
        raise UserError(f"`--resume` needs {checkpoint}, which does not exist{finished}.")
    if not resume and checkpoint.exists():
        saved = Saved.read(checkpoint)
        raise UserError(
            f"{checkpoint} contains {len(saved.history)} of {saved.config['epochs']} epochs; "
            "use `--resume` to continue, or delete the file to start again."
        )
    for path in (out, out.with_suffix(".json")):
        if not resume and path.exists():
            raise UserError(f"{path} already exists; delete it or choose another file with `--out`.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from None


OnStep = Callable[[int, Tensor], None]
"""A function called after each step with the number of images and the loss, a scalar on the device."""


def train(session: Session, saved: Saved | None, on_step: OnStep) -> Iterator[EpochRecord]:
    """Train the backbone and yield a record of each epoch.

    The records in the checkpoint `saved` are yielded first, and training continues after them. A checkpoint is written
    before each new record is yielded. The random numbers of an epoch depend only on the seed
    and the epoch. Therefore, on a CPU, a resumed run is bit-identical to an uninterrupted run. Raise UserError if the
    loss is not finite.
    """
    config, data = session.config, session.data
    state = TrainingState.of(config, len(data.class_names), session.device, saved)
    history = saved.history if saved else ()
    yield from history
    for epoch in range(len(history) + 1, config.epochs + 1):
        started = time.monotonic()
        train_loss = _train_epoch(session, state, epoch, on_step)
        accuracy, loss = validate(session, state.result)
        lr = float(state.optimizer.param_groups[0]["lr"])
        record = EpochRecord(epoch, train_loss, accuracy, loss, lr, time.monotonic() - started)
        history = (*history, record)
        state.save(session.checkpoint, history, config, data.digest, session.threads)
        yield record


def _train_epoch(session: Session, state: TrainingState, epoch: int, on_step: OnStep) -> float:
    """Train for one epoch, and return the mean loss of its steps."""
    config, device, images = session.config, session.device, session.data.train
    steps = session.images // config.batch_size
    schedule = cosine(state.optimizer, config.schedule, config.optimizer.lr, config.epochs * steps)
    mix = mixer(config.mix, len(session.data.class_names))
    shuffle, vary = (
        torch.Generator().manual_seed(derived_seed(config.seed, f"pretrain/{purpose}", epoch))
        for purpose in ("order", "augmentation")
    )
    order = torch.randperm(len(images), generator=shuffle)[: session.images]
    total = torch.zeros((), device=device)
    state.network.train()
    # Stochastic depth and mixing use torch's global generator, which is seeded here and restored afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(config.seed, "pretrain/dropout", epoch))
        for place, batch in enumerate(torch.split(order, config.batch_size)):
            number = (epoch - 1) * steps + place
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
    mean = total / steps
    _check_finite(mean, epoch)
    return float(mean)


def _step(session: Session, state: TrainingState, pixels: Tensor, targets: Tensor, number: int) -> Tensor:
    """Take one training step, and return the loss, detached from the autograd graph.

    `pixels` are images with values in [0, 1]. `targets` are labels (n,) or class probabilities (n, classes). `number`
    is the number of the step, counted from 0.
    """
    config, network = session.config, state.network
    loss = F.cross_entropy(session.logits(network, pixels), targets, label_smoothing=config.label_smoothing)
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
            "try a smaller `optimizer.lr` or a larger `schedule.warmup`."
        )


@torch.inference_mode()
def validate(session: Session, network: Network) -> tuple[float, float]:
    """Return the accuracy in [0, 1] and the mean cross-entropy on the validation images."""
    images = session.data.validation
    network.eval()
    right, loss = torch.zeros(2, dtype=torch.float64, device=session.device)
    for batch in images.batches(VALIDATION_BATCH):
        pixels, labels = session.batch(*batch)
        logits = session.logits(network, pixels)
        right += (logits.argmax(1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
    return float(right) / len(images), float(loss) / len(images)


def write_result(session: Session, name: str, out: Path) -> dict[str, Any]:
    """Write the weights of the last checkpoint to `out` and their card to a JSON file next to it, and return the card.

    The accuracy in the card is measured with the weights in the file, which may be rounded to float16. Finally, the
    checkpoint is deleted.
    """
    config, data, backbone = session.config, session.data, session.config.backbone
    saved = Saved.read(session.checkpoint)
    state = TrainingState.of(config, len(data.class_names), session.device, saved)
    dtype = getattr(torch, config.weights)
    weights = {key: tensor.to(dtype) for key, tensor in state.result.backbone.state_dict().items()}
    state.result.backbone.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    accuracy, loss = validate(session, state.result)
    content = to_bytes({key: tensor.cpu().contiguous() for key, tensor in weights.items()})
    write_atomically(out, content)
    card = {
        "what": f"{getattr(backbone, 'model', backbone.name)} of {backbone.depth} blocks and width {backbone.width} "
        f"at {backbone.image_size} px, {len(data.class_names)} classes",
        "origin": f"trained from scratch on {config.data.set} ({', '.join(config.data.domains)}) "
        f"by `fedsweep pretrain {name}`",
        "data_digest": data.digest,
        "class_names": list(data.class_names),
        "images": len(data.train),
        "validation_images": len(data.validation),
        "recipe": config.model_dump(mode="json"),
        "mean": state.network.mean.flatten().tolist(),
        "std": state.network.std.flatten().tolist(),
        "parameters": sum(parameter.numel() for parameter in state.network.parameters()),
        "validation_accuracy": round(accuracy, 4),
        "validation_loss": round(loss, 4),
        "seconds": round(sum(record.seconds for record in saved.history)),
        "device": session.device.type,
        "threads": session.threads,
        "versions": {package: version(package) for package in ("torch", "timm")},
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomically(out.with_suffix(".json"), (json.dumps(card, indent=2) + "\n").encode())
    session.checkpoint.unlink()
    return card


REFRESH = 0.5
"""Seconds between two displays of the loss, because reading it makes a GPU wait."""
COLUMNS = {
    "epoch": ("epoch", ""),
    "train loss": ("train_loss", ".4f"),
    "val acc": ("accuracy", ".2%"),
    "val loss": ("loss", ".4f"),
    "lr": ("lr", ".2e"),
    "seconds": ("seconds", ".1f"),
}
"""The field of `EpochRecord` and the number format of each column, by the column's title."""


class EpochTable:
    """A table with one row per epoch, and a progress bar that `on_step` updates."""

    def __init__(self, session: Session, finished: int, console: Console) -> None:
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.fields[speed]:.0f} images/s, loss {task.fields[loss]:.3f}, about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # on a terminal, rows are printed above the bar
        )
        total, done = session.config.epochs * session.images, finished * session.images
        self.task = self.progress.add_task(
            "images", total=total, completed=done, epoch=f"{finished + 1}/{session.config.epochs}", speed=0.0, loss=0.0
        )
        self.session, self.trained, self.seen, self.looked = session, done, 0, time.monotonic()

    def __enter__(self) -> Self:
        print("  ".join(f"{title:>10}" for title in COLUMNS), flush=True)
        if self.progress.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.console.is_terminal:
            self.progress.stop()

    def on_step(self, images: int, loss: Tensor) -> None:
        """Record that a step with `images` images and the loss `loss` has finished.

        The progress bar is updated at most once every `REFRESH` seconds.
        """
        self.trained, self.seen = self.trained + images, self.seen + images
        now = time.monotonic()
        if self.progress.console.is_terminal and now - self.looked > REFRESH:
            speed = self.seen / (now - self.looked)
            self.seen, self.looked = 0, now
            epoch = f"{1 + (self.trained - 1) // self.session.images}/{self.session.config.epochs}"
            self.progress.update(self.task, completed=self.trained, epoch=epoch, speed=speed, loss=float(loss))

    def add(self, record: EpochRecord) -> None:
        """Print the table row of an epoch."""
        print("  ".join(f"{getattr(record, name):>10{form}}" for name, form in COLUMNS.values()), flush=True)
