"""A process of MLflow's server, which ends with all of its child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from fedsweep.common.signals import ending_signals_interrupt, one_interrupt

PATIENCE = 10.0  # seconds after SIGTERM, after which the processes are killed
GUARD = """
import os, signal, subprocess, sys, threading

def kill_group_at_end_of_input():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=kill_group_at_end_of_input, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
"""
"""The program that starts the server. Its input is a pipe from this process, which ends even if this process is killed.
"""


@contextlib.contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during the context, and end the server and its child processes at the end of the context.

    The server has its own session, so Ctrl-C in a terminal reaches only this process. During the context, Ctrl-C raises
    KeyboardInterrupt, and SIGTERM and SIGHUP raise SignalInterrupt. Further signals are ignored until the server has
    ended. If this process is killed with SIGKILL, the server and its child processes are killed, too.
    """
    with ending_signals_interrupt(), one_interrupt():
        server = None
        try:
            guarded = [sys.executable, "-c", GUARD, *command]
            variables = {**os.environ, **environment}
            server = subprocess.Popen(guarded, env=variables, stdin=subprocess.PIPE, start_new_session=True)
            yield server
        finally:
            if server is not None:
                end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Terminate a server and its child processes. Kill those that still run after `PATIENCE` seconds."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(server.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if server.poll() is not None and not any(map(_runs, family)):
                return
            time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
