"""Compare a sweep on a Ray cluster that loses one of its three nodes with the same sweep on one machine.

    python -m benchmarks.faults.node_lost
    python -m benchmarks.faults.node_lost --rounds 20 --load 4 --out benchmarks/results/NAME.json

All nodes are Ray processes on this machine, with one core each. One node is killed with all its workers as soon as the
trials have written a given number of rounds to disk. Both sweeps are started from the command line. With `--load`,
other processes keep the cores busy while the sweep runs on the cluster. The script fails if the tables or the histories
of the two sweeps differ.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.sweep.clusters import busy_node, ray_cluster
from tests.sweep.helpers import GRID, SMALL, histories, launch, newest, start, table, wait_for_rounds, write_space

NAME = "node_lost"


@contextlib.contextmanager
def cpu_load(processes: int) -> Iterator[None]:
    """Run processes that each keep one core busy during the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def lose_a_node(folder: Path, after: int, load: int) -> None:
    """Run the sweep on three nodes, and kill a busy node once the trials have written `after` rounds in all.

    While the sweep runs, `load` other processes keep cores busy.

    Raises:
        SystemExit: The sweep failed.
    """
    with ray_cluster(3) as cluster, cpu_load(load):
        process = start(folder, "tune", NAME, "--address", cluster.address)
        wait_for_rounds(folder, NAME, after, process)
        cluster.remove_node(busy_node(cluster), allow_graceful=False)
        out, error = process.communicate()
        if process.returncode:
            raise SystemExit(out + error)


def main() -> None:
    """Run both sweeps, and compare their histories and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--kill-after",
        type=int,
        default=3,
        help="number of rounds on disk, over all trials, after which the node is killed",
    )
    parser.add_argument("--load", type=int, default=0, help="number of other processes that keep a core busy")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster of this script exists for minutes only
    # Workers get the priority of the other processes. Ray's default, a niceness of 15, would leave them 2 % of a core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    console, seconds = Console(), {}
    with tempfile.TemporaryDirectory() as root:
        one, lost = Path(root) / "one machine", Path(root) / "node lost"
        for folder in (one, lost):
            write_space(folder, NAME, {**GRID, "fixed": {**SMALL, "federation.rounds": given.rounds}})
            begun = time.monotonic()
            launch(one, "tune", NAME) if folder == one else lose_a_node(lost, given.kill_after, given.load)
            seconds[folder.name] = time.monotonic() - begun
        expected, found = (histories(newest(folder, NAME)) for folder in (one, lost))
        same_table = table(one, NAME) == table(lost, NAME)
    equal = {trial: found.get(trial) == record for trial, record in expected.items()}
    shown = Table("trial", "outcome", "rounds", "bit-identical")
    for trial, (outcome, history) in expected.items():
        shown.add_row(trial, str(outcome and outcome[0]), str(len(history) - 1), "yes" if equal[trial] else "NO")
    console.print(shown)
    console.print(f"table.csv is {'the same' if same_table else 'NOT the same'}.")
    console.print(", ".join(f"{name}: {value:.0f} s" for name, value in seconds.items()))
    if given.out:
        report = {"equal": equal, "same_table": same_table, "seconds": seconds}
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    if not same_table or not all(equal.values()) or expected.keys() != found.keys():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
