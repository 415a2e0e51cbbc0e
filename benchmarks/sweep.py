"""Measure what a sweep of short trials costs: its start, the driver's time per trial, and the share of useful CPU time.

    uv run python -m benchmarks.sweep
    uv run python -m benchmarks.sweep --trials 20 --rounds 1 --out benchmarks/results/NAME.json

The sweep varies the learning rate of the experiment `fedra_digits`. Its trials share the machine's cores, with one core
each. The CPU seconds of all its processes are read ten times a second. A CPU second is useful if a worker spends it in
a round, that is, in local training, aggregation or evaluation. The rest is imports and models of the workers, the
driver with MLflow, and Ray's own processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from .recorded import write

LOG, WAIT = "SWEEP_LOG", 0.1
KINDS = ("driver", "workers", "Ray")


def timed(config: dict[str, Any], **given: Any) -> None:
    """Run a trial in a worker, and append its times to the log: of its start, of its rounds, and of its CPU seconds."""
    import time

    from fedsweep.federation import build_and_run
    from fedsweep.sweep.running.trainable import train

    real: Callable[..., Iterator[Any]] = getattr(build_and_run, "unmeasured", build_and_run.federate)
    entry = {"begun": time.time(), "cpu": 0.0, "first_round": 0.0}

    def federate(*of: Any) -> Iterator[Any]:
        entry["first_round"], rounds = time.time(), real(*of)
        while True:
            before = time.process_time()
            result = next(rounds, None)
            entry["cpu"] += time.process_time() - before
            if result is None:
                return
            yield result

    build_and_run.unmeasured, build_and_run.federate = real, federate  # type: ignore[attr-defined]
    try:
        train(config, **given)
    finally:
        with open(os.environ["SWEEP_LOG"], "a") as log:
            log.write(json.dumps({**entry, "ended": time.time()}) + "\n")


def drive(trials: int, rounds: int) -> int:
    """Run the sweep in this process, which is the driver, and return its exit code."""
    import fedsweep.sweep.running.trainable
    from fedsweep.sweep import TuneOptions, tune

    rates = [0.1 * (1 + place) / trials for place in range(trials)]
    space = {"experiment": "fedra_digits", "fixed": {"federation.rounds": rounds}, "seeds": [0]}
    space |= {"space": {"optimizer.lr": {"grid": rates}}, "search": {"name": "grid"}, "scheduler": {"name": "none"}}
    Path("search_spaces").mkdir()
    Path("search_spaces/short.yaml").write_text(json.dumps(space))
    fedsweep.sweep.running.trainable.train = timed  # type: ignore[assignment]
    ends = [trial.outcome for trial in tune(TuneOptions("short")).trials]
    return 0 if all(end is not None and end.outcome == "finished" for end in ends) else 1


class Processes(threading.Thread):
    """A thread that records the CPU seconds of a driver, of its workers and of Ray's processes."""

    def __init__(self, driver: int, log: Path) -> None:
        super().__init__(daemon=True)
        self.driver, self.log, self.done = psutil.Process(driver), log, threading.Event()
        self.spent: dict[int, tuple[str, float]] = {}
        self.at_first_trial = self.at_last_trial = 0.0
        self.ended = 0

    def run(self) -> None:
        """Read the times until `done` is set."""
        while not self.done.wait(WAIT):
            try:
                processes = [self.driver, *self.driver.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                self._read(process)
            ended = len(self.log.read_text().splitlines()) if self.log.exists() else 0
            if ended > self.ended:
                self.at_last_trial = self.total("driver")
                self.at_first_trial = self.at_first_trial or self.at_last_trial
                self.ended = ended

    def _read(self, process: psutil.Process) -> None:
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            return
        kind = "driver" if process == self.driver else "workers" if command.startswith("ray::") else "Ray"
        if not command:  # the process has ended
            kind = self.spent.get(process.pid, (kind, 0.0))[0]
        self.spent[process.pid] = (kind, times.user + times.system)

    def total(self, kind: str) -> float:
        """Return the CPU seconds of all processes of a kind."""
        return sum(seconds for of, seconds in list(self.spent.values()) if of == kind)


def measure(trials: int, rounds: int) -> dict[str, Any]:
    """Run the sweep in a process of its own, and return what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, LOG: str(log), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": root}
        command = [sys.executable, "-m", "benchmarks.sweep", "--drive", str(trials), "--rounds", str(rounds)]
        begun = time.time()
        driver = subprocess.Popen(command, cwd=folder, env=environment)
        processes = Processes(driver.pid, log)
        processes.start()
        code = driver.wait()
        processes.done.set()
        processes.join()
        seconds = time.time() - begun
        if code:
            raise RuntimeError(f"the sweep ended with exit code {code}")
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    useful, spent = sum(one["cpu"] for one in entries), {kind: processes.total(kind) for kind in KINDS}
    between = processes.at_last_trial - processes.at_first_trial
    return {
        "trials": trials,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "seconds_to_first_trial": round(min(one["begun"] for one in entries) - begun, 1),
        "seconds_to_first_round": round(min(one["first_round"] for one in entries) - begun, 1),
        "trial_start_ms": round(1000 * statistics.median(one["first_round"] - one["begun"] for one in entries), 1),
        "driver_ms_per_trial": round(1000 * between / max(1, len(entries) - 1), 1),
        "cpu_seconds": {kind: round(value, 1) for kind, value in spent.items()},
        "cpu_seconds_of_rounds": round(useful, 1),
        "useful_share": round(useful / sum(spent.values()), 3),
    }


def table(found: dict[str, Any]) -> Table:
    """Return a table of the costs."""
    made = Table("cost", "", title=f"{found['trials']} trials with {found['rounds']} rounds")
    spent = found["cpu_seconds"]
    made.add_row("whole sweep, s", str(found["seconds"]))
    made.add_row("until the first trial starts, s", str(found["seconds_to_first_trial"]))
    made.add_row("until the first round starts, s", str(found["seconds_to_first_round"]))
    made.add_row("start of a later trial in a worker, ms (median)", str(found["trial_start_ms"]))
    made.add_row("driver's CPU time per trial, ms", str(found["driver_ms_per_trial"]))
    made.add_row("CPU seconds: rounds", str(found["cpu_seconds_of_rounds"]))
    made.add_row("CPU seconds: rest of the workers", f"{spent['workers'] - found['cpu_seconds_of_rounds']:.1f}")
    made.add_row("CPU seconds: driver", str(spent["driver"]))
    made.add_row("CPU seconds: Ray", str(spent["Ray"]))
    made.add_row("share of CPU seconds that train or evaluate", f"{found['useful_share']:.1%}")
    return made


def main() -> int:
    """Run the sweep, print a table and, with `--out`, write a JSON file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        return drive(given.drive, given.rounds)
    found = measure(given.trials, given.rounds)
    Console().print(table(found))
    write(given.out, ("torch", "ray", "mlflow"), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
