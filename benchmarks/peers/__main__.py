"""Measure the time that pfl-research, fluke and Flower's simulation add to a bare loop over clients.

    uv run python -m benchmarks.peers --cache DIR
    uv run python -m benchmarks.peers --cache DIR --only pfl-research --out benchmarks/results/NAME.json

Each simulator trains a linear model of ten clients with SGD, without evaluation. It runs in a virtual environment of
its own, which this script creates in the folder DIR with `uv` and reuses later. The bare loop does the same work in the
same process: it copies the server's parameters into one model, trains each client and adds up the results. Both are
timed in turn, with one thread for torch. The start of a simulator does not count. Times are CPU seconds, except that
Flower's are seconds of the clock, because Flower trains the clients in other processes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.recorded import write

SIMULATORS = {
    "pfl-research": ("pfl_research.py", ("pfl[pytorch]==0.6.0",)),
    "fluke": ("fluke_fl.py", ("fluke-fl==0.8.1",)),
    "Flower": ("flower.py", ("flwr[simulation]==1.42.0", "torch")),
}
"""For each simulator, its script and the packages of its environment."""
HERE = Path(__file__).parent


def environment(cache: Path, script: str, packages: tuple[str, ...]) -> Path:
    """Create a virtual environment with these packages unless it exists, and return the path of its Python."""
    folder = cache / Path(script).stem
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", "3.11", folder], check=True)
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *packages], check=True)
        (folder / "complete").write_text(" ".join(packages))
    return python


def measure(python: Path, script: str, rounds: int) -> dict[str, Any]:
    """Run a simulator's script, and return its times in milliseconds per client and round."""
    settings = {**os.environ, "PEERS_ROUNDS": str(rounds), "OMP_NUM_THREADS": "1"}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run([python, HERE / script], env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "overhead": found["simulator"] - found["bare"]}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Return a table of the times."""
    made = Table("simulator", "version", "total", "bare loop", "overhead", title="Milliseconds per client and round")
    for name, row in rows.items():
        made.add_row(name, row["version"], *(f"{row[key]:.2f}" for key in ("simulator", "bare", "overhead")))
    return made


def main() -> int:
    """Create the environments, measure, print a table and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the virtual environments")
    parser.add_argument("--only", nargs="*", choices=[*SIMULATORS], default=[*SIMULATORS])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = {}
    for name in given.only:
        script, packages = SIMULATORS[name]
        rows[name] = measure(environment(given.cache.resolve(), script, packages), script, given.rounds)
    Console().print(table(rows))
    write(given.out, ("torch",), rounds=given.rounds, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
