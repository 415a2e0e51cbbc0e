"""The end of MLflow's server: its child processes end too, whatever signal ends `fedsweep ui`."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

PARENT = """
import signal, sys
from fedsweep.common.signals import ending_signals_interrupt
from fedsweep.tracking import serving

for one in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, signal.SIG_DFL)  # the shell that runs the tests may ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
serving.PATIENCE = 0.5
with ending_signals_interrupt() as received:
    try:
        with serving.serving([sys.executable, "-c", sys.argv[1]], {}) as process:
            raise SystemExit(process.wait())
    except KeyboardInterrupt:
        raise SystemExit(received.status)
"""
SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("ending", flush=True))  # and the server continues
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("running", flush=True)
time.sleep(600)
"""


@contextmanager
def serving_process() -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """Start a process that runs a server, and return it with all of its descendants."""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", PARENT, SERVER], cwd=root, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"running\n"
        family = psutil.Process(started.pid).children(recursive=True)
        assert len(family) == 3  # the program that starts the server, the server and its child
        yield started, family


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signals_end_the_server_and_its_children(number: signal.Signals, code: int) -> None:
    """A second signal arrives while the server ends."""
    with serving_process() as (started, family):
        assert started.stdout is not None
        started.send_signal(number)
        assert started.stdout.readline() == b"ending\n"
        started.send_signal(signal.SIGTERM)
        started.send_signal(signal.SIGINT)
        assert started.wait() == code
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_the_server_is_killed_with_the_process_that_started_it() -> None:
    """SIGKILL leaves the process no time to end the server."""
    with serving_process() as (started, family):
        started.kill()
        assert not psutil.wait_procs(family, timeout=60)[1]
