"""The end of MLflow's server: its child processes end too, whatever signal ends `fedsweep ui`."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import sys
from fedsweep.tracking.serving import serving
server = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); " + \\
    "time.sleep(600)'])"
try:
    with serving([sys.executable, "-c", server], {}) as process:
        raise SystemExit(process.wait())
except KeyboardInterrupt:
    raise SystemExit(0)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)])
def test_a_signal_ends_the_server_and_its_children(number: signal.Signals, code: int) -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"1\n"
        family = psutil.Process(started.pid).children(recursive=True)
        assert len(family) == 2
        started.send_signal(number)
        assert started.wait(60) == code
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
