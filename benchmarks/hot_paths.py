"""Profile the two hottest paths of a trial, local training and evaluation, by kind of operation.

    uv run python -m benchmarks.hot_paths
    uv run python -m benchmarks.hot_paths --label now --out benchmarks/results/NAME.json

The last round of the experiment `fedra_digits` is profiled. The table shows the CPU seconds of each kind of operation,
with one thread, and the number of operations. With `--out`, the column is added to the columns that the file already
contains. To compare with other code, run this file in the folder OLD of that code first:

    (cd OLD && PYTHONPATH=. python NEW/benchmarks/hot_paths.py --label before --out NEW/benchmarks/results/NAME.json)
"""

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.training.local_training import CohortTrainer

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "convolution", "conv2d"),
    "attention": ("scaled_dot_product",),
    "norms and activations": ("layer_norm", "gelu", "softmax"),
    "dropout": ("dropout", "bernoulli"),
    "optimizer": ("foreach",),
}
"""The parts of the names of operators by which an operator belongs to a kind. All others are `other operators`."""
PHASES: dict[str, tuple[type, str]] = {"training": (CohortTrainer, "fit"), "evaluation": (Federation, "evaluate")}


def kind_of(operator: str) -> str:
    """Return the kind of an operator, given a name such as `aten::addmm`."""
    name = operator.removeprefix("aten::").strip("_")
    for kind, parts in KINDS.items():
        if any(name.startswith(part) or f"_{part}" in name for part in parts):
            return kind
    return "other operators"


class Profiled:
    """The CPU seconds and the number of operations of each kind, in each phase of the last round."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.operations: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Profile the block, and replace the results of an earlier block of the same phase."""
        with profile(activities=[ProfilerActivity.CPU]) as found:
            yield
        seconds: dict[str, float] = defaultdict(float)
        operations: dict[str, int] = defaultdict(int)
        for event in found.key_averages():
            if event.key.startswith("aten::"):
                seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
                operations[kind_of(event.key)] += event.count
        self.seconds[name], self.operations[name] = dict(seconds), dict(operations)

    def wrapping(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a profile of each call."""

        def profiled(*given: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*given, **named)

        return profiled


def measure() -> Profiled:
    """Run two rounds, and return the profile of the second one."""
    torch.set_num_threads(1)
    os.environ["FEDSWEEP_CACHE_GB"] = "0"
    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "fedra_digits")
    found = Profiled()
    for name, (owner, method) in PHASES.items():
        setattr(owner, method, found.wrapping(name, getattr(owner, method)))
    for _ in federate(build(config.override({"federation.rounds": 2, "seed": 0}, "benchmark"))):
        pass
    return found


def table(columns: dict[str, Any]) -> Table:
    """Return a table with two columns, of seconds and of operations, for each profiled program."""
    made = Table("phase", "kind")
    for label in columns:
        made.add_column(f"{label}, CPU s", justify="right")
        made.add_column("operations", justify="right")
    for phase in PHASES:
        for kind in (*KINDS, "other operators"):
            cells = [
                (column["seconds"][phase].get(kind, 0.0), column["operations"][phase].get(kind, 0))
                for column in columns.values()
            ]
            made.add_row(phase, kind, *(cell for s, n in cells for cell in (f"{s:.3f}", f"{n:,}")))
    return made


def main() -> None:
    """Profile the round, print a table and, with `--out`, add the profile to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="name of the profiled code in the table")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure()
    facts: dict[str, Any] = {"date": date.today().isoformat(), "machine": f"{os.cpu_count()} x {platform.machine()}"}
    facts |= {"load": round(os.getloadavg()[0], 1), "versions": {"torch": version("torch")}}
    known = json.loads(given.out.read_text())["columns"] if given.out and given.out.exists() else {}
    columns = {**known, given.label: {**facts, "seconds": found.seconds, "operations": found.operations}}
    Console(width=120).print(table(columns))
    if given.out:
        given.out.write_text(json.dumps({**facts, "columns": columns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
