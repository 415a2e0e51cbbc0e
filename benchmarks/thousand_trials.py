"""Measure the driver's costs in a sweep of 1,000 simulated trials of a few milliseconds each.

Planning, Ray, result files, MLflow and the report are real. Only the trials are simulated: each round writes a
checkpoint without tensors and reports a number. The script prints the driver's time for each stage, in total and per
trial, and the driver's peak memory.

    python benchmarks/thousand_trials.py --trials 1000 --rounds 3
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Run the sweep and print the costs."""
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
    with stage("whole sweep"):
        result = tune(TuneOptions("many"))
    with stage("report"):
        write_report(result.session.sweep.manifest(), result.trials, result.folder / "report")
    ended = [trial.outcome.outcome for trial in result.trials if trial.outcome]
    if ended != ["finished"] * given.trials or result.session.recorder.unsynced:
        raise SystemExit(
            f"{ended.count('finished')} of {given.trials} finished; MLflow: {result.session.recorder.unsynced}"
        )
    for name, (wall, cpu) in spent.items():
        print(
            f"{name:24} {wall:8.1f} s  {1000 * wall / given.trials:7.1f} ms per trial, {cpu:8.1f} s of the driver's CPU"
        )
    print(f"driver's peak memory     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.0f} MB")


if __name__ == "__main__":
    main()
