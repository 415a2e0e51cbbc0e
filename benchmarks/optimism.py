"""Measure how optimistic the reported value of a search is if it chooses by test images or by validation images.

    python -m benchmarks.optimism [--searches 10] [--samples 12] [--rounds 6] [--seeds 3] [--processes 2] [--to FILE]

Each search draws `--samples` configurations of `tuning/fedra` at random, with a search seed of its own, and trains each
once. The best configuration is chosen twice: by its accuracy on the test images, and by its accuracy on the validation
images. In both cases, the accuracy of this one trial on the test images is reported. The chosen configurations are then
trained with fresh seeds. The optimism is the reported value minus the mean over the fresh seeds on the test images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsweep.common.errors import DivergenceError
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.text_tables import markdown_table
from fedsweep.results.arms import Arm, identity
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.search.proposals import Proposals
from fedsweep.sweep.space.settings import RandomSearch

SPACE = "tuning/fedra"
CHOSEN_BY = ("test", "validation")
HEAD = ("chosen by", "reported on test %", "fresh seeds on test %", "optimism, points", "95% interval")


class Job(NamedTuple):
    """One run: a configuration of the search space, a seed and a number of rounds."""

    arm: Arm
    seed: int
    rounds: int


def main() -> None:
    """Run the searches, print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("searches", 10), ("samples", 12), ("rounds", 6), ("seeds", 3), ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    searches = [drawn(seed, given.samples) for seed in range(given.searches)]
    jobs = [Job(arm, 0, given.rounds) for arms in searches for arm in arms]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        found = in_order(pool, jobs)
        values = [found[start : start + given.samples] for start in range(0, len(found), given.samples)]
        best = [{by: int(np.argmax([one[by] for one in search])) for by in CHOSEN_BY} for search in values]
        fresh = range(1, given.seeds + 1)
        again = [
            Job(arms[chosen[by]], seed, given.rounds)
            for arms, chosen in zip(searches, best, strict=True)
            for by in CHOSEN_BY
            for seed in fresh
        ]
        repeated = np.array([one["test"] for one in in_order(pool, again)])
    means = repeated.reshape(len(searches), len(CHOSEN_BY), len(fresh)).mean(-1)
    chosen_trials = zip(values, best, strict=True)
    reported = np.array([[search[chosen[by]]["test"] for by in CHOSEN_BY] for search, chosen in chosen_trials])
    table = markdown_table(HEAD, list(rows(reported, means)), [place == 0 for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def drawn(seed: int, samples: int) -> list[Arm]:
    """Return random configurations of the search space; `seed` is the seed of the search."""
    plan = Plan.read(SPACE, {}, {})
    space = plan.space.model_copy(update={"search": RandomSearch(samples=samples, seed=seed)})
    proposals = Proposals(space, plan.tentative)
    return [proposals.arm(number, [], {}) for number in range(samples)]


def in_order(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> list[Mapping[str, float]]:
    """Run the jobs, each different job once, and return the accuracies of each."""
    different = {identity([*job]): job for job in jobs}
    found: dict[str, Mapping[str, float]] = {}
    for key, accuracies in zip(different, pool.map(accuracies_of, different.values()), strict=True):
        found[key] = accuracies
        print(f"{len(found)} of {len(different)} runs", file=sys.stderr, end="\r")
    return [found[identity([*job])] for job in jobs]


def accuracies_of(job: Job) -> dict[str, float]:
    """Return the accuracies on test and on validation images after the last round in percent; 0 if the run diverges."""
    import torch

    from fedsweep.federation.build_and_run import run

    torch.set_num_threads(1)
    plan = Plan.read(SPACE, {"federation.rounds": job.rounds}, {})
    try:
        *_, last = run(plan.resolve(job.arm, job.seed))
    except DivergenceError:
        return dict.fromkeys(CHOSEN_BY, 0.0)
    names = {"test": "accuracy/mean", "validation": "validation/accuracy/mean"}
    return {by: 100 * last.metrics[name] for by, name in names.items()}


def rows(reported: np.ndarray, means: np.ndarray) -> Iterator[list[str]]:
    """Yield a table row for each way to choose, and one for the difference of their optimism.

    Args:
        reported: The reported values, with the axes search and `CHOSEN_BY`.
        means: The means over fresh seeds, with the same axes.
    """
    optimism = reported - means
    for place, by in enumerate(CHOSEN_BY):
        yield [by, f"{reported[:, place].mean():.2f}", f"{means[:, place].mean():.2f}", *shown(optimism[:, place])]
    yield ["test minus validation", "", f"{(means[:, 0] - means[:, 1]).mean():+.2f}", *shown(-np.diff(optimism)[:, 0])]


def shown(values: np.ndarray) -> list[str]:
    """Return the mean of the values and its 95% t interval as text."""
    interval = t_interval(values.tolist())
    return [f"{values.mean():+.2f}", "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"]


if __name__ == "__main__":
    main()
