"""Atomic file writes, and file locks that the operating system releases when the process that holds them ends."""

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
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold an exclusive lock on a file during the context.

    Args:
        path: The lock file.
        taken: The error message if another process holds the lock.

    Raises:
        LockedError: Another process holds the lock.
    """
    try:
        lock = FileLock(path, blocking=False).acquire()
    except Timeout:
        raise LockedError(taken) from None
    with lock:
        yield


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
