"""The lease on a sweep in an object store: an object that the sweep's only driver creates, renews and removes.

Writes are conditional on the version read before, if the store allows it, so that only one of several drivers succeeds.
Ages are measured by the store's clock, because those of machines differ.
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
STALE = 120.0  # seconds without a renewal after which the holder counts as dead
SETTLES = 1.0  # seconds between writing and reading back if the store has no conditional writes


class Found(NamedTuple):
    """The content of an object; `version` is None if the object does not exist."""

    content: bytes = b""
    seconds: float = 0.0
    """Time of writing, by the store's clock."""
    version: Any = None


class UnconditionalObjects:
    """Objects of a pyarrow file system, in which the last of two simultaneous writers wins."""

    exclusive = False

    def __init__(self, files: FileSystem) -> None:
        self.files = files

    def read(self, path: str) -> Found:
        """Read an object."""
        with contextlib.suppress(FileNotFoundError):
            content = read(self.files, path)
            return Found(content, (self.files.get_file_info(path).mtime_ns or time.time_ns()) / 1e9)
        return Found()

    def write(self, path: str, content: bytes, version: Any) -> None:
        """Write an object, whatever its version."""
        put(self.files, path, content)

    def remove(self, path: str) -> None:
        """Delete an object if it exists."""
        remove(self.files, path)


class Lease:
    """The exclusive right to write a sweep, once acquired. `lost` is set if another process has taken it over."""

    def __init__(self, objects: ConditionalObjects | UnconditionalObjects, folder: str) -> None:
        self.objects, self.path = objects, f"{folder}/{NAME}"
        self.lost = False
        self._mine = {"nonce": secrets.token_hex(8), "host": socket.gethostname(), "process": process()}
        self._over = threading.Event()

    @contextlib.contextmanager
    def acquired(self, what: str) -> Iterator[Lease]:
        """Hold the lease during the context, renewed by a thread; `what` names the sweep in error messages.

        Raise UserError if another process has the lease, and UnreachableError if the store does not answer.
        """
        other, version = persistently(self.look)
        if other:
            killed = f"One that was killed gives way after {STALE / 60:g} minutes."
            raise UserError(f"{what} is being run by a process on {other['host']}; wait for it or end it. {killed}")
        persistently(lambda: self._write(version))
        if not self.objects.exclusive:
            time.sleep(SETTLES)
        holder, _ = persistently(self._read)  # a write whose answer was lost may have been the one that succeeded
        if not self._is_mine(holder):
            host = holder["host"] if holder else "another machine"
            raise UserError(f"{what} has just been taken by a process on {host}; wait for it or end it.")
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
        """Return the other live holder, if any, and the version of the object that the next holder has to replace."""
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
        """Return the store's current time, read from an object that is written now."""
        probe = f"{self.path}-{self._mine['nonce']}"
        with contextlib.suppress(OSError):  # without the right to write, this machine's clock must do
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
            with contextlib.suppress(OSError):  # the next time, or another process has it by then
                holder, found = self._read()
                if holder and not self._is_mine(holder):
                    self.lost = True
                    return
                self._write(found.version)


def process() -> str:
    """Return an id of this process that is unique across machines and time, or an empty string if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def is_dead(other: str) -> bool:
    """Return whether a process of this machine has ended; False for other machines and containers.

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
    """Return the start time of a process in the system's ticks, or an empty string once it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
