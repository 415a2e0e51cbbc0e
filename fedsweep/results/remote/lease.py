"""The lease on a sweep in an object store. It ensures that only one process at a time runs the sweep.

The lease is an object in the store. The process that runs the sweep creates the object, renews it regularly, and
deletes it at the end. If the store supports conditional writes, a write succeeds only if the object has not changed
since the process read it. Only one of several processes can therefore acquire the lease.

The age of a lease is measured by the store's clock, because the clocks of the machines may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsweep.common.errors import UserError
from fedsweep.results.remote.objects import persistently, put, read, remove

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from fedsweep.results.remote.conditional_writes import ConditionalObjects

NAME = ".lease"
RENEWED = 30.0  # seconds between two renewals
STALE = 120.0  # seconds without a renewal after which the process that holds the lease is considered dead
SETTLES = 1.0  # seconds between writing and reading the lease if the store has no conditional writes


class Found(NamedTuple):
    """The content, modification time and version of an object.

    `version` is None if the object does not exist, or if the store does not support conditional writes.
    """

    content: bytes = b""
    seconds: float = 0.0
    """Time of the last write in seconds since 1970, by the store's clock."""
    version: Any = None


class UnconditionalObjects:
    """Access to the objects of a pyarrow file system, without conditional writes.

    If two processes write the same object, the last write wins.
    """

    exclusive = False

    def __init__(self, files: FileSystem) -> None:
        self.files = files

    def read(self, path: str) -> Found:
        """Return an object's content and modification time, or an empty `Found` if there is no such object."""
        with contextlib.suppress(FileNotFoundError):
            content = read(self.files, path)
            return Found(content, (self.files.get_file_info(path).mtime_ns or time.time_ns()) / 1e9)
        return Found()

    def write(self, path: str, content: bytes, version: Any) -> None:
        """Write an object. The argument `version` is ignored."""
        put(self.files, path, content)

    def remove(self, path: str) -> None:
        """Delete an object if it exists."""
        remove(self.files, path)


class Lease:
    """The exclusive right of this process to run a sweep and write its results to an object store.

    `lost` becomes True if another process acquires the lease.
    """

    def __init__(self, objects: ConditionalObjects | UnconditionalObjects, folder: str) -> None:
        self.objects, self.path = objects, f"{folder}/{NAME}"
        self.lost = False
        self._mine = {"nonce": secrets.token_hex(8), "host": socket.gethostname(), "process": process()}
        self._over = threading.Event()

    @contextlib.contextmanager
    def acquired(self, what: str) -> Iterator[Lease]:
        """Hold the lease during the context. A thread renews the lease until the context ends.

        Args:
            what: Name of the sweep in error messages.

        Raises:
            UserError: Another process holds the lease.
            UnreachableError: The store does not answer.
        """
        other, version = persistently(self.look)
        if other:
            killed = f"If it was killed, try again in {STALE / 60:g} minutes."
            running = f"a process on {other['host']}; wait until that process ends, or stop it"
            raise UserError(f"{what} is being run by {running}. {killed}")
        persistently(lambda: self._write(version))
        if not self.objects.exclusive:
            time.sleep(SETTLES)
        holder, _ = persistently(self._read)  # the write may have succeeded even if the store's answer was lost
        if not self._is_mine(holder):
            host = holder["host"] if holder else "another machine"
            raise UserError(f"{what} was just started by a process on {host}; wait until it ends, or stop it.")
        thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
            with contextlib.suppress(OSError):
                if not self.lost and self._is_mine(self._read()[0]):
                    self.objects.remove(self.path)

    def look(self) -> tuple[dict[str, Any] | None, Any]:
        """Return which other process holds the lease, and the current version of the lease object.

        Returns:
            A dict that describes the other process (its `host`, for example), and the version. In place of the dict,
            None is returned if no other process holds the lease, or if the lease has expired.
        """
        other, found = self._read()
        if other is None or self._is_mine(other) or is_dead(other.get("process", "")):
            return None, found.version
        return (other if self._now() - found.seconds < STALE else None), found.version

    def _read(self) -> tuple[dict[str, Any] | None, Found]:
        found = self.objects.read(self.path)
        try:
            holder = json.loads(found.content)
        except ValueError:
            return None, found
        return (holder if isinstance(holder, dict) and {"nonce", "host"} <= holder.keys() else None), found

    def _now(self) -> float:
        """Return the current time by the store's clock, in seconds since 1970.

        To read the store's clock, an object is written and its modification time is read. If that fails, the clock of
        this machine is used.
        """
        probe = f"{self.path}-{self._mine['nonce']}"
        with contextlib.suppress(OSError):  # without permission to write, use the clock of this machine
            self.objects.write(probe, b"", None)
            now = self.objects.read(probe).seconds
            self.objects.remove(probe)
            return now or time.time()
        return time.time()

    def _is_mine(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder["nonce"] == self._mine["nonce"]

    def _write(self, version: Any) -> None:
        self.objects.write(self.path, json.dumps({**self._mine, "time": time.time()}).encode(), version)

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            with contextlib.suppress(OSError):  # try again later; another process may have acquired the lease by then
                holder, found = self._read()
                if holder and not self._is_mine(holder):
                    self.lost = True
                    return
                self._write(found.version)


def process() -> str:
    """Return an identifier of this process that is unique over time and across machines.

    The identifier is an empty string if the system has no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def is_dead(other: str) -> bool:
    """Return whether the process with the identifier `other` has ended.

    Return False for a process on another machine or in another container, because its state cannot be determined.

    >>> is_dead(process()), is_dead("")
    (False, False)
    """
    parts, mine = other.split(" "), process().split(" ")
    if len(parts) != len(mine) or len(parts) != 4 or parts[:2] != mine[:2]:
        return False
    try:
        return _started(int(parts[2])) != parts[3]
    except (OSError, ValueError):
        return True


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, or an empty string if the process is a zombie.

    Raises:
        OSError: There is no such process.
    """
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
