"""Count the work of the hot path: operators of torch, their bytes and arithmetic, and calls in fedsweep's own code.

    uv run python -m benchmarks.counted
    uv run python -m benchmarks.counted --write

The counts depend neither on the machine nor on its load. `tests/benchmarks/test_counted.py` compares them with the
counts in `benchmarks/results/counted.json` and fails if a count has changed by more than a tenth. After a deliberate
change, `--write` records the new counts.

All models are the embedded ViT with LoRA. A count of one step, batch or client is the difference between two runs that
differ in only this number. A group is a number of clients that train together; the count includes the preparation of
the client's session and its update.

- operators: operators that torch dispatches, in the forward pass, the backward pass and the optimizer
- megabytes: the size of all tensors that these operators allocate
- megaflop: floating-point operations of matrix products and attention
- calls: functions that fedsweep's own code calls
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fedsweep
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import predicted
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.training.aggregation import lora_residual
from fedsweep.training.costs import round_costs
from fedsweep.training.evaluation import evaluate
from fedsweep.training.local_training import LocalTask, cross_entropy
from fedsweep.types import ClientUpdate, Domain, LayerAllocation

from .recorded import provenance

RESULTS = Path(__file__).parent / "results" / "counted.json"
OURS = str(Path(fedsweep.__file__).parent)
ROW = LayerAllocation.of((0, 2, 3, 7, 8, 11))
"""The blocks that each client trains. The first block is among them, so no block is frozen."""
BATCH, TESTED, COHORTS = 32, 64, (10, 40)
Counts = dict[str, float]
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Functions that exist only before Python 3.12."""


class Operators(TorchDispatchMode):
    """A context that counts the dispatched operators and the bytes of the tensors that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        self.count += 1
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in known:
                self.bytes += one.nbytes
        return out


def calls(work: Callable[[], object]) -> int:
    """Return the number of functions that fedsweep's own code calls during `work`."""
    found = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal found
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller and caller.f_code.co_filename.startswith(OURS):
            found += frame.f_code.co_name not in COMPREHENSIONS or event == "c_call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def counted(work: Callable[[], object]) -> Counts:
    """Return the counts of `work`, which is first run once without counting."""
    work()
    gc.collect()
    gc.disable()  # a collection could run functions of other objects
    try:
        own = calls(work)
        with FlopCounterMode(display=False) as flops, Operators() as operators:
            work()
    finally:
        gc.enable()
    arithmetic = flops.get_total_flops() / 1e6
    return {"operators": operators.count, "megabytes": operators.bytes / 1e6, "megaflop": arithmetic, "calls": own}


def between(work: Callable[[int], object], fewer: int, more: int) -> Counts:
    """Return the counts of one unit of `work`, whose argument is the number of units."""
    first, second = counted(lambda: work(fewer)), counted(lambda: work(more))
    return {name: (second[name] - first[name]) / (more - fewer) for name in first}


def digits() -> Federation:
    """Build the experiment `fedra_digits` without an activation cache."""
    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "fedra_digits")
    federation = build(config.override({"local.batch_size": BATCH}, "the benchmark"))
    reader = replace(federation.trainer.reader, kept=FrozenRows(), batch_size=TESTED)
    return replace(federation, trainer=replace(federation.trainer, reader=reader))


def fit(federation: Federation, clients: int, steps: int) -> list[ClientUpdate]:
    """Train clients, each for a number of steps, and return their updates."""
    local = federation.trainer.local.model_copy(update={"steps": steps})
    one, start = federation.clients[0], federation.fresh
    tasks = [LocalTask(replace(one, id=f"{n:02}"), start, ROW, cross_entropy) for n in range(clients)]
    return replace(federation.trainer, local=local).fit(tasks)


def score(federation: Federation, batches: int) -> None:
    """Evaluate the global model on batches of test images."""
    state, train = federation.initial_state(), federation.domains[0].train
    images = train.select(torch.arange(batches * federation.trainer.reader.batch_size) % len(train))
    reader, method = federation.trainer.reader, federation.method
    evaluate(lambda given, domain: predicted(method, state, reader, given), [Domain("one", images, images)])


def serve(federation: Federation, updates: list[ClientUpdate]) -> None:
    """Aggregate updates, and compute the metrics of a round that depend on them."""
    state, server = federation.initial_state(), federation.server
    rows = {one.client: ROW for one in updates}
    received = [{name: state.adapter[name] for name in updates[0].adapter} for _ in rows]
    round_costs(federation.model, rows, received, updates)
    aggregate = federation.method.aggregate(state, updates, server)
    lora_residual(state.adapter, updates, server.aggregation, aggregate.adapter)


def measure() -> dict[str, Counts]:
    """Return the counts of each part of the hot path."""
    torch.set_num_threads(1)
    federation = digits()
    step = between(lambda steps: fit(federation, 1, steps), 1, 2)
    client = between(lambda clients: fit(federation, clients, 1), 2, 4)
    found = {
        "a step of local training": step,
        "a client of a group, one step": client,
        "a batch of evaluation": between(lambda batches: score(federation, batches), 1, 2),
    }
    update = fit(federation, 1, 1)[0]
    for cohort in COHORTS:
        updates = [replace(update, client=f"{n:03}") for n in range(cohort)]
        whole = counted(lambda given=updates: serve(federation, given))
        found[f"the server, per client of {cohort}"] = {name: value / cohort for name, value in whole.items()}
    return found


def table(found: dict[str, Counts], known: dict[str, Counts]) -> Table:
    """Return a table of the counts, each with its ratio to the recorded count."""
    made = Table("part", *next(iter(found.values())), title="Counts, and their ratios to the recorded counts")
    for part, counts in found.items():
        old = known.get(part, {})
        cells = [
            f"{value:,.4g}" + (f" ({value / old[name]:.3f})" if old.get(name) else "") for name, value in counts.items()
        ]
        made.add_row(part, *cells)
    return made


def main() -> None:
    """Count, print a table and, with `--write`, record the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the counts in benchmarks/results/counted.json")
    given = parser.parse_args()
    found = measure()
    known = json.loads(RESULTS.read_text())["counts"] if RESULTS.exists() else {}
    Console(width=140).print(table(found, known))
    if given.write:
        rounded = {part: {name: round(value, 4) for name, value in counts.items()} for part, counts in found.items()}
        content = {**provenance("torch", "timm", "peft"), "counts": rounded}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
