"""Let the machine run out of memory while a sweep runs, once for a moment and once until the sweep ends.

    python -m benchmarks.faults.out_of_memory

Ray kills workers if the memory in use exceeds a threshold. The script sets the threshold to a value that the sweep
alone does not reach, and lets another process use memory until Ray kills a worker. If the memory is free again after a
moment, the sweep must finish. If not, the trials must fail with one sentence, and a resume must finish the sweep. In
both cases, the results must be the same as those of an undisturbed sweep. The exit code is 1 if anything differs.

The script uses up to 10 GB of main memory.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import psutil

from tests.sweep.helpers import GRID, histories, launch, newest, start, wait_for_rounds, workers_of, write_space

NAME = "memory"
SPACE = {**GRID, "fixed": {**GRID["fixed"], "federation.rounds": 60}, "seeds": [0]}
ROOM, STEP, MOST = 4e9, 0.5e9, 10e9
"""Bytes: free memory below the threshold, the growth of the other process, and its largest size."""
SECONDS = 1.5  # between two steps of growth; Ray looks every 0.25 s
SENTENCE = "ran out of memory"
HOG = f"import sys\nheld = [bytearray(b'x') * {int(STEP)} for _ in sys.stdin]"
"""A process that uses more memory with each line that it reads."""


def threshold() -> str:
    """Return the share of the memory in use at which Ray kills workers."""
    memory = psutil.virtual_memory()
    return f"{(memory.total - memory.available + ROOM) / memory.total:.4f}"


def fill(driver: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Start a process that uses more and more memory until the driver loses a worker, and return the process.

    Raises:
        SystemExit: No worker was lost.
    """
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, text=True)
    workers = workers_of(driver.pid)
    for _ in range(int(MOST / STEP)):
        print("more", file=hog.stdin, flush=True)
        time.sleep(SECONDS)
        if driver.poll() is not None:
            break
        if not all(one.is_running() for one in workers):
            return hog
    hog.kill()
    raise SystemExit("Ray killed no worker before the sweep ended")


def play(folder: Path, for_good: bool) -> list[str]:
    """Run the sweep while the memory is full, and return a text per fault."""
    with mock.patch.dict(os.environ, {"RAY_memory_usage_threshold": threshold()}):
        process = start(folder, "tune", NAME)
    with contextlib.ExitStack() as ends:
        ends.callback(process.kill)
        wait_for_rounds(folder, NAME, 2, process)
        hog = fill(process)
        ends.callback(hog.kill)
        print("Ray has killed a worker", flush=True)
        if not for_good:
            hog.kill()
        begun = time.monotonic()
        out, error = process.communicate(timeout=900)
    hog.wait()
    print(
        f"exit code {process.returncode} after {time.monotonic() - begun:.0f} s:\n{(out + error)[-2000:]}", flush=True
    )
    wrong = [] if "Traceback" not in out + error else ["a traceback"]
    wrong += [] if process.returncode == int(for_good) else [f"exit code {process.returncode}"]
    if for_good:
        wrong += [] if SENTENCE in " ".join(out.split()) else ["no sentence about the memory"]
        launch(folder, "tune", NAME, "--resume")
    return wrong


def main() -> int:
    """Run the sweep with and without enough memory, compare the results, and return the exit code."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as root:
        calm, moment, long = (Path(root) / name for name in ("calm", "moment", "for_good"))
        for folder in (calm, moment, long):
            write_space(folder, NAME, SPACE)
        wrong = [f"full for a moment: {one}" for one in play(moment, for_good=False)]
        wrong += [f"full for good: {one}" for one in play(long, for_good=True)]
        launch(calm, "tune", NAME)
        expected = histories(newest(calm, NAME))
        wrong += [f"{one.name}: other results" for one in (moment, long) if histories(newest(one, NAME)) != expected]
    print("verdict: " + ("the results are the same" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
