"""A sweep on a Ray cluster of three nodes on this machine, one killed in the middle, against the same sweep on one.

    uv run python benchmarks/faults/node_lost.py
    uv run python benchmarks/faults/node_lost.py --rounds 20 --out benchmarks/results/NAME.json

Every node is a raylet with one core; a node is killed with all its workers as soon as the trials have the given number
of rounds on disk. Both sweeps run through the command line. The script fails when a table or a history differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from fedsweep.store import Store, SweepStore

SPACE = "node_lost"


def space(rounds: int) -> dict[str, Any]:
    """Four trials: two ranks, two seeds."""
    return {
        "experiment": "fedra_digits",
        "fixed": {
            "federation.rounds": rounds,
            "federation.depths": [12, 3],
            "data.domains": ["plain", "rotated"],
            "local.steps": 1,
            "local.batch_size": 8,
        },
        "space": {"lora.rank": {"grid": [1, 4]}},
        "seeds": [0, 1],
        "baseline": {"lora.rank": 4},
        "objective": {"metric": "accuracy/mean", "mode": "max"},
        "search": {"name": "grid"},
        "scheduler": {"name": "none"},
        "resources": {"cpus_per_trial": 1, "gpus_per_trial": 0},
    }


@contextmanager
def nodes(count: int) -> Iterator[Cluster]:
    """A head without cores, and nodes of one core."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The sweep of the folder, through the command line."""
    command = [sys.executable, "-m", "fedsweep.cli", "tune", SPACE, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end, which must be a good one."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(out)


def newest(folder: Path) -> SweepStore:
    """The sweep of the folder."""
    return Store(folder / "mlruns").find(SPACE)


def rounds_done(folder: Path) -> int:
    """Rounds on disk, over all trials."""
    if not list((folder / "mlruns").rglob("sweep.json")):
        return 0
    return sum(max(trial.last_round, 0) for trial in newest(folder).trials())


def kill_a_busy_node(cluster: Cluster) -> bool:
    """Kill a node on which a trial is running; False where none is."""
    actors = cluster.global_state.actor_table(None, actor_state_name="ALIVE").values()
    busy = {actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] != "Library"}
    for node in list(cluster.worker_nodes):
        if node.node_id in busy:
            cluster.remove_node(node, allow_graceful=False)
            return True
    return False


def record(folder: Path) -> dict[str, Any]:
    """All that must not differ, by trial."""
    return {
        f"{trial.plan.label}, seed {trial.plan.seed}": (
            trial.outcome and trial.outcome.model_dump(),
            [[one.round, dict(one.metrics)] for one in trial.history],
        )
        for trial in newest(folder).trials()
    }


def main() -> None:
    """Run both sweeps and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kill-after", type=int, default=3, help="rounds on disk, over all trials")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster of this script lives for minutes
    console = Console()
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root) / name for name in ("one machine", "node lost")}
        seconds = {}
        for folder in folders.values():
            (folder / "search_spaces").mkdir(parents=True)
            (folder / "search_spaces" / f"{SPACE}.yaml").write_text(yaml.safe_dump(space(given.rounds)))
        begun = time.monotonic()
        finish(start(folders["one machine"]))
        seconds["one machine"] = time.monotonic() - begun
        with nodes(3) as cluster:
            begun = time.monotonic()
            process = start(folders["node lost"], "--address", cluster.address)
            killed = False
            while process.poll() is None:
                if not killed and rounds_done(folders["node lost"]) >= given.kill_after:
                    killed = kill_a_busy_node(cluster)
                time.sleep(0.05)
            finish(process)
            seconds["node lost"] = time.monotonic() - begun
        if not killed:
            raise SystemExit("no node was killed: the sweep was over before; give it more --rounds")
        both = {name: record(folder) for name, folder in folders.items()}
        tables = {name: (newest(one).folder / "report" / "table.csv").read_text() for name, one in folders.items()}
    shown = Table("trial", "outcome", "rounds", "equal to the last bit")
    equal = {}
    for trial, (outcome, history) in both["one machine"].items():
        equal[trial] = both["node lost"].get(trial) == (outcome, history)
        shown.add_row(trial, outcome["outcome"], str(len(history) - 1), "yes" if equal[trial] else "NO")
    console.print(shown)
    same_table = tables["one machine"] == tables["node lost"]
    console.print(f"table.csv is {'the same' if same_table else 'NOT the same'}.")
    console.print(", ".join(f"{name}: {value:.0f} s" for name, value in seconds.items()))
    if given.out:
        given.out.write_text(
            json.dumps({"equal": equal, "same_table": same_table, "seconds": seconds}, indent=2) + "\n"
        )
    if not same_table or not all(equal.values()) or both["one machine"].keys() != both["node lost"].keys():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
