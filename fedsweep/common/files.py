"""Atomic file writes, and file locks that the operating system releases when the holding process ends."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedsweep.common.errors import UserError


class LockedError(UserError):
    """The error raised if another process holds a lock."""


@contextlib.contextmanager
def locked(path: Path, taken: str, seconds: float = 0.5) -> Iterator[None]:
    """Hold an exclusive lock on a file during the context.

    Args:
        path: The lock file.
        taken: The error message if another process holds the lock.
        seconds: The time to wait for the lock; -1 waits without a limit. A command that checks whether a sweep is
            running holds the sweep's lock for a moment.

    Raises:
        LockedError: Another process holds the lock.
    """
    try:
        lock = FileLock(path, timeout=seconds).acquire()
    except Timeout:
        raise LockedError(taken) from None
    with lock:
        yield


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock on an existing file."""
    try:
        with locked(path, "taken", seconds=0):
            return False
    except LockedError:
        return True


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see either the old or the new content, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp makes the file private, but other users should be able to read results.
            os.fchmod(descriptor, 0o644)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def inert_cell(value: object) -> object:
    """Return the value of a CSV cell, with an apostrophe before a text that a spreadsheet would run as a formula.

    Numbers, and texts that are numbers, are returned unchanged.

    >>> inert_cell("=1+1"), inert_cell("-2.5"), inert_cell(-2.5), inert_cell("rank 4")
    ("'=1+1", '-2.5', -2.5, 'rank 4')
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
