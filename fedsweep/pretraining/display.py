"""Epochs as they end: rows on stdout, a bar with speed, loss and time left on stderr."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fedsweep.pretraining.loop import Session
from fedsweep.pretraining.state import EpochRecord

REFRESH = 0.5
"""Seconds between two looks at the loss: each makes a GPU wait."""


class EpochTable:
    """Rows of epochs; hand `on_step` to `train`."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def on_step(self, images: int, loss: Tensor) -> None:
        """Count images, and now and then look at the loss."""
        self.trained, self.seen = self.trained + images, self.seen + images
        now = time.monotonic()
        if self.console.is_terminal and now - self.looked > REFRESH:
            speed = self.seen / (now - self.looked)
            self.seen, self.looked = 0, now
            epoch = f"{1 + (self.trained - 1) // self.session.images}/{self.session.config.epochs}"
            self.progress.update(self.task, completed=self.trained, epoch=epoch, speed=speed, loss=float(loss))

    def add(self, record: EpochRecord) -> None:
        """Print an epoch."""
        cells = [f"{record.epoch}", f"{record.train_loss:.4f}", f"{record.accuracy:.2%}", f"{record.loss:.4f}"]
        cells += [f"{record.lr:.2e}", f"{record.seconds:.1f}"]
        print("  ".join(f"{cell:>10}" for cell in cells), flush=True)
