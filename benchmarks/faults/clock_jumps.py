"""Let the wall clock jump back and forward while a sweep runs.

    python -m benchmarks.faults.clock_jumps

In all Python processes of the sweep (the driver with MLflow's client, and the workers), the wall clock is shifted, but
not the monotonic clock, as after a correction by NTP. Ray's own servers keep their clock, because Ray does not start
under libfaketime. The clock jumps back by an hour and then forward by a day. The results must be the
same as those of an undisturbed sweep, MLflow must have every point once, and no measured duration may contain a jump.
The exit code is 1 if anything differs.
"""

import os
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

from tests.sweep.helpers import (
    GRID,
    SMALL,
    assert_mlflow_equals_store,
    histories,
    launch,
    newest,
    runs,
    start,
    wait_for_rounds,
    write_space,
)

NAME, ROUNDS = "clock", 3
JUMPS = {1: -3600, 4: 86400}
"""The shift of the wall clock in seconds after a number of recorded rounds, summed over all trials."""
LONGEST = 600.0  # seconds; no round of this sweep takes nearly as long
SHIFTED = textwrap.dedent(
    """
    import os, pathlib, time

    real, shift = time.time, pathlib.Path(os.environ["CLOCK_SHIFT"])
    time.time = lambda: real() + float(shift.read_text() or 0)
    time.time_ns = lambda: int(time.time() * 1e9)
    """
)
"""The module that shifts the wall clock of a Python process by the content of a file."""


def jump(folder: Path) -> list[str]:
    """Run the sweep while the clock jumps, and return the differences that its own records show."""
    shift = folder / "shift"
    shift.write_text("0")
    (folder / "sitecustomize.py").write_text(SHIFTED)  # Python imports this module at its start
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(folder), "CLOCK_SHIFT": str(shift)}):
        process = start(folder, "tune", NAME)
    for after, offset in JUMPS.items():
        wait_for_rounds(folder, NAME, after, process)
        shift.write_text(str(offset))
        print(f"the clock is shifted by {offset} s after {after} rounds of all trials", flush=True)
    out, error = process.communicate(timeout=600)
    wrong = [] if process.returncode == 0 else [f"exit code {process.returncode}: {out}{error}"]
    seconds = [record.seconds for trial in newest(folder, NAME).trials() for record in trial.history]
    print(f"{len(seconds)} durations of rounds, from {min(seconds):.2f} to {max(seconds):.2f} s")
    wrong += [] if min(seconds) > 0 and max(seconds) < LONGEST else ["a duration of a round contains a jump"]
    try:
        assert_mlflow_equals_store(folder, NAME)
    except AssertionError as difference:
        wrong.append(f"MLflow: {difference}")
    parents, children, _ = runs(folder, NAME)
    for run in (*parents, *children):
        if run.info.end_time < run.info.start_time:
            print(f"MLflow shows a negative duration of the run {run.info.run_name}")
    return wrong


def main() -> int:
    """Run the sweep with and without jumps, compare them, and return the exit code."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as root:
        calm, jumpy = Path(root) / "calm", Path(root) / "jumps"
        for folder in (calm, jumpy):
            write_space(folder, NAME, {**GRID, "fixed": {**SMALL, "federation.rounds": ROUNDS}, "seeds": [0]})
        wrong = jump(jumpy)
        launch(calm, "tune", NAME)
        same = histories(newest(calm, NAME)) == histories(newest(jumpy, NAME))
    wrong += [] if same else ["the results differ"]
    print("verdict: " + ("the jumps changed nothing" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
