"""Let the host memory run out while a sweep runs, so that Ray's memory monitor kills a worker of a trial.

    python -m benchmarks.faults.out_of_memory

While the trials run, this process allocates memory until the machine is above the threshold of Ray's memory monitor.
Then the memory is freed. The sweep must report the lost worker, continue the trial after its last recorded round, and
give the results of an undisturbed sweep. The exit code is 1 if anything differs.

The kernel's own out-of-memory killer sends SIGKILL to a process. It is not simulated here, because tests kill workers
and drivers with SIGKILL (docs/reliability.md).
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

from tests.sweep.helpers import GRID, SMALL, histories, launch, newest, start, table, wait_for_rounds, write_space

NAME, ROUNDS = "memory", 6
ROOM = 6 * 2**30  # bytes that the sweep may use before the monitor acts
BEYOND = 2**29  # bytes above the threshold
PART = 2**27  # bytes that are allocated at once
SECONDS = 60.0  # longest time for which the memory is held


def used() -> int:
    """Return the number of bytes of host memory in use."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def fill(threshold: int, workers: int) -> float:
    """Use up the memory until a worker of the sweep is gone, and return the number of seconds that this took."""
    begun, held = time.monotonic(), []
    while time.monotonic() - begun < SECONDS and running() >= workers:
        if used() < threshold + BEYOND:
            held.append(np.ones(PART, dtype=np.uint8))
        else:
            time.sleep(0.1)
    return time.monotonic() - begun


def running() -> int:
    """Return the number of Ray workers on this machine that run a trial."""
    names = [" ".join(one.cmdline()) for one in psutil.process_iter() if one.status() != psutil.STATUS_ZOMBIE]
    return sum(name.startswith("ray::ImplicitFunc") for name in names)


def starve(folder: Path) -> list[str]:
    """Run the sweep while the memory runs out for a moment, and return what is wrong with the way it ends."""
    threshold = used() + ROOM
    share = f"{threshold / psutil.virtual_memory().total:.4f}"
    with mock.patch.dict(os.environ, {"RAY_memory_usage_threshold": share, "RAY_memory_monitor_refresh_ms": "100"}):
        process = start(folder, "tune", NAME)
    wait_for_rounds(folder, NAME, 3, process)
    workers = running()
    print(f"{workers} workers after 3 rounds; Ray kills workers above {share} of the host memory", flush=True)
    print(f"memory used up for {fill(threshold, workers):.1f} s", flush=True)
    out, error = process.communicate(timeout=900)
    lost = [line for line in error.splitlines() if "worker was lost" in line]
    print(*lost, sep="\n", flush=True)
    wrong = [] if process.returncode == 0 else [f"exit code {process.returncode}: {out}{error}"]
    wrong += [] if lost else ["no worker was lost, so nothing was tested"]
    return wrong + ([f"a traceback on the screen: {error}"] if "Traceback" in error else [])


def main() -> int:
    """Run the sweep with and without the fault, compare them, and return the exit code."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as root:
        calm, starved = Path(root) / "calm", Path(root) / "starved"
        for folder in (calm, starved):
            write_space(folder, NAME, {**GRID, "fixed": {**SMALL, "federation.rounds": ROUNDS}, "seeds": [0]})
        wrong = starve(starved)
        launch(calm, "tune", NAME)
        same = histories(newest(calm, NAME)) == histories(newest(starved, NAME))
        same = same and table(calm, NAME) == table(starved, NAME)
    print(f"the results are {'the same' if same else 'NOT the same'}")
    wrong += [] if same else ["the results differ"]
    print("verdict: " + ("nothing was lost" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
