"""The lock of a trial, with which several processes that run one sweep share its trials."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedsweep.common.files import LockedError

TAKEN = ".taken"
"""The lock file in the folder of a trial, which the worker that runs the trial holds."""


class Taken:
    """The lock of a trial that a worker of this process runs."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[Taken | None]:
        """Hold the lock for the block, and yield this object, or None if another process holds it."""
        try:
            self._lock.acquire(timeout=seconds)
        except Timeout:
            yield None
            return
        try:
            yield self
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Release the lock within the block, in which the trial may be stopped.

        Raises:
            LockedError: Another process has taken the trial in the meantime.
        """
        self._lock.release()
        yield
        try:
            self._lock.acquire(timeout=0.5)
        except Timeout:
            raise LockedError("another process runs the trial") from None
