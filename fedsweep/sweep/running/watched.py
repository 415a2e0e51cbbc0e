"""Execution of Ray Tune in a thread, while the main thread handles signals and watches Ray's processes."""

import socket
import threading
import time
from collections.abc import Callable

from fedsweep.sweep.cluster.cluster import Cluster
from fedsweep.sweep.cluster.local_ray import lost_process

LOOK_SECONDS = 0.2
"""Seconds between two checks of Ray's processes on this machine."""
CONNECT_SECONDS = 5.0
"""Seconds between two attempts to connect to a cluster's head node."""
SIGNAL_SECONDS = 0.5
"""Seconds to wait for a signal after Ray was lost. `scancel` sends SIGTERM to all processes at the same time."""
LEAVE_SECONDS = 10.0
"""Largest number of seconds to wait, after a second interrupt, until Ray Tune has ended. It needs about 6 seconds.

Ray ends the whole process at once if a thread calls it after `ray.shutdown`.
"""
FAILURES = 4
"""Number of failed attempts in a row after which the head node counts as lost."""


class RayLostError(Exception):
    """The error raised if a process that Ray cannot work without has ended. The message names the process."""


class StoppedError(Exception):
    """The error that ends Ray Tune's loop after an interrupt."""


class Watch:
    """A watch over the processes without which Ray waits for a minute and then ends this process."""

    def __init__(self, cluster: Cluster) -> None:
        self.address = None if cluster.is_local else cluster.address
        self._failures, self._next = 0, time.monotonic() + CONNECT_SECONDS

    def lost(self) -> str:
        """Return the name of a process that has ended, or an empty string if all processes are running."""
        if self.address is not None:
            return self._lost_head(self.address)
        return lost_process()

    def _lost_head(self, address: str) -> str:
        if time.monotonic() < self._next:
            return ""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            self._failures = 0
        except OSError:
            self._failures += 1
        self._next = time.monotonic() + CONNECT_SECONDS
        return f"the head node {address}" if self._failures >= FAILURES else ""


class Stop:
    """The request to stop Ray Tune, set by the main thread and read in Ray Tune's loop."""

    def __init__(self) -> None:
        self.asked = False
        """True after the first interrupt."""
        self.abandoned = False
        """True if the main thread no longer waits for Ray Tune, whose thread then must not write anything."""

    def check(self) -> None:
        """Raise StoppedError if the main thread has asked to stop."""
        if self.asked or self.abandoned:
            raise StoppedError

    def check_abandoned(self) -> None:
        """Raise StoppedError if the main thread no longer waits, or if Ray has lost a process."""
        self.abandoned |= bool(lost_process())
        if self.abandoned:
            raise StoppedError


def run_watched(
    body: Callable[[], None],
    stop: Stop,
    lost: Callable[[], str],
    announce: Callable[[], object],
    asked: Callable[[], bool] = bool,
) -> None:
    """Run `body` in a thread, and wait until it ends.

    The first interrupt asks `body` to stop. The second one is raised after `LEAVE_SECONDS` or as soon as `body` has
    ended, and a third one is raised at once. Waiting in the main thread keeps them effective even if `body` is blocked
    in Ray's C++ code, which does not react to signals.

    Args:
        body: The function that runs Ray Tune. It calls `stop.check` in Ray Tune's loop.
        stop: The request to stop `body`.
        lost: A function that returns the name of a process of Ray that has ended, or an empty string.
        announce: A function that is called at the first interrupt.
        asked: A function that returns whether another process has asked to stop, which has the effect of an interrupt.

    Raises:
        RayLostError: A process of Ray has ended.
        KeyboardInterrupt: The user has interrupted the sweep a second or third time.
    """
    errors: list[BaseException] = []
    ended = threading.Event()  # `Thread.join` takes a running thread for an ended one after an interrupt

    def target() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=target, name="tune", daemon=True).start()
        _wait(ended, stop, lost, announce, asked)
    except KeyboardInterrupt:
        stop.abandoned |= not ended.is_set()
        ended.wait(LEAVE_SECONDS)
        raise
    finally:  # an error or an interrupt at any point, even during `announce`
        stop.abandoned |= not ended.is_set()
    if errors and not stop.asked:
        if name := lost():
            raise RayLostError(name) from None
        raise errors[0]


def _wait(
    ended: threading.Event,
    stop: Stop,
    lost: Callable[[], str],
    announce: Callable[[], object],
    asked: Callable[[], bool],
) -> None:
    """Wait until `ended` is set, the user interrupts a second time, or Ray has lost a process; see `run_watched`."""
    while not ended.is_set():
        try:
            while not ended.wait(LOOK_SECONDS):
                if not stop.asked and asked():
                    stop.asked = True
                    announce()
                if name := lost():
                    stop.abandoned = True
                    time.sleep(SIGNAL_SECONDS)
                    if not stop.asked:
                        raise RayLostError(name)
                    return
        except KeyboardInterrupt:
            if stop.asked:
                raise
            stop.asked = True
            announce()
