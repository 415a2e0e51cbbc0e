"""Make MLflow's database read-only before a sweep starts, before it is resumed, and while it runs.

    python -m benchmarks.faults.read_only_database
    python -m benchmarks.faults.read_only_database --only before

Permissions do not restrict root. For root, the script therefore uses the attribute "immutable" of the file system
(`chattr +i`), which also restricts root. For other users, it removes the permission to write.

The sweep must run in all three cases, and its results must be kept. One sentence must name the database and state how
to complete MLflow's records later, and a resume must complete them. The exit code is 1 if anything differs.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
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
CASES = ("before", "resumed", "running")
"""The moments at which the database becomes read-only: before a sweep starts, before a resume, or while it runs."""
CAUSES = ("mlflow.db cannot be used: ", "MLflow rejected them (attempt to write a readonly database)")
SECONDS = 120.0  # the longest time until MLflow's database exists
REMEDY = "The results folder has everything; run `fedsweep ui --deliver`"


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


def wait_for_database(folder: Path) -> None:
    """Wait until MLflow's database exists, which is created while the first trials run."""
    deadline = time.monotonic() + SECONDS
    while not (folder / "mlruns" / "mlflow.db").exists():
        if time.monotonic() > deadline:
            raise SystemExit("MLflow's database was not created")
        time.sleep(0.1)


def told(out: str, error: str) -> bool:
    """Return whether the output of a sweep says what is incomplete in MLflow, and contains no traceback."""
    words = " ".join((out + error).split())
    return any(one in words for one in CAUSES) and REMEDY in words and "Traceback" not in words


def before(folder: Path, *words: str) -> list[str]:
    """Start or resume a sweep while the database is read-only, and return a text per fault."""
    with read_only(folder):
        done = launch(folder, "tune", NAME, *words, code=None)
        report = launch(folder, "report", NAME, code=None)
    print(f"tune {' '.join(words)}: exit code {done.returncode}:\n{done.stdout[-400:]}{done.stderr}", flush=True)
    good = done.returncode == 0 and told(done.stdout, done.stderr)
    return [*([] if good else [f"tune {words}"]), *([] if report.returncode == 0 else ["report"])]


def during(folder: Path) -> list[str]:
    """Make the database read-only while the sweep runs, resume the sweep afterwards, and return a text per fault."""
    process = start(folder, "tune", NAME)
    wait_for_rounds(folder, NAME, 1, process)
    wait_for_database(folder)
    with read_only(folder):
        out, error = process.communicate(timeout=900)
    print(f"while the sweep runs: exit code {process.returncode}:\n{out}{error}", flush=True)
    wrong = [] if told(out, error) and process.returncode == 0 else ["while the sweep runs"]
    unfinished = [one for one in newest(folder, NAME).trials() if one.outcome is None]
    wrong += ["trials without an outcome"] if unfinished else []
    launch(folder, "tune", NAME, "--resume")
    return wrong


def main() -> int:
    """Run the cases, compare the results and MLflow, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="run only one of the three cases")
    only = parser.parse_args().only
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as root:
        calm, killed, running = (Path(root) / name for name in ("calm", "killed", "running"))
        for folder in (calm, killed, running):
            write_space(folder, NAME, SPACE)
        launch(calm, "tune", NAME)
        wrong, compared = [], list[Path]()
        if only in (None, "before"):
            wrong += before(calm, "--fresh")
        if only in (None, "resumed"):
            process = start(killed, "tune", NAME)
            wait_for_rounds(killed, NAME, 2, process)
            wait_for_database(killed)
            kill(process)
            wrong += before(killed, "--resume")
            launch(killed, "tune", NAME, "--resume")
            compared.append(killed)
        if only in (None, "running"):
            wrong += during(running)
            compared.append(running)
        for folder in compared:
            wrong += [] if histories(newest(folder, NAME)) == histories(newest(calm, NAME)) else [f"{folder.name}"]
            try:
                assert_mlflow_equals_store(folder, NAME)
            except AssertionError as difference:
                wrong.append(f"{folder.name}, MLflow: {difference}")
    print("verdict: " + ("all results are kept" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
