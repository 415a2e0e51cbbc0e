"""Make MLflow's database read-only before a sweep starts, before it is resumed, and while it runs.

    python -m benchmarks.faults.read_only_database

Permissions do not restrict root. For root, the script therefore uses the attribute "immutable" of the file system
(`chattr +i`), which also restricts root. For other users, it removes the permission to write.

Before a start or a resume, the command must end with exit code 2 and one sentence. While the sweep runs, its results
must be kept, and a resume must complete MLflow's records. The exit code is 1 if anything differs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.sweep.helpers import (
    GRID,
    assert_mlflow_equals_store,
    histories,
    kill,
    launch,
    newest,
    start,
    wait_for_rounds,
    write_space,
)

NAME = "read_only"
SPACE = {**GRID, "fixed": {**GRID["fixed"], "federation.rounds": 6}, "seeds": [0]}
SENTENCE = "cannot be written: attempt to write a readonly database (mlflow.db)"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make MLflow's database read-only within the block."""
    path = folder / "mlruns" / "mlflow.db"
    as_root = os.getuid() == 0
    subprocess.run(["chattr", "+i", path] if as_root else ["chmod", "a-w", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path] if as_root else ["chmod", "u+w", path], check=True)


def refused(folder: Path, *words: str) -> list[str]:
    """Run a command that must end with one sentence, and return a text if it does not."""
    with read_only(folder):
        done = launch(folder, "tune", NAME, *words, code=None)
        report = launch(folder, "report", NAME, code=None)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    print(f"tune {' '.join(words)}: exit code {done.returncode}: {last}", flush=True)
    print(f"report: exit code {report.returncode} {report.stderr}", flush=True)
    good = done.returncode == 2 and SENTENCE in last and "Traceback" not in done.stderr
    return [*([] if good else [f"tune {words}"]), *([] if report.returncode == 0 else ["report"])]


def during(folder: Path) -> list[str]:
    """Make the database read-only while the sweep runs, resume the sweep afterwards, and return a text per fault."""
    process = start(folder, "tune", NAME)
    wait_for_rounds(folder, NAME, 1, process)
    with read_only(folder):
        out, error = process.communicate(timeout=900)
    print(f"while the sweep runs: exit code {process.returncode}:\n{out}{error}", flush=True)
    wrong = [] if "Traceback" not in out + error and process.returncode in (0, 1) else ["while the sweep runs"]
    unfinished = [one for one in newest(folder, NAME).trials() if one.outcome is None]
    wrong += ["trials without an outcome"] if unfinished else []
    launch(folder, "tune", NAME, "--resume")
    return wrong


def main() -> int:
    """Run all cases, compare the results and MLflow, and return the exit code."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as root:
        calm, killed, running = (Path(root) / name for name in ("calm", "killed", "running"))
        for folder in (calm, killed, running):
            write_space(folder, NAME, SPACE)
        launch(calm, "tune", NAME)
        wrong = refused(calm, "--fresh")
        process = start(killed, "tune", NAME)
        wait_for_rounds(killed, NAME, 2, process)
        kill(process)
        wrong += refused(killed, "--resume")
        launch(killed, "tune", NAME, "--resume")
        wrong += during(running)
        for folder in (killed, running):
            wrong += [] if histories(newest(folder, NAME)) == histories(newest(calm, NAME)) else [f"{folder.name}"]
            try:
                assert_mlflow_equals_store(folder, NAME)
            except AssertionError as difference:
                wrong.append(f"{folder.name}, MLflow: {difference}")
    print("verdict: " + ("all results are kept" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
