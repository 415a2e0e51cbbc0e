"""Atomic file writes, and file locks that the operating system frees when their process ends."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedsweep.common.errors import UserError


class LockedError(UserError):
    """Another process holds the lock of a file."""


@contextlib.contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock on a file during the context; raise LockedError, with the message `taken`, if it is taken."""
    try:
        lock = FileLock(path, blocking=False).acquire()
    except Timeout:
        raise LockedError(taken) from None
    with lock:
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, flush it to disk, then rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # mkstemp makes it private, but results are to be read by others too
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
