"""Compare rounds of fedsweep with a plain loop that has one model per client, and with the machine's matrix products.

    uv run python -m benchmarks.engine
    uv run python -m benchmarks.engine --cohorts 6 100 3000 --out benchmarks/results/NAME.json

The model is the embedded ViT with LoRA. Both sides train the same blocks of each client on the same number of random
images, and average the adapters. fedsweep also computes the costs of the round and the residual of LoRA. Cohorts larger
than 100 clients share 100 models in the plain loop, because of the memory. The two sides are timed in turn, as CPU
seconds with one thread. The overhead is the difference per client and round.

The second table compares the arithmetic of local training and of evaluation, in GFLOP per CPU second, with matrix
products of the same shapes that are timed alone.
"""

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.methods.capabilities import predicted
from fedsweep.methods.fedra import FedRA
from fedsweep.models import DigitsViT, LoraConfig, build_model
from fedsweep.models.base import Reader
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean, lora_residual
from fedsweep.training.base_optimizers import FedAvg
from fedsweep.training.costs import round_costs
from fedsweep.training.evaluation import evaluate
from fedsweep.training.local_training import CohortTrainer, LocalConfig, LocalTask, cross_entropy
from fedsweep.training.optimizers import SGDConfig
from fedsweep.types import Client, Domain, ImageSet, LayerAllocation, ServerState

from .recorded import write

SGD, COPIES, CLASSES, BLOCKS = SGDConfig(lr=0.01), 100, 10, 12
COHORTS, ROUNDS, BATCHES, DEPTHS = (6, 10, 100, 300, 1000), (1, 10, 100), (8, 32, 128), (1, 3, 6, 12)
SMALL = 8  # images of a client where the overhead matters
aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """A cohort whose clients train `depth` blocks for one step on `batch` images, for some rounds."""

    cohort: int
    depth: int
    batch: int = SMALL
    rounds: int = 1


def images(count: int) -> ImageSet:
    """Return random images with random labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.randint(CLASSES, (count,), generator=generator))


class Bench:
    """A model with its server state, trained by fedsweep and by the plain loop."""

    def __init__(self) -> None:
        lora = LoraConfig(rank=8, scaling=1.0, position="both", dropout=0.0)
        self.model = build_model(DigitsViT(), lora, CLASSES, 0)
        self.start, self.config = self.model.adapter(), AggregationConfig()
        self.copies: list[tuple[LayeredModel, dict[str, nn.Parameter]]] = []

    def ours(self, work: Work) -> None:
        """Run the rounds with fedsweep."""
        row, data, state = LayerAllocation.of(range(work.depth)), images(work.batch), self.start
        clients = [Client(f"{n:04}", "noise", data, BLOCKS) for n in range(work.cohort)]
        local, reader = LocalConfig(batch_size=work.batch, steps=1), Reader(self.model, "benchmark")
        trainer = CohortTrainer(self.model, SGD, FedAvg(), local, 0, work.rounds, work.batch, reader)
        rows = {one.id: row for one in clients}
        for number in range(work.rounds):
            tasks = [LocalTask(one, state, row, cross_entropy) for one in clients]
            updates = trainer.at(number + 1).fit(tasks)
            received = [{name: state[name] for name in updates[0].adapter} for _ in rows]
            round_costs(self.model, rows, received, updates)
            mean = layerwise_mean(state, updates, self.config)
            lora_residual(state, updates, self.config, mean)
            state = mean

    def plain(self, work: Work) -> None:
        """Run the rounds in a plain loop with one model per client and torch's own optimizer."""
        data, state, walk = images(work.batch), self.start, range(work.depth)
        pixels, labels = data.take(torch.arange(work.batch))
        names = names_within(state, walk)
        for _ in range(work.rounds):
            total: dict[str, Tensor] = {}
            for number in range(work.cohort):
                model, named = self.copies[number % len(self.copies)]
                with torch.no_grad():
                    torch._foreach_copy_([*named.values()], [state[name] for name in named])
                trained = {name: named[name] for name in names}
                optimizer = torch.optim.SGD(trained.values(), SGD.lr, SGD.momentum, weight_decay=SGD.weight_decay)
                loss = F.cross_entropy(model(pixels[torch.randperm(work.batch)], walk), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(trained.values(), SGD.clip_norm or 0.0)
                optimizer.step()
                loss.item()
                for name, tensor in trained.items():
                    part = tensor.detach() / work.cohort
                    total[name] = total[name] + part if name in total else part
            state = {**state, **total}

    def compare(self, work: Work, turns: int) -> dict[str, Any]:
        """Time both sides in turn, and return the milliseconds per client and round."""
        missing = min(work.cohort, COPIES) - len(self.copies)
        models = [copy.deepcopy(self.model).train() for _ in range(missing)]
        self.copies += [(model, model.trainable()) for model in models]
        sides: dict[str, Callable[[Work], None]] = {"fedsweep": self.ours, "plain": self.plain}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(turns + 1):
            for name, side in sides.items():
                begun = time.process_time()
                side(work)
                if turn:  # the first turn is left out
                    found[name].append(1000 * (time.process_time() - begun) / work.cohort / work.rounds)
        medians = {name: statistics.median(values) for name, values in found.items()}
        apart = [one - other for one, other in zip(*found.values(), strict=True)]
        return {
            **vars(work),
            **{f"ms_{name}": round(value, 3) for name, value in medians.items()},
            "ms_overhead": round(statistics.median(apart), 3),
            "ratio": round(medians["fedsweep"] / medians["plain"], 3),
        }

    def train(self, batch: int) -> None:
        """Train all blocks for one step."""
        self.ours(Work(1, BLOCKS, batch))

    def test(self, batch: int) -> None:
        """Evaluate the model on one batch."""
        data, reader = images(batch), Reader(self.model, "benchmark", batch_size=batch)
        state = ServerState(self.start, tuple(range(BLOCKS)))
        evaluate(partial(predicted, FedRA(), state, reader), [Domain("noise", data, data)])


class Products(TorchDispatchMode):
    """A context that counts the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count its shapes if it is a matrix product."""
        place = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1}.get(func.overloadpacket)
        if place is not None:
            self.shapes[args[place].shape, args[place + 1].shape] += 1
        return func(*args, **(kwargs or {}))


