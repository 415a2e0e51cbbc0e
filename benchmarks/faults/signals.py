"""Send every ending signal to every part of a sweep, and compare the results with those of an undisturbed sweep.

    python -m benchmarks.faults.signals
    python -m benchmarks.faults.signals --signals SIGHUP SIGKILL --out benchmarks/results/NAME.md

Each signal is sent to the driver, to its process group, or to one worker. It is sent once before the first round of the
sweep and once during the rounds. If the driver ends, the sweep is resumed. The script prints a Markdown table. The exit
code is 1 if a driver has another exit code than expected or prints a traceback, or if the results or MLflow's records
differ.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.sweep.helpers import (
    GRID,
    assert_mlflow_equals_store,
    histories,
    kill,
    launch,
    newest,
    played,
    start,
    table,
    wait_for_rounds,
    workers_of,
    write_space,
)

NAME = "signals"
SPACE = {**GRID, "fixed": {**GRID["fixed"], "federation.rounds": 8}, "seeds": [0]}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
VICTIMS = ("driver", "group", "worker")
EARLY, DURING = "before the first round", "during rounds"
SECONDS = 300.0  # the longest time until a worker starts or a sweep ends


@dataclass
class Row:
    """One row of the table: a signal, its receiver, its time and its consequences."""

    signal: str
    victim: str
    moment: str
    code: int | None = None
    """The exit code of the driver that received the signal, or of the driver of the worker."""
    traceback: bool = False
    same: bool = False
    """True if the results and MLflow's records equal those of the undisturbed sweep in the end."""

    @property
    def expected(self) -> tuple[int, ...]:
        """The expected exit codes."""
        number = signal.Signals[self.signal]
        if self.victim == "worker":
            return (0,)
        return (-number,) if number == signal.SIGKILL else (128 + number,)

    @property
    def good(self) -> bool:
        """True if the signal had the expected consequences."""
        return self.code in self.expected and self.same and not self.traceback

    def __str__(self) -> str:
        what = f"exit code {self.code}" if self.victim != "worker" else f"the sweep continues, exit code {self.code}"
        what += " with a traceback" if self.traceback else ""
        after = "-" if self.victim == "worker" else "`--resume`"
        same = "the same" if self.same else "NOT the same"
        return f"| {self.signal} | {self.victim} | {self.moment} | {what} | {after} | {same} |"


def wait(folder: Path, moment: str, process: subprocess.Popen[str]) -> None:
    """Wait until a worker of the sweep has started, and for the moment `DURING` also until it has played a round."""
    if moment == DURING:
        wait_for_rounds(folder, NAME, played(folder, NAME) + 1 if list(folder.rglob("sweep.json")) else 1, process)
    deadline = time.monotonic() + SECONDS
    while not workers_of(process.pid):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no worker has started: {process.communicate()}")
        time.sleep(0.05)


def send(number: signal.Signals, victim: str, process: subprocess.Popen[str]) -> None:
    """Send a signal to the driver, to its process group or to one of its workers."""
    if victim == "worker":
        workers_of(process.pid)[0].send_signal(number)
    else:
        (os.kill if victim == "driver" else os.killpg)(process.pid, number)


def play(folder: Path, number: signal.Signals, victim: str) -> list[Row]:
    """Run a sweep that receives the signal before the first round and later during its rounds."""
    write_space(folder, NAME, SPACE)
    rows = [Row(number.name, victim, moment) for moment in (EARLY, DURING)]
    process: subprocess.Popen[str] | None = None
    try:
        for row in rows:
            if process is None:
                process = start(folder, "tune", NAME, *(["--resume"] if row.moment == DURING else []))
            wait(folder, row.moment, process)
            send(number, victim, process)
            if victim != "worker":
                end([row], process)
                process = None
        if process is not None:
            end(rows, process)
    finally:  # also if no worker has started in time
        if process is not None and process.poll() is None:
            kill(process)
    if victim != "worker" or any(row.code for row in rows):
        launch(folder, "tune", NAME, "--resume", code=None)
    return rows


def end(rows: list[Row], process: subprocess.Popen[str]) -> None:
    """Wait for the end of the driver, and record its exit code."""
    out, error = process.communicate(timeout=SECONDS)
    for row in rows:
        row.code, row.traceback = process.returncode, "Traceback" in out + error
        if row.code not in row.expected or row.traceback:
            print(f"{row}\n{out}{error}", file=sys.stderr, flush=True)


def is_same(folder: Path, calm: Path) -> bool:
    """Return whether the table, the histories and MLflow's records of two sweeps are the same."""
    try:
        assert_mlflow_equals_store(folder, NAME)
    except AssertionError as difference:
        print(f"MLflow: {difference}", file=sys.stderr)
        return False
    equal = histories(newest(folder, NAME)) == histories(newest(calm, NAME))
    return equal and table(folder, NAME) == table(calm, NAME)


def main() -> int:
    """Run all cases, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", nargs="*", default=[one.name for one in SIGNALS])
    parser.add_argument("--victims", nargs="*", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--out", type=Path, help="file for the Markdown table")
    given = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    lines = ["| signal | sent to | when | what happens | needs | results |", "| --- | --- | --- | --- | --- | --- |"]
    print("\n".join(lines), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        calm = Path(root) / "calm"
        write_space(calm, NAME, SPACE)
        launch(calm, "tune", NAME)
        for number in (signal.Signals[name] for name in given.signals):
            for victim in given.victims:
                folder = Path(root) / f"{number.name}-{victim}"
                new = play(folder, number, victim)
                for row in new:
                    row.same = is_same(folder, calm)
                    print(row, flush=True)
                rows += new
    if given.out:
        given.out.write_text("\n".join([*lines, *map(str, rows)]) + "\n")
    wrong = [row for row in rows if not row.good]
    print(f"verdict: {len(rows) - len(wrong)} of {len(rows)} rows are as expected")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
