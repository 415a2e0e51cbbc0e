"""Measure how many seeds a sweep saves by running all arms with the same seeds.

    python benchmarks/pairing.py ablations/lora_rank [ablations/learning_rate ...] [--store mlruns] [--to FILE]

The difference d of an arm from the baseline has the variance var(d) if both use the same seeds, and the variance
var(arm) + var(baseline) if their seeds are independent. The second variance divided by the first is the factor by which
common seeds reduce the number of seeds for an interval of the same length.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.intervals_and_power import LEVEL, seeds_needed
from fedsweep.report.text_tables import markdown_table
from fedsweep.report.units_and_labels import arm_words, names
from fedsweep.results import Store, SweepStore
from fedsweep.results.arms import counterparts, identity

HEAD = ("search space", "arm", "seeds", "sd of arm", "sd of baseline", "correlation", "sd of difference, common seeds",
        "sd of difference, independent seeds", "times fewer seeds", "95% interval", "seeds for 1 point, common",
        "seeds for 1 point, independent")  # fmt: skip
POINT = 0.01
"""The difference to be detected: one percentage point."""


def main() -> None:
    """Print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+")
    parser.add_argument("--store", default="mlruns")
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    rows = [row for space in given.spaces for row in of_sweep(Store.at(given.store).find(space, None))]
    table = markdown_table(HEAD, rows, [place < 2 for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def of_sweep(sweep: SweepStore) -> Iterator[list[str]]:
    """Yield a table row for each arm of a sweep that is compared with a baseline over at least three seeds."""
    manifest = sweep.manifest()
    arms = summarise(manifest, sweep.trials())
    by_arm, dotted = {identity(one.arm.values): one for one in arms}, names(manifest, arms)
    others = counterparts([one.arm.values for one in arms], manifest.baseline or {})
    for one in arms:
        if one.comparison is not None and len(one.comparison.seeds) > 2:
            baseline = by_arm[identity(others[identity(one.arm.values)])]
            yield [manifest.name, arm_words(one.arm.values, dotted), *numbers(one.values, baseline.values)]


def numbers(arm: Mapping[int, float], baseline: Mapping[int, float]) -> list[str]:
    """Return the numbers of a table row, given dicts from seeds to values for an arm and its baseline.

    Standard deviations are in percentage points.
    """
    seeds = sorted(set(arm) & set(baseline))
    first, second = (np.array([values[seed] for seed in seeds]) for values in (arm, baseline))
    common, independent = np.std(first - second, ddof=1), np.hypot(first.std(ddof=1), second.std(ddof=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a resample may consist of a single seed, which has no spread
        found = stats.bootstrap(
            (first, second), saved, paired=True, method="percentile", vectorized=True, rng=np.random.default_rng(0)
        )
    low, high = found.confidence_interval
    takes = [seeds_needed(POINT / spread, LEVEL) for spread in (common, independent)]
    return [
        str(len(seeds)), f"{100 * first.std(ddof=1):.2f}", f"{100 * second.std(ddof=1):.2f}",
        f"{np.corrcoef(first, second)[0, 1]:+.2f}", f"{100 * common:.2f}", f"{100 * independent:.2f}",
        f"{saved(first, second):.1f}", f"{low:.1f} to {high:.1f}", *map(str, takes),
    ]  # fmt: skip


def saved(first: NDArray[np.float64], second: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return (var(first) + var(second)) / var(first - second).

    This ratio is the factor by which common seeds reduce the number of seeds for an interval of the same length.
    """
    apart = np.var(first - second, axis=axis, ddof=1)
    return (np.var(first, axis=axis, ddof=1) + np.var(second, axis=axis, ddof=1)) / np.maximum(apart, 1e-12)


if __name__ == "__main__":
    main()
