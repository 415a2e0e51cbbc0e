"""Measure which random streams of a seed move the difference between two arms most.

    python -m benchmarks.streams [--seeds 6] [--rounds 4] [--ranks 8 1] [--processes 2] [--to FILE]

The experiment is `fedra_digits` with clients of several styles and classes (`partition.name: feature_label_skew`) and
four of them in a round, so that a seed determines all five streams: `partition`, `cohort`, `allocation`, `batches` and
`initial`. Each seed gives a full factorial: in each of 2^5 runs, some streams are those of the seed (`seed_streams`),
and the others those of seed 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsweep.common.randomness import StreamName
from fedsweep.common.yaml_values import Json
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.text_tables import markdown_table

Array = np.ndarray
Effect = frozenset[StreamName]
STREAMS: tuple[StreamName, ...] = ("partition", "cohort", "allocation", "batches", "initial")
SUBSETS = [frozenset(one) for size in range(len(STREAMS) + 1) for one in combinations(STREAMS, size)]
"""All sets of streams, beginning with the empty one."""
RANKS = (8, 1)
CHANGES: dict[str, Json] = {
    "partition.name": "feature_label_skew",
    "federation.clients_per_round": 4,
    "federation.evaluate_every": 1,
    "local.steps": 5,
    "evaluation.images_per_domain": 60,
}
"""The changes to `fedra_digits`."""
PAGE = """# Which random streams move an arm, and which move a difference

`python -m benchmarks.streams --seeds {seeds} --rounds {rounds} --ranks {ranks}` writes this page. The experiment is
`fedra_digits` with these changes:

{changes}

A score is the accuracy in percent, averaged over the last half of the rounds. `sd` is its standard deviation over seeds
that determine all five streams, estimated from the sum of all components of the variance. `alone` is the share of the
variance that a stream explains by itself. `in all` also contains the shares of its combinations with other streams, so
the sum over the streams is above 100%. `combinations` is the share of all combinations. The estimates are unbiased and
can be negative. With {seeds} seeds, they are rough: the 95% intervals are jackknife intervals over the seeds.

{table}
"""


class Job(NamedTuple):
    """One run: a rank, a seed, the streams that the seed determines, and a number of rounds."""

    rank: int
    seed: int
    streams: Effect
    rounds: int


def main() -> None:
    """Run all combinations, print the page and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the arms; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    seeds = range(1, given.seeds + 1)
    jobs = [Job(rank, seed, streams, given.rounds) for rank in given.ranks for seed in seeds for streams in SUBSETS[1:]]
    jobs += [Job(rank, 0, SUBSETS[0], given.rounds) for rank in given.ranks]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        found: dict[tuple[int, int, Effect], float] = {}
        for job, accuracy in zip(jobs, pool.map(accuracy_of, jobs), strict=True):
            found[job.rank, job.seed, job.streams] = accuracy
            print(f"{len(found)} of {len(jobs)} runs", file=sys.stderr, end="\r")
    scores = {
        rank: [{one: found[rank, seed if one else 0, one] for one in SUBSETS} for seed in seeds] for rank in given.ranks
    }
    table_of_rows = list(rows(scores))
    table = markdown_table(HEAD, table_of_rows, [place == 0 for place in range(len(HEAD))])
    page = PAGE.format(
        seeds=given.seeds,
        rounds=given.rounds,
        ranks=" ".join(map(str, given.ranks)),
        changes="\n".join(f"- `{name}={value}`" for name, value in CHANGES.items()),
        table=table,
    )
    print(page, end="")
    if given.to is not None:
        given.to.write_text(page, encoding="utf-8")


def accuracy_of(job: Job) -> float:
    """Run a job, and return the accuracy in percent, averaged over the last half of the rounds."""
    import torch

    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import read_yaml
    from fedsweep.federation.build_and_run import run
    from fedsweep.federation.run_config import RunConfig

    torch.set_num_threads(1)
    experiment = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "experiment fedra_digits")
    changes = {**CHANGES, "lora.rank": job.rank, "federation.rounds": job.rounds, "seed": job.seed}
    if job.streams:
        changes["seed_streams"] = [one for one in STREAMS if one in job.streams]
    results = list(run(experiment.override(changes, "benchmark")))
    return 100 * float(np.mean([one.metrics["accuracy/mean"] for one in results[-max(job.rounds // 2, 1) :]]))


HEAD = ("score", "sd", *(f"{name}, {kind}" for name in STREAMS for kind in ("alone", "in all")), "combinations")
Cells = Mapping[Effect, float]
"""The scores of one factorial, by the streams that the seed determined."""


def rows(scores: Mapping[int, list[Cells]]) -> Iterator[list[str]]:
    """Yield a table row for each arm and for its difference from the baseline, which is the first arm.

    Args:
        scores: For each rank, the factorials of all seeds.
    """
    baseline, *others = scores
    named = {f"accuracy of rank {rank}": own for rank, own in scores.items()}
    for rank in others:
        named[f"rank {rank} against {baseline}"] = [
            {streams: one[streams] - other[streams] for streams in SUBSETS}
            for one, other in zip(scores[rank], scores[baseline], strict=True)
        ]
    for name, factorials in named.items():
        parts = [components(one) for one in factorials]
        whole = shares(parts)
        left_out = [shares(parts[:place] + parts[place + 1 :]) for place in range(len(parts))]
        yield [name, f"{whole[0]:.2f}", *(shown(whole, left_out, place) for place in range(1, len(whole)))]


def components(cells: Cells) -> dict[Effect, float]:
    """Return an unbiased estimate of each component of the variance from one 2^5 factorial.

    The model has crossed random effects: a score is the sum of one effect for each set F of streams, which has an
    independent value with variance v(F) for each combination of their levels. The contrast c(E) of a set E is the mean
    of the scores, each with the sign -1 for each stream of E that has the level of seed 0. Then the mean of c(E)^2 is
    the sum of v(F) / 2^|F| over all F that contain E, which is solved for v(E). Negative estimates are kept.
    """
    contrasts = {
        effect: float(np.mean([(-1) ** len(effect - level) * cells[level] for level in SUBSETS])) ** 2
        for effect in SUBSETS[1:]
    }
    return {
        effect: 2 ** len(effect)
        * sum((-1) ** len(other - effect) * square for other, square in contrasts.items() if effect <= other)
        for effect in SUBSETS[1:]
    }


def shares(parts: list[dict[Effect, float]]) -> list[float]:
    """Return the standard deviation, and the shares of the variance in percent in the order of `HEAD`."""
    mean = {effect: float(np.mean([one[effect] for one in parts])) for effect in SUBSETS[1:]}
    total = sum(mean.values())
    if total <= 0:
        return [0.0] + [np.nan] * (2 * len(STREAMS) + 1)
    single = {name: mean[frozenset({name})] for name in STREAMS}
    each = [(single[name], sum(part for effect, part in mean.items() if name in effect)) for name in STREAMS]
    combined = total - sum(single.values())
    return [float(np.sqrt(total)), *(100 * one / total for pair in each for one in pair), 100 * combined / total]


def shown(whole: list[float], left_out: list[list[float]], place: int) -> str:
    """Return a share with its jackknife interval as text."""
    many = len(left_out)
    pseudo = [many * whole[place] - (many - 1) * one[place] for one in left_out]
    interval = t_interval(pseudo) if many > 1 and np.isfinite(pseudo).all() else None
    ends = "" if interval is None else f" ({interval[0]:.0f} to {interval[1]:.0f})"
    return f"{whole[place]:.0f}%{ends}"


if __name__ == "__main__":
    main()
