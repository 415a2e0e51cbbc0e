"""A worker's own folder for as long as it needs one, in the machine's temporary folder."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsweep.errors import UserError
from fedsweep.lock import held

PREFIX = "fedsweep-trial-"
TAKEN = "a process that lives has it."


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, gone at the end; what workers that were killed have left goes first.

    Beside it lies a file that its worker has locked, so that a living worker's folder is told from a dead one's.
    """
    _sweep_up()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex}"
    lock = folder.with_suffix(".lock")
    with held(lock, TAKEN):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(lock)


def _sweep_up() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.lock"):
        with suppress(UserError, OSError), held(lock, TAKEN):  # a living worker's, another user's, or just removed
            _remove(lock)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
