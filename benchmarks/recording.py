"""Measure what recording in MLflow costs a sweep's driver process, with many trials of a few rounds each.

    python benchmarks/recording.py --trials 1000 --rounds 5

Print one line of JSON with the milliseconds and requests per trial, and the time for which the driver was blocked.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

from fedsweep.common.config import flat
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Outcome, Store, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.tracking import Recorder

REQUESTS: Counter[str] = Counter()


def count_requests() -> None:
    """Replace methods of MLflow's SQL store by methods that count their calls in `REQUESTS`."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    def counted(name: str) -> Any:
        real = getattr(SqlAlchemyStore, name)

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            REQUESTS[name] += 1
            return real(*args, **kwargs)

        return call

    asked = ("create_run", "get_run", "search_runs", "log_batch", "set_tag", "update_run_info", "get_metric_history")
    for name in (*asked, "log_metric", "log_param"):
        setattr(SqlAlchemyStore, name, counted(name))


def main() -> None:
    """Record the trials and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="write each round to MLflow before the next one")
    given = parser.parse_args()
    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "fedra_digits")
    metrics = dict.fromkeys(config.metrics(), 0.5)
    count_requests()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        manifest = SweepManifest(
            id="s", name="many", experiment="fedra_digits", created="2026-01-01", metric="accuracy/mean", mode="max",
            rounds=given.rounds, varied=("optimizer.lr",), seeds=(0,), scheduler="none", search="grid",
            domains=config.data.domains, digests={},
        )  # fmt: skip
        sweep = store.sweep(manifest.name, manifest.id)
        sweep.create(manifest, {"search_space.yaml": "", "experiment.yaml": ""})
        recorder = Recorder(store, manifest.name)
        recorder.open_sweep(manifest, sweep.folder)
        getattr(recorder, "deliver", int)()
        REQUESTS.clear()
        held, begun, cpu = 0.0, time.perf_counter(), time.process_time()
        for number in range(given.trials):
            plan = TrialPlan(
                key=f"k{number}", number=number, arm={"optimizer.lr": number}, seed=0,
                config=config.model_dump(mode="json"),
            )  # fmt: skip
            for rounds in range(given.rounds + 2):
                history = [RoundRecord(i, metrics, 0.005) for i in range(rounds)]
                outcome = Outcome(outcome="finished", round=given.rounds) if rounds == given.rounds + 1 else None
                before = time.perf_counter()
                recorder.sync(TrialRecord(plan, outcome, history))
                held += time.perf_counter() - before
                if given.each:
                    recorder.deliver()
        getattr(recorder, "deliver", int)()
        took, used = time.perf_counter() - begun, time.process_time() - cpu
        if recorder.unsynced:
            raise RuntimeError(str(recorder.unsynced))
    per_trial = {name: round(count / given.trials, 3) for name, count in sorted(REQUESTS.items())}
    print(
        json.dumps(
            {
                "trials": given.trials,
                "rounds": given.rounds,
                "metrics": len(metrics),
                "parameters": len(flat(config)),
                "ms_per_trial": round(took / given.trials * 1e3, 1),
                "cpu_ms_per_trial": round(used / given.trials * 1e3, 1),
                "driver_held_ms_per_trial": round(held / given.trials * 1e3, 3),
                "requests_per_trial": per_trial,
                "requests": round(sum(per_trial.values()), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
