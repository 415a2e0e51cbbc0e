"""Progress on the terminal: the step that a command is waiting for, the time left, and the answer to Ctrl-C."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from fedsweep.common.imports import without_collections

Handler = Callable[[int, FrameType | None], object]


def silent_console() -> Console:
    """Return a console that prints nothing. In a notebook, it also adds no empty outputs to the cell."""
    return Console(quiet=True, force_jupyter=False)


@contextlib.contextmanager
def waiting(console: Console, step: str, always: bool = False) -> Iterator[None]:
    """Show what the command is waiting for, for the duration of the block.

    On a terminal, a line with a spinner and the elapsed time appears at once and disappears at the end of the block.

    Args:
        console: The console for progress messages, which must write to stderr.
        step: The step to wait for, such as `Loading PyTorch`.
        always: Whether the step is also printed as a plain line if the console is not a terminal. This is meant for
            steps that always take seconds.
    """
    if not console.is_terminal:
        if always:
            console.print(f"{step} ...")
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    redirected = sys.stdout.isatty()  # the output of a pipe must not reach the terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=redirected) as progress:
        progress.add_task(step, total=None)
        yield


@contextlib.contextmanager
def loading(console: Console, package: str, module: str) -> Iterator[None]:
    """Import a slow package within the block, and show this step on the console, unless `module` has been imported."""
    if module in sys.modules:
        yield
        return
    with waiting(console, f"Loading {package}", always=True), without_collections():
        yield


@dataclass
class TimeLeft:
    """An estimate of the time left, from the duration of the rounds that this process has watched.

    Recorded rounds and the start of the processes are left out. There is no estimate before the first watched round.
    """

    clock: Callable[[], float] = time.monotonic
    _seconds: float = field(default=0.0, init=False)
    _rounds: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)

    def add(self, seconds: float) -> None:
        """Record that a round has just ended that took `seconds`."""
        self._seconds, self._rounds, self._since = self._seconds + seconds, self._rounds + 1, self.clock()

    def left(self, rounds: int, parallel: int = 1, longest: int = 0) -> float | None:
        """Return the estimated number of seconds until all rounds have ended, or None if it is not known yet.

        Args:
            rounds: The number of rounds that have not ended.
            parallel: The number of rounds that run at the same time.
            longest: The largest number of rounds that must run one after the other.
        """
        if not self._rounds:
            return None
        one = self._seconds / self._rounds
        turns = max(rounds / parallel, longest)
        running = min(turns, 1.0)  # a round may take longer than the mean, but the later rounds remain
        return (turns - running) * one + max(running * one - (self.clock() - self._since), 0.0)


class LeftColumn(ProgressColumn):
    """The column of a progress bar with the time left, which is empty until the time is known."""

    def __init__(self, left: Callable[[Task], float | None]) -> None:
        super().__init__(Column(no_wrap=True))
        self.left = left

    def render(self, task: Task) -> Text:
        """Return the time left, such as `about 0:02:55 left`."""
        left = self.left(task)
        if left is None:
            return Text("")
        minutes, seconds = divmod(round(left), 60)
        return Text(f"about {minutes // 60}:{minutes % 60:02}:{seconds:02} left", style="progress.remaining")


def duration(seconds: float) -> str:
    """Return a duration as text, such as `45 s`, `3 min 20 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def announced_stop(announce: Callable[[], object]) -> Iterator[None]:
    """Call `announce` as soon as Ctrl-C is pressed within the block, before the usual handler runs.

    A second Ctrl-C reaches the usual handler directly. `announce` runs in a thread of its own, because a handler that
    prints could interrupt another print of the main thread.
    """
    before = announce_stop(announce)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def announce_stop(announce: Callable[[], object]) -> Handler | None:
    """Install a handler that calls `announce` when Ctrl-C is pressed, and return the earlier handler.

    Return None, and install nothing, outside the main thread and in processes that ignore Ctrl-C.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        return None
    before = usual

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        threading.Thread(target=announce).start()
        before(number, frame)

    signal.signal(signal.SIGINT, handle)
    return before
