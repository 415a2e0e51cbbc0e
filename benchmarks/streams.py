"""Measure which random streams of a seed move the difference between two arms most.

    python -m benchmarks.streams [--levels 3] [--rounds 6] [--ranks 8 1 4 16] [--processes 2] [--to FILE]

The experiment is `fedra_digits`, in which the data and the cohorts are the same for all seeds. A seed then determines
three streams: the blocks that each client trains (`allocation`), the order of its images (`batches`), and the initial
adapters (`adapter`). Each combination of `--levels` seeds for each stream is one run of each arm. For the accuracy of
an arm, and for its difference from the baseline (the first rank), the table contains the share of each stream in the
variance. The components of the variance are those of the model with crossed random effects; negative estimates count
as 0.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from fedsweep.common import randomness
from fedsweep.report.text_tables import markdown_table

Array = np.ndarray
Key = tuple[int, ...]
STREAMS = ("allocation", "batches", "adapter")
RANKS = (8, 1, 4, 16)
HEAD = ("score", "sd", *STREAMS, "allocation x batches", "allocation x adapter", "batches x adapter", "all three")


def main() -> None:
    """Run all combinations, print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the arms; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    each = list(product(range(given.levels), repeat=len(STREAMS)))
    jobs = [(rank, seeds, given.rounds) for seeds in each for rank in given.ranks]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        found = {}
        for (rank, seeds, _), accuracy in zip(jobs, pool.map(accuracy_of, jobs), strict=True):
            found[rank, seeds] = accuracy
            print(f"{len(found)} of {len(jobs)} runs", file=sys.stderr, end="\r")
    shape = (given.levels,) * len(STREAMS)
    cells = {rank: np.reshape([found[rank, seeds] for seeds in each], shape) for rank in given.ranks}
    table = markdown_table(HEAD, list(rows(cells)), [place == 0 for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def accuracy_of(job: tuple[int, tuple[int, int, int], int]) -> float:
    """Run the experiment with a rank, a seed for each stream and a number of rounds.

    Return the accuracy in percent, averaged over the last two thirds of the rounds.
    """
    import torch

    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import read_yaml
    from fedsweep.federation.build_and_run import run
    from fedsweep.federation.run_config import RunConfig

    rank, seeds, rounds = job
    torch.set_num_threads(1)
    experiment = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "experiment fedra_digits")
    changes = {"lora.rank": rank, "federation.rounds": rounds, "federation.evaluate_every": 1}
    with_seeds(dict(zip(STREAMS, seeds, strict=True)))
    results = list(run(experiment.override(changes, "benchmark")))
    return 100 * float(np.mean([one.metrics["accuracy/mean"] for one in results[-max(2 * rounds // 3, 1) :]]))


def with_seeds(seeds: dict[str, int]) -> None:
    """Let the streams of the given purposes use these seeds instead of the seed of the run."""
    original = getattr(randomness.derived_seed, "original", randomness.derived_seed)

    def derived(seed: int, purpose: str, *key: int | str) -> int:
        return int(original(seeds.get(purpose, seed), purpose, *key))

    derived.original = original  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if module.__name__.startswith("fedsweep") and hasattr(module, "derived_seed"):
            module.derived_seed = derived  # type: ignore[attr-defined]


def rows(cells: dict[int, Array]) -> Iterator[list[str]]:
    """Yield a table row for the accuracy of each arm and for its difference from the baseline.

    `cells` contains for each rank an array of accuracies with one axis per stream.
    """
    scores = {f"accuracy of rank {rank}": own for rank, own in cells.items()}
    baseline, *others = cells
    scores |= {f"rank {rank} against {baseline}": cells[rank] - cells[baseline] for rank in others}
    for name, values in scores.items():
        found = components(values)
        total = sum(found.values()) or math.nan
        yield [name, f"{math.sqrt(total):.2f}", *(f"{100 * one / total:.0f}%" for one in found.values())]


def components(values: Array) -> dict[Key, float]:
    """Return the components of the variance in a crossed design without replicates.

    The keys are the axes of each effect: single axes, pairs, and so on.
    """
    axes, levels = range(values.ndim), values.shape[0]
    effects = [one for size in range(1, values.ndim + 1) for one in combinations(axes, size)]
    found: dict[Key, float] = {}
    for effect in reversed(effects):
        inner = values
        for axis in axes:
            mean = inner.mean(axis, keepdims=True)
            inner = inner - mean if axis in effect else mean
        times = levels ** (values.ndim - len(effect))
        square = times * float((inner**2).sum()) / (levels - 1) ** len(effect)
        above = sum(levels ** (values.ndim - len(one)) * part for one, part in found.items() if set(effect) < set(one))
        found[effect] = max(0.0, (square - above) / times)
    return {effect: found[effect] for effect in effects}


if __name__ == "__main__":
    main()
