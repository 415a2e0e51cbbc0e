"""One process at a time: locks that the operating system frees with their process, however that ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedsweep.common.errors import UserError


@contextmanager
def held(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock of that file.

    Raises:
        UserError: another process holds it; `taken` is the sentence.
        OSError: the file cannot be made.
    """
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(taken) from None
    try:
        yield
    finally:
        lock.release()
