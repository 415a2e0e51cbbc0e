"""Measure what common initial factors bring to a comparison of two LoRA ranks.

    python -m benchmarks.common_factors [--seeds 8] [--rounds 6] [--ranks 4 8] [--to FILE]

In fedsweep, the initial factor A of the smaller rank consists of the first rows of that of the larger rank. For each
seed, the script trains each rank from two sets of factors, its own and those of another seed, with the same blocks and
batches. Two ranks with the same set have common factors, and two ranks with different sets have independent factors.
The script prints the standard deviation of the paired difference over the seeds for both, and the 95% interval of the
ratio of the two variances, which is the ratio of the necessary numbers of seeds (bootstrap over the seeds).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsweep.report.text_tables import markdown_table

Array = np.ndarray
HEAD = ("score", "sd, common factors", "sd, independent factors", "ratio of the variances", "95% interval")
OTHER = 1000
"""The distance from a seed to the seed of its second set of factors."""
SCORES: Mapping[str, tuple[str, int, float]] = {
    "accuracy, last round (points)": ("accuracy/mean", 1, 100),
    "accuracy, last four rounds (points)": ("accuracy/mean", 4, 100),
    "loss, last round": ("loss/test", 1, 1),
    "loss, last four rounds": ("loss/test", 4, 1),
}
"""For each score, its metric, the number of last rounds over which it is averaged, and its unit."""


def main() -> None:
    """Run all combinations, print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs=2, default=(4, 8))
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    found = np.empty((len(SCORES), given.seeds, 2, 2))  # score, seed, rank, set of factors
    for seed in range(given.seeds):
        for place, rank in enumerate(given.ranks):
            for which in range(2):
                found[:, seed, place, which] = scores_of(rank, seed, seed + which * OTHER, given.rounds)
        print(f"{seed + 1} of {given.seeds} seeds", file=sys.stderr, end="\r")
    table = markdown_table(HEAD, list(rows(found)), [place == 0 for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def scores_of(rank: int, seed: int, factors: int, rounds: int) -> list[float]:
    """Return the `SCORES` of a run of `fedra_digits` that starts from the initial factors of the seed `factors`."""
    import torch

    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import read_yaml
    from fedsweep.federation.build_and_run import build
    from fedsweep.federation.rounds import federate
    from fedsweep.federation.run_config import RunConfig

    torch.set_num_threads(1)
    experiment = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "experiment fedra_digits")
    changes = {"lora.rank": rank, "federation.rounds": rounds, "federation.evaluate_every": 1}
    config = experiment.override({**changes, "evaluation.images_per_domain": None}, "benchmark")
    other = build(config.override({"seed": factors}, "benchmark")).fresh
    results = list(federate(replace(build(config.override({"seed": seed}, "benchmark")), fresh=other)))
    return [
        unit * float(np.mean([one.metrics[metric] for one in results[-count:]]))
        for metric, count, unit in SCORES.values()
    ]


def rows(found: Array) -> Iterator[list[str]]:
    """Yield a table row for each score; `found` has an axis each for scores, seeds, ranks and sets of factors."""
    rng = np.random.default_rng(0)
    for name, values in zip(SCORES, found, strict=True):
        drawn = rng.integers(len(values), size=(2000, len(values)))
        ratios = [ratio(values[rows]) for rows in drawn if len({*rows.tolist()}) > 1]
        low, high = np.quantile(ratios, [0.025, 0.975])
        common, independent = np.sqrt(variances(values))
        digits = 2 if "accuracy" in name else 4
        spreads = [f"{spread:.{digits}f}" for spread in (common, independent)]
        yield [name, *spreads, f"{ratio(values):.2f}", f"{low:.2f} to {high:.2f}"]


def variances(values: Array) -> tuple[float, float]:
    """Return the variances of the paired difference over the seeds, with common and with independent factors.

    Each is the mean of two variances, one for each way to choose the sets. `values` has an axis each for seeds, ranks
    and sets of factors.
    """

    def mean(pairs: Callable[[int], int]) -> float:
        return float(np.mean([np.var(values[:, 0, one] - values[:, 1, pairs(one)], ddof=1) for one in range(2)]))

    return mean(lambda one: one), mean(lambda one: 1 - one)


def ratio(values: Array) -> float:
    """Return the variance with independent factors, divided by that with common factors."""
    common, independent = variances(values)
    return independent / common


if __name__ == "__main__":
    main()
