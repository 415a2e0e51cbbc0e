"""One driver at a time on a sweep in an object store, which has no locks: a small object that is renewed while it runs.

Ages are told by the store's clock alone, because those of machines differ.
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
from typing import TYPE_CHECKING, Any

from fedsweep.common.errors import UserError
from fedsweep.results.remote.objects import persistently, put, read, remove

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

NAME = ".lease"
RENEWED = 30.0
"""Seconds from one renewal to the next."""
STALE = 120.0
"""Seconds without one after which the holder is taken for dead."""
SETTLES = 1.0
"""Seconds in which another one that asks at the same moment is done with its writing."""


class Lease:
    """The right to write a sweep, once taken; `lost` says that another process has it now."""

    def __init__(self, filesystem: FileSystem, folder: str) -> None:
        self.filesystem, self.path = filesystem, f"{folder}/{NAME}"
        self.lost = False
        self._mine = {"nonce": secrets.token_hex(8), "host": socket.gethostname(), "process": process()}
        self._over = threading.Event()

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[Lease]:
        """Have the lease until the end, renewed by a thread. `what` names the sweep.

        Raises:
            UserError: another process has it.
            UnreachableError: the store does not answer.
        """
        if (other := persistently(self.holder)) is not None:
            raise UserError(
                f"{what} is being run by a process on {other['host']}; wait for it or end it. "
                f"One that was killed gives way after {STALE / 60:g} minutes."
            )
        self._write()
        time.sleep(SETTLES)
        if (other := self._read()) is None or other["nonce"] != self._mine["nonce"]:
            host = other["host"] if other else "another machine"
            raise UserError(f"{what} has just been taken by a process on {host}; wait for it or end it.")
        thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
            self._give_back()

    def holder(self) -> dict[str, Any] | None:
        """Who has it, if that is another process that lives.

        Raises:
            OSError: the store does not answer.
        """
        if (other := self._read()) is None or other["nonce"] == self._mine["nonce"]:
            return None
        if is_dead(other.get("process", "")):
            return None
        return other if self._age() < STALE else None

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(read(self.filesystem, self.path))
            return found if isinstance(found, dict) and {"nonce", "host"} <= found.keys() else None
        except (FileNotFoundError, ValueError):
            return None

    def _age(self) -> float:
        """Seconds since the last renewal, by the times that the store gives to it and to an object written now."""
        probe, now = f"{self.path}-{self._mine['nonce']}", time.time_ns()
        with contextlib.suppress(OSError):  # who may only read goes by the clock of this machine
            put(self.filesystem, probe, b"")
            now = self.filesystem.get_file_info(probe).mtime_ns or now
            remove(self.filesystem, probe)
        then = self.filesystem.get_file_info(self.path).mtime_ns
        return (now - then) / 1e9 if then else 0.0

    def _write(self) -> None:
        content = json.dumps({**self._mine, "time": time.time()}).encode()
        persistently(lambda: put(self.filesystem, self.path, content))

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            with contextlib.suppress(OSError):  # the next time, or another process has it by then
                other = self._read()
                if other is not None and other["nonce"] != self._mine["nonce"]:
                    self.lost = True
                    return
                self._write()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):
            if not self.lost and (found := self._read()) and found["nonce"] == self._mine["nonce"]:
                remove(self.filesystem, self.path)


def process() -> str:
    """What tells this process from all others of this machine, where the system tells that; else empty."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def is_dead(other: str) -> bool:
    """Whether a process of this machine is over; of another machine, or container, that cannot be told.

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
    """When a process began, in the system's ticks; empty once it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
