"""Check that a sweep loses and duplicates nothing in MLflow if the server is down for a while.

    python -m benchmarks.faults.mlflow_outage
    python -m benchmarks.faults.mlflow_outage --away 5 --rounds 6

Four trials run in parallel. The MLflow server, which uses PostgreSQL, is killed during the sweep and started again
later. Then all metrics of all trials in MLflow are compared with the sweep's files. The exit code is 1 if anything
differs. The script needs PostgreSQL's programs, and psycopg2 for the MLflow server.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tests.sweep.helpers import GRID, launch, newest, played, start, write_space
from tests.tracking.servers import POSTGRES, Server, mlflow_server, postgres

NAME = "outage"


def compare(folder: Path, url: str) -> tuple[dict[str, int], list[str]]:
    """Compare MLflow with the sweep's files.

    Returns:
        The numbers of compared trials, runs, metrics and points, and one text per difference.
    """
    sweep = newest(folder, NAME)
    manifest, trials = sweep.manifest(), sweep.trials()
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name(NAME)
    runs = client.search_runs([experiment.experiment_id]) if experiment else []
    parents = [run for run in runs if run.data.tags.get("fedsweep.kind") == "sweep"]
    children = [run for run in runs if run.data.tags.get("fedsweep.kind") == "trial"]
    differences = [] if len(parents) == 1 else [f"{len(parents)} parent runs instead of 1"]
    if parents and parents[0].info.status != "FINISHED":
        differences.append(f"the parent run is {parents[0].info.status}")
    counted = {"trials": len(trials), "runs": len(children), "metrics": 0, "points": 0}
    for trial in trials:
        mine = [run for run in children if run.data.tags["fedsweep.key"] == trial.plan.key]
        if len(mine) != 1 or trial.outcome is None or trial.last_round != manifest.rounds:
            differences.append(f"trial {trial.plan.key}: {len(mine)} runs, last round {trial.last_round}")
            continue
        told = mine[0].data.tags.get("fedsweep.outcome"), mine[0].data.tags.get("fedsweep.round")
        if told != (trial.outcome.outcome, str(trial.outcome.round)):
            differences.append(f"trial {trial.plan.key}: {told} in MLflow, {trial.outcome} in the results folder")
        expected: dict[str, list[tuple[int, float]]] = {}
        for record in trial.history:
            for metric, value in {**record.metrics, "seconds/round": record.seconds}.items():
                expected.setdefault(metric, []).append((record.round, value))
        for metric, points in expected.items():
            there = sorted((one.step, one.value) for one in client.get_metric_history(mine[0].info.run_id, metric))
            counted["metrics"] += 1
            counted["points"] += len(there)
            if there != points:
                differences.append(f"trial {trial.plan.key}, {metric}: {there} instead of {points}")
    differences += [f"{len(children)} runs for {len(trials)} trials"] if len(children) != len(trials) else []
    return counted, differences


def play(folder: Path, server: Server, away: float, rounds: int, say: Any = print) -> list[str]:
    """Run a sweep while the MLflow server is down for `away` seconds, and return the differences that `compare` finds.

    `say` is called with each message on the progress.
    """
    space = {
        **GRID,
        "fixed": {**GRID["fixed"], "federation.rounds": rounds},
        "resources": {"cpus_per_trial": 0.5, "gpus_per_trial": 0},
    }
    write_space(folder, NAME, space)
    process = start(folder, "tune", NAME, "--mlflow", server.url)
    try:
        while not list((folder / "mlruns").rglob("sweep.json")) or played(folder, NAME) < rounds:
            if process.poll() is not None:
                raise RuntimeError("\n".join(process.communicate()))
            threading.Event().wait(0.1)
        server.stop()
        gone = time.monotonic()
        say(f"server killed after {played(folder, NAME)} rounds of all trials")
        threading.Event().wait(away)
        say(f"{played(folder, NAME)} rounds after {away:g} s without the server")
        server.start()
        say(f"server answers again after {time.monotonic() - gone:.0f} s")
        out, err = process.communicate(timeout=1800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # Ray's processes too
    say(out.strip().splitlines()[-1] if out.strip() else err)
    if "incomplete in MLflow" in err + out:  # the sweep had stopped waiting for the server
        say("the sweep ended before the server answered; a resume completes the metrics in MLflow")
        launch(folder, "tune", NAME, "--resume")
    counted, differences = compare(folder, server.url)
    say("compared: " + ", ".join(f"{number} {name}" for name, number in counted.items()))
    if process.returncode != 0:
        differences.append(f"the sweep ended with exit code {process.returncode}: {err}")
    return differences


def main() -> int:
    """Run the check in a temporary folder, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--away", type=float, default=20, help="seconds before the server is started again")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each trial")
    given = parser.parse_args()
    if POSTGRES is None:
        print("PostgreSQL is not installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with postgres() as database, mlflow_server(folder / "mlflow", database) as server:
            (folder / "work").mkdir()
            differences = play(folder / "work", server, given.away, given.rounds)
    print("\n".join(differences) if differences else "nothing is missing, nothing is duplicated")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
