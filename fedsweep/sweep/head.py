"""What runs on a cluster's head for a terminal elsewhere: the command line, its output, and Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tty
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.sweep.engine import engine_digest
from fedsweep.sweep.sharing import enter, shares

Chunk = tuple[int, bytes]
"""1 for stdout or 2 for stderr, and what was written there."""
COMMAND = (sys.executable, "-m", "fedsweep.cli.followed")
PAUSE = 0.5
"""Seconds that a look for output waits at most: how late Ctrl-C may arrive."""
PATIENCE = 20.0
"""Seconds after which a terminal that asks for nothing is taken for lost: a closed lid, a network that went.

Shorter than the 30 that Ray waits for a client: what Ray ends, it kills."""


@dataclass(frozen=True)
class Request:
    """What a terminal asks the head for."""

    words: Sequence[str]
    """What follows `fedsweep` on the command line."""
    files: Mapping[str, str]
    """Experiments and search spaces by their path, as the terminal's machine has them."""
    environment: Mapping[str, str]
    terminals: Sequence[int]
    """Which of stdout and stderr are a terminal."""


class Driver:
    """An actor on the head. It is asked for everything, so that nothing is said into the void."""

    def problem(self, engine: str, probe: str) -> str:
        """What keeps this machine from running the command as the terminal's would, or the empty string."""
        if (here := engine_digest()) != engine:
            return f"has another version of fedsweep ({here[:12]}, not {engine[:12]})"
        return shares(Path(probe)) if probe else ""

    def cluster(self) -> str:
        """The address of the cluster whose head this is, as its own processes know it."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def start(self, request: Request) -> str:
        """Start the command, and return this machine's name.

        It runs in a folder of its own with the terminal's experiments and search spaces; other relative names are
        of the terminal's folder, should this machine have it too.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="fedsweep-", ignore_cleanup_errors=True)
        for name, text in request.files.items():
            path = Path(self._folder.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        enter(request.environment)
        self._outputs: dict[int, int] = {}
        self._terminal = -1
        with contextlib.ExitStack() as handed_over:
            out, err = self._open(request.terminals, handed_over)
            self._process = subprocess.Popen(
                [*COMMAND, *request.words],
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._asked = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()
        return socket.gethostname()

    def _open(self, terminals: Sequence[int], handed_over: contextlib.ExitStack) -> list[int]:
        """The other ends of stdout and stderr: one terminal for those that are one, so that their order stays."""
        theirs: dict[int, int] = {}
        for stream in (1, 2):
            if stream in terminals and terminals[0] in theirs:
                theirs[stream] = theirs[terminals[0]]
                continue
            ours, theirs[stream] = pty.openpty() if stream in terminals else os.pipe()
            handed_over.callback(os.close, theirs[stream])
            self._outputs[ours] = stream
            if stream in terminals:
                self._terminal = ours
                tty.setraw(theirs[stream])  # what terminals do to lines, the one that shows it does
        return list(theirs.values())

    def read(self, size: tuple[int, int] | None = None) -> tuple[list[Chunk], int | None]:
        """What was written since, and the exit code once the command has ended and all of it was read.

        `size` is the terminal's, in columns and lines; it may change at any time.
        """
        self._asked = time.monotonic()
        if size is not None and self._terminal in self._outputs:
            columns, lines = size
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        code = self._process.poll()  # first, or what it writes at its end could be missed
        ready, _, _ = select.select(list(self._outputs), [], [], PAUSE)
        chunks = []
        for one in ready:
            if written := _read(one):
                chunks.append((self._outputs[one], written))
            else:
                os.close(one)
                del self._outputs[one]
        if chunks or code is None:
            return chunks, None
        self._leave()
        return [], code

    def _watch(self) -> None:
        """End the command as by Ctrl-C when the terminal is lost; nothing that it writes is waited for any more."""
        while self._process.poll() is None:
            time.sleep(PAUSE)
            if time.monotonic() - self._asked > PATIENCE:
                self._leave()

    def _leave(self) -> None:
        """Close and remove what was opened; a command that still runs takes that for Ctrl-C."""
        if self._process.stdin:
            self._process.stdin.close()
        if self._process.poll() is None:
            time.sleep(PAUSE)  # in which it turns its output away
        outputs, self._outputs = self._outputs, {}
        for one in outputs:
            os.close(one)
        self._process.wait()
        self._folder.cleanup()

    def interrupt(self) -> None:
        """As Ctrl-C in the command's own terminal."""
        self._process.send_signal(signal.SIGINT)


def _read(ours: int) -> bytes:
    """What there is, or nothing if the other end was closed, which a terminal tells by an error."""
    try:
        return os.read(ours, 65536)
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise
