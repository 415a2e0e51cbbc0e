"""Measure the driver's costs in a sweep of 1,000 simulated trials of a few milliseconds each.

Planning, Ray, result files, MLflow and the report are real. Only the trials are simulated: each round writes a
checkpoint without tensors and reports a number. The script prints the driver's time for each stage, in total and per
trial, and the driver's memory and open files after each hundred trials. Then the result of one trial is deleted, and
the sweep is resumed. The exit code is 1 if a trial has not finished, or if MLflow lacks data.

    python benchmarks/thousand_trials.py --trials 1000 --rounds 3
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def simulated(config: dict[str, Any], *, sweep: str, **_: Any) -> None:
    """Simulate a trial whose accuracy depends only on its learning rate and on the round."""
    from ray import tune

    from fedsweep.results import SweepStore
    from fedsweep.results.checkpoint import Checkpoint, save
    from fedsweep.results.history import RoundRecord
    from fedsweep.types import ServerState

    trial, records = SweepStore(Path(sweep)).trial(config["trial"]), []
    for round in range(config["until"] + 1):
        value = config["optimizer.lr"] * (1 + round) / 100
        metrics = {"accuracy/mean": value, "accuracy/worst_domain": value / 2, "megabytes/sent": 1.0}
        records.append(RoundRecord(round, metrics, 0.001))
        save(trial.checkpoint, Checkpoint(round, ServerState({}, (0,)), tuple(records)))
        tune.report({**metrics, "round": round, "seconds": 0.001})


def write_space(folder: Path, trials: int, rounds: int) -> None:
    """Write a search space with a grid of `trials` learning rates."""
    space = {
        "experiment": "fedra_digits",
        "fixed": {"federation.rounds": rounds},
        "space": {"optimizer.lr": {"grid": [(1 + place) / trials for place in range(trials)]}},
        "seeds": [0],
        "search": {"name": "grid"},
        "scheduler": {"name": "none"},
    }
    (folder / "search_spaces").mkdir()
    (folder / "search_spaces" / "many.yaml").write_text(json.dumps(space))


class Sampler(threading.Thread):
    """A thread that records the driver's memory and open files whenever a hundred more trials have ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.done, self.lines = folder, threading.Event(), list[str]()

    def run(self) -> None:
        """Count the ended trials twice a second until `done` is set."""
        driver = psutil.Process()
        while not self.done.wait(0.5):
            ended = sum(1 for _ in self.folder.glob("mlruns/sweeps/many/*/trials/*/outcome.json"))
            if ended // 100 >= len(self.lines):
                memory, files = driver.memory_info().rss / 1e6, driver.num_fds()
                self.lines.append(f"{ended:5} trials ended: {memory:6.0f} MB, {files:4} open files and sockets")


def main() -> int:
    """Run the sweep, print the costs, and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    os.chdir(tempfile.mkdtemp())
    write_space(Path.cwd(), given.trials, given.rounds)

    import fedsweep.sweep.running.trainable
    from fedsweep.report import write_report
    from fedsweep.sweep import TuneOptions, tune
    from fedsweep.sweep.plan.plan import Plan

    fedsweep.sweep.running.trainable.train = simulated  # type: ignore[assignment]
    spent: dict[str, tuple[float, float]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        spent[name] = (time.perf_counter() - wall, time.process_time() - cpu)

    with stage("read and check the plan"):
        Plan.read("many", {}, {})
    sampler = Sampler(Path.cwd())
    sampler.start()
    with stage("whole sweep"):
        results = [tune(TuneOptions("many"))]
    sampler.done.set()
    with stage("report"):
        write_report(results[0].session.sweep.manifest(), results[0].trials, results[0].folder / "report")
    last = results[0].session.sweep.trial(results[0].trials[-1].plan.key)
    (last.folder / "outcome.json").unlink()
    last.checkpoint.unlink()
    with stage("resume for one trial"):
        results.append(tune(TuneOptions("many", resume=True)))
    for name, (wall, cpu) in spent.items():
        print(
            f"{name:24} {wall:8.1f} s  {1000 * wall / given.trials:7.1f} ms per trial, {cpu:8.1f} s of the driver's CPU"
        )
    print(f"driver's peak memory     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.0f} MB")
    print("\n".join(sampler.lines))
    ends = [[trial.outcome.outcome for trial in one.trials if trial.outcome] for one in results]
    for one in results:  # the command waits only 20 seconds for the next write, which a busy machine may exceed
        one.session.recorder.deliver()
    missing = [one.session.recorder.unsynced for one in results]
    if (complete := all(end == ["finished"] * given.trials for end in ends)) and not any(missing):
        return 0
    print(f"all trials finished: {complete}; missing in MLflow: {missing}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
