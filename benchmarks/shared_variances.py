"""Measure the coverage of t intervals whose variance is shared between the arms of a sweep.

    python benchmarks/shared_variances.py [--repetitions 20000] [--to FILE]

Each arm of a sweep has n paired differences from the baseline. A t interval estimates the standard deviation of the
differences from these n values alone. With few seeds, this estimate is rough, and the interval is long. Two other
intervals also use the differences of the other arms: `pooled` takes the mean variance of all arms, and `moderated`
moves each variance towards a common value, more so if the variances of the arms are similar (G. Smyth, 2004, Linear
models and empirical Bayes methods for assessing differential expression in microarray experiments). The table contains
the smallest coverage of any arm, and the mean length relative to the interval of `own`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import special, stats

from fedsweep.report.text_tables import markdown_table

Array = np.ndarray
SPREADS = {"equal": (1.0,), "0.5 to 1.5": (0.5, 1.0, 1.5), "0.25 to 2": (0.25, 1.0, 2.0)}
"""The standard deviations of the differences, which the arms take in turn."""
NOISES = ("normal", "skewed")
KINDS = ("own", "pooled", "moderated")
HEAD = ("seeds", "arms", "standard deviations", "noise", *(f"coverage {kind} %" for kind in KINDS),
        *(f"length {kind}" for kind in KINDS[1:]))  # fmt: skip


def main() -> None:
    """Print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20_000)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    table = markdown_table(HEAD, list(rows(given.repetitions)), [place in (2, 3) for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def rows(repetitions: int) -> Iterator[list[str]]:
    """Yield a table row for each number of seeds, number of arms, set of standard deviations and noise."""
    rng = np.random.default_rng(0)
    for seeds in (3, 5, 10):
        for arms in (3, 7):
            for spread, noise in ((spread, noise) for spread in SPREADS for noise in NOISES):
                scale = np.resize(SPREADS[spread], arms)[:, None]
                shape = (repetitions, arms, seeds)
                drawn = rng.normal(size=shape) if noise == "normal" else rng.exponential(size=shape) - 1
                halves = half_widths(scale * drawn)
                means = np.abs((scale * drawn).mean(axis=-1))
                coverage = [100 * float((means <= half).mean(axis=0).min()) for half in halves.values()]
                lengths = [float((half / halves["own"].mean(axis=0)).mean()) for half in halves.values()]
                yield [
                    str(seeds),
                    str(arms),
                    spread,
                    noise,
                    *(f"{one:.1f}" for one in coverage),
                    *(f"{one:.2f}" for one in lengths[1:]),
                ]


def half_widths(differences: Array) -> dict[str, Array]:
    """Return half the length of the 95% interval of each arm, for each of `KINDS`.

    Args:
        differences: The paired differences, with the axes sweep, arm and seed.
    """
    arms, seeds = differences.shape[1:]
    own, degrees = differences.var(axis=-1, ddof=1), seeds - 1
    pooled = np.broadcast_to(own.mean(axis=1, keepdims=True), own.shape)
    prior, weight = shared(own, degrees)
    own_share = degrees / (degrees + weight)
    moderated = own_share * own + (1 - own_share) * prior
    weight = np.minimum(weight, (arms - 1) * degrees)  # all arms together have no more degrees of freedom
    found = {"own": (own, degrees), "pooled": (pooled, arms * degrees), "moderated": (moderated, degrees + weight)}
    return {kind: stats.t.ppf(0.975, free) * np.sqrt(one / seeds) for kind, (one, free) in found.items()}


def shared(variances: Array, degrees: int) -> tuple[Array, Array]:
    """Return the common variance of the arms of each sweep, and the number of degrees of freedom that it counts as.

    Smyth's estimates match the mean and the variance of the logarithms. The number is infinite if the variances differ
    less than by chance.

    Args:
        variances: The variance of each arm, with the axes sweep and arm.
        degrees: The degrees of freedom of each variance.
    """
    logs = np.log(variances) - special.digamma(degrees / 2) + np.log(degrees / 2)
    mean = logs.mean(axis=1, keepdims=True)
    excess = logs.var(axis=1, ddof=1, keepdims=True) - special.polygamma(1, degrees / 2)
    grid = np.geomspace(0.05, 1e4, 4000)  # half the degrees of freedom
    half = np.interp(-np.maximum(excess, 1e-9), -special.polygamma(1, grid), grid)
    prior = np.exp(mean + special.digamma(half) - np.log(half))
    certain = excess <= 0
    return np.where(certain, np.exp(mean), prior), np.where(certain, np.inf, 2 * half)


if __name__ == "__main__":
    main()
