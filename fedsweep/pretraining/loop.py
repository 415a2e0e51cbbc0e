"""The loop of pre-training: a generator that yields each epoch once it is on disk."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.images import TrainingData, moved
from fedsweep.pretraining.network import Network, build_network
from fedsweep.pretraining.optimization import cosine, mixer
from fedsweep.pretraining.state import EpochRecord, Saved, TrainingState
from fedsweep.types import ImageSet

VALIDATION_BATCH = 500
STEPS_PER_CHECK = 50
"""How often the loss is looked at while training: reading it makes a GPU wait."""

OnStep = Callable[[int, Tensor], None]
"""Told after each step: the number of images, and the loss as a scalar on the device."""


@dataclass(frozen=True)
class Session:
    """All that stands still during a pre-training."""

    config: PretrainConfig
    data: TrainingData
    checkpoint: Path
    device: torch.device
    threads: int

    @property
    def images(self) -> int:
        """Training images of an epoch, without those of the incomplete batch."""
        wanted = self.config.images_per_epoch or len(self.data.train)
        return wanted // self.config.batch_size * self.config.batch_size

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.images // self.config.batch_size

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The arithmetic that `precision` asks for."""
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def train(session: Session, saved: Saved | None, on_step: OnStep) -> Iterator[EpochRecord]:
    """Train to the last epoch, each on disk before it is yielded; epochs of `saved` are yielded again first.

    Every random number of an epoch comes from (seed, epoch), so that going on from a checkpoint equals never having
    stopped, to the last bit on a CPU.

    Raises:
        UserError: the loss stopped being a number.
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
    """One pass over the images of this epoch; the mean loss of its steps."""
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
    # Stochastic depth and mixing draw from torch's global stream: give them one of their own and put the old one back.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(config.seed, "pretrain/dropout", epoch))
        for place, batch in enumerate(torch.split(order, config.batch_size)):
            number = (epoch - 1) * session.steps + place
            schedule.step_update(number)
            pixels, targets = moved(*images.take(batch), device)
            pixels = config.augmentation(pixels, vary)
            if mix is not None:
                pixels, targets = mix(pixels, targets)
            loss = _step(session, state, pixels, targets, number)
            total += loss
            if place % STEPS_PER_CHECK == 0:
                _check(loss, epoch)
            on_step(len(batch), loss)
    mean = total / session.steps
    _check(mean, epoch)
    return float(mean)


def _step(session: Session, state: TrainingState, pixels: Tensor, targets: Tensor, number: int) -> Tensor:
    """One step on images in [0, 1] and labels or shares of classes; the loss, detached."""
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


def _check(loss: Tensor, epoch: int) -> None:
    if not math.isfinite(float(loss)):
        raise UserError(
            f"the loss became {float(loss)} in epoch {epoch}; "
            "try a smaller `optimizer.lr` or a longer `schedule.warmup`."
        )


@torch.inference_mode()
def validate(session: Session, network: Network, images: ImageSet) -> tuple[float, float]:
    """Accuracy in [0, 1] and mean cross-entropy on images as they are, without augmentation."""
    network.eval()
    right = torch.zeros((), dtype=torch.int64, device=session.device)
    loss = torch.zeros((), dtype=torch.float64, device=session.device)
    for batch in images.batches(VALIDATION_BATCH):
        pixels, labels = moved(*batch, session.device)
        with session.autocast():
            logits = network(pixels)
        logits = logits.float()
        right += (logits.argmax(1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
    return float(right) / len(images), float(loss) / len(images)
