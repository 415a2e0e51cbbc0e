"""Temporary folders that other users cannot open, for Ray's session on this machine and for a worker's files."""

import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.files import LockedError, locked

LOCKED = "a running process uses this folder."
RAY_PREFIX = "fedsweep-"
RAY_DIGITS = 6
"""Number of random digits in the name of Ray's folder, which must be short because of `SOCKET_BYTES`."""
RAY_SUBFOLDER = "r"
"""Ray makes its temporary folder writable for everyone, so it gets a subfolder of a private folder."""
SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
"""Largest length of the path of a Unix socket."""


@contextmanager
def private_folder(parent: Path, prefix: str, digits: int = 32) -> Iterator[Path]:
    """Yield a new, empty folder that only this user can open, and delete it at the end of the block.

    Leftover folders of killed processes are deleted first. Each process holds a lock on the lock file of its folder, so
    an unlocked folder belongs to a killed process.

    Args:
        parent: The folder that contains the new folder.
        prefix: The beginning of the name.
        digits: Number of random hexadecimal digits after the prefix.
    """
    _remove_leftovers(parent, f"{prefix}{'[0-9a-f]' * digits}.lock")
    with ExitStack() as stack:
        yield _new(parent, prefix, digits, stack)


def _new(parent: Path, prefix: str, digits: int, stack: ExitStack) -> Path:
    """Create a lock file, lock it, and create its folder.

    If another process that deletes leftover folders locks the new file first, another name is tried. An existing folder
    may belong to another user, and is never used.
    """
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(digits)[:digits]}"
        lock = folder.with_suffix(".lock")
        if not os.path.lexists(folder):
            with suppress(LockedError):
                stack.enter_context(locked(lock, LOCKED))
                folder.mkdir(mode=0o700)
                stack.callback(_remove, lock)
                return folder


def _remove_leftovers(parent: Path, locks: str) -> None:
    for lock in parent.glob(locks):
        with suppress(UserError, OSError):  # its process is alive, or it was just deleted
            if stat.S_ISREG((found := lock.lstat()).st_mode) and found.st_uid == os.getuid():
                with locked(lock, LOCKED):
                    _remove(lock)


def _remove(lock: Path) -> None:
    """Delete the folder of a lock file, and then the lock file, unless a part of the folder could not be deleted."""
    folder = lock.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        lock.unlink(missing_ok=True)


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield the temporary folder for a new Ray on this machine, and delete it at the end of the block.

    It lies in a folder that only this user can open. Otherwise, other users could replace the sockets through which
    Ray's processes communicate, because Ray makes its folders writable for everyone.

    Raises:
        UserError: RAY_TMPDIR is too long, or no folder can be created.
    """
    parent = _parent_of_ray()
    with ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(private_folder(parent, RAY_PREFIX, RAY_DIGITS))
        except OSError as error:
            raise UserError(
                f"Ray needs a folder in {parent}, but it cannot be created ({one_line(error)}); set RAY_TMPDIR to a "
                "folder that you can write to."
            ) from None
        yield folder / RAY_SUBFOLDER


def _parent_of_ray() -> Path:
    """Return the folder in RAY_TMPDIR, or else the system's folder for temporary files if its path is short enough."""
    most = longest_parent()
    if asked := os.environ.get("RAY_TMPDIR"):
        parent = Path(asked).absolute()
        if (length := len(os.fsencode(parent))) > most:
            raise UserError(
                f"RAY_TMPDIR must be a path of at most {most} bytes, because the paths of Ray's sockets are limited to "
                f"{SOCKET_BYTES} bytes, but {parent} has {length} bytes."
            )
        return parent
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= most else Path("/tmp")  # noqa: S108


def longest_parent() -> int:
    """Return the largest length in bytes of a path that may contain Ray's folder.

    With a longer path, the path of Ray's longest socket would exceed `SOCKET_BYTES`.
    """
    session = f"session_2026-11-25_12-00-00_000000_{os.getpid()}"
    below = f"/{RAY_PREFIX}{'0' * RAY_DIGITS}/{RAY_SUBFOLDER}/{session}/sockets/plasma_store"
    return SOCKET_BYTES - len(below)
