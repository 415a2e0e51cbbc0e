"""Signals that ask a process to end, handled like Ctrl-C so that the process can close its records first."""

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals with which SLURM, Kubernetes and a closing terminal end a process."""


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
def kept_handlers() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGHUP at the end of the block, in which a library may replace them.

    Signals that arrive within the block are handled at its end. Child processes that start within the block ignore
    SIGHUP, so that a closing terminal does not end them before this process has closed its records.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {one: signal.getsignal(one) for one in ENDING}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    _HOLDING.set()
    try:
        yield
    finally:
        _HOLDING.clear()
        for one, handler in handlers.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_HOLDING = threading.Event()


def _let_sigterm_end_children() -> None:
    if _HOLDING.is_set():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


os.register_at_fork(after_in_child=_let_sigterm_end_children)


def _leave_terminal() -> None:
    """Discard further output to a terminal that was closed, because writing to it would fail."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
