"""A worker's own folder for as long as it needs one, in the machine's temporary folder."""

import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.common.files import held

PREFIX = "fedsweep-trial-"
TAKEN = "a process that lives has it."


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, gone at the end; what workers that were killed have left goes first.

    Beside it lies a file that its worker has locked, so that a living worker's folder is told from a dead one's.
    """
    _sweep_up()
    with ExitStack() as stack:
        lock = _locked(stack)
        folder = lock.with_suffix("")
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(lock)


def _locked(stack: ExitStack) -> Path:
    """A new lock file, held; another name where a worker that sweeps up took the first one before it was locked."""
    while True:
        lock = Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex}.lock"
        with suppress(UserError):
            stack.enter_context(held(lock, TAKEN))
            return lock


def _sweep_up() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.lock"):
        with suppress(UserError, OSError):  # a living worker's, or just removed
            if stat.S_ISREG((found := lock.lstat()).st_mode) and found.st_uid == os.getuid():
                with held(lock, TAKEN):
                    _remove(lock)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