def speed(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return GFLOP per CPU second of `work`, and of its matrix products alone."""
    with FlopCounterMode(display=False) as counter:
        work()
    with Products() as products:
        work()
    alone = flops = 0.0
    for (left, right), count in products.shapes.items():
        one, other = torch.randn(left), torch.randn(right)
        alone += count * _seconds(lambda one=one, other=other: one @ other, repeats)
        flops += count * 2.0 * left.numel() * right[-1]
    reached, peak = counter.get_total_flops() / _seconds(work, repeats), flops / alone
    return {
        "gflops": round(reached / 1e9, 1),
        "gflops_products": round(peak / 1e9, 1),
        "share": round(reached / peak, 3),
    }


def _seconds(work: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return statistics.median(found[1:])


def works(cohorts: Sequence[int], rounds: Sequence[int]) -> list[Work]:
    """Return the work to compare: all cohorts with one and all blocks, then other rounds, batches and depths."""
    by_cohort = [Work(cohort, depth) for depth in (1, BLOCKS) for cohort in cohorts]
    by_round = [Work(6, 1, rounds=count) for count in rounds]
    by_batch = [Work(6, BLOCKS, batch) for batch in BATCHES]
    return list(dict.fromkeys([*by_cohort, *by_round, *by_batch, *(Work(6, depth) for depth in DEPTHS)]))


def tables(rows: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the tables of the comparison and of the arithmetic."""
    heads = ("clients", "blocks", "images", "rounds", "fedsweep, ms", "plain loop, ms", "overhead, ms", "ratio")
    first = Table(*heads, title="CPU time per client and round")
    for row in rows:
        first.add_row(*map(str, row.values()))
    second = Table("phase", "batch", "GFLOP/s", "products alone", "share", title="Arithmetic of one thread")
    for row in speeds:
        second.add_row(*map(str, row.values()))
    return [first, second]


def main() -> None:
    """Compare, print the tables and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", type=int, nargs="*", default=COHORTS)
    parser.add_argument("--rounds", type=int, nargs="*", default=ROUNDS)
    parser.add_argument("--turns", type=int, default=5, help="number of timed turns; a third for 100 clients or more")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench, rows, speeds = Bench(), [], []
    for work in track(works(given.cohorts, given.rounds), "rounds"):
        many = work.cohort * work.rounds >= 100
        rows.append(bench.compare(work, max(1, given.turns // 3) if many else given.turns))
    for phase, run, batches in (("training", bench.train, BATCHES), ("evaluation", bench.test, (*BATCHES, 256))):
        speeds += [{"phase": phase, "batch": size} | speed(partial(run, size), given.turns) for size in batches]
    for table in tables(rows, speeds):
        Console(width=120).print(table)
    write(given.out, ("torch", "timm", "peft"), rounds=rows, arithmetic=speeds)


if __name__ == "__main__":
    main()
