"""Signals that ask a process to end, handled like Ctrl-C so that the process can close its records first."""

import contextlib
import ctypes
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals with which SLURM, Kubernetes and a closing terminal end a process."""
SIGACTION_BYTES = 512
"""More than the size of C's `struct sigaction`, which is 152 bytes on Linux and 16 on macOS."""
Handler = Callable[[int, FrameType | None], Any] | int | None
"""A handler of a signal, as `signal.signal` takes and returns it."""


class SignalInterrupt(KeyboardInterrupt):
    """The interrupt that a signal other than Ctrl-C causes."""


@dataclass
class Received:
    """The signal that a process has received."""

    number: int = signal.SIGINT
    """Number of the newest signal; that of Ctrl-C if no other signal was received."""

    @property
    def status(self) -> int:
        """The exit status of a process that ends because of the signal, which is 128 plus the number."""
        return 128 + self.number


_OPEN: list[Received] = []


@contextlib.contextmanager
def ending_signals_interrupt() -> Iterator[Received]:
    """Raise SignalInterrupt in the main thread if SIGTERM or SIGHUP arrives within the block.

    A signal that the process ignores stays ignored, such as SIGHUP under `nohup`. Outside of the main thread, the block
    changes nothing. A block within such a block yields the object of the outer block.
    """
    if _OPEN or threading.current_thread() is not threading.main_thread():
        yield _OPEN[0] if _OPEN else Received()
        return
    received = Received()

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.number = number
        if number == signal.SIGHUP:
            _leave_terminal()
        raise SignalInterrupt(signal.Signals(number).name)

    before = {one: signal.getsignal(one) for one in ENDING}
    for one, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(one, interrupt)
    _OPEN.append(received)
    try:
        yield received
    finally:
        _OPEN.remove(received)
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Let only the first SIGINT, SIGTERM or SIGHUP within the block take effect, and ignore the following ones.

    A clean-up at the end of the block therefore cannot be interrupted.
    """
    arrived: list[int] = []
    handlers = {one: found for one in (signal.SIGINT, *ENDING) if callable(found := signal.getsignal(one))}

    def first(number: int, frame: FrameType | None) -> None:
        if not arrived:
            arrived.append(number)
            handlers[signal.Signals(number)](number, frame)

    for one in handlers:
        signal.signal(one, first)
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Keep the handlers of SIGTERM and SIGHUP during the call of a library that sets its own, such as `ray.init`.

    Within the block, `signal.signal` ignores new handlers of the two signals. A signal that arrives within the block is
    only recorded, whichever thread receives it, and is handled at the end of the block. Child processes that start
    within the block block SIGHUP, so that a closing terminal does not end them before this process has closed its
    records. Outside of the main thread, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    set_handler, arrived = signal.signal, list[int]()

    def set_other(number: int, handler: Handler) -> Handler:
        return signal.getsignal(number) if number in ENDING else set_handler(number, handler)

    before = {one: handler for one in ENDING if (handler := signal.getsignal(one)) not in (signal.SIG_IGN, None)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # child processes inherit it

    def keep(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    for one in before:
        set_handler(one, keep)
    vars(signal)["signal"] = set_other
    try:
        yield
    finally:
        vars(signal)["signal"] = set_handler
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a blocked SIGHUP arrives here
        for one, handler in before.items():
            set_handler(one, handler)
        for number in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def kept_actions() -> Iterator[None]:
    """Restore the reactions of this process to SIGTERM and SIGHUP at the end of the block.

    A library that is called within the block, such as `ray.init`, may set reactions in C, which `signal.signal` could
    replace in the main thread only. In contrast to `kept_handlers`, the block works in every thread, and signals that
    arrive within it are handled at once.
    """
    system = ctypes.CDLL(None, use_errno=True)
    before = {one: ctypes.create_string_buffer(SIGACTION_BYTES) for one in ENDING}
    for one, action in before.items():
        system.sigaction(int(one), None, action)
    try:
        yield
    finally:
        for one, action in before.items():
            system.sigaction(int(one), action, None)


def _leave_terminal() -> None:
    """Discard further output to a terminal that was closed, because writing to it would fail."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
