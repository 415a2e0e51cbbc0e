"""Measure the joint coverage of plain and simultaneous 95% intervals in simulated sweeps.

    python benchmarks/simultaneous.py [--repetitions 40000] [--to FILE]

Each sweep tests several comparisons, whose paired differences are normally distributed. The first table contains the
share of sweeps in which all intervals contain their true differences. `plain` intervals have no correction, and
`simultaneous` intervals have the level of Bonferroni's method. `shortened` intervals are simultaneous intervals that
end at zero wherever Holm's method finds the sign of a difference and the interval contains zero. The second table
contains the share of sweeps with a significant difference of zero, and the share of sweeps in which this occurs or a
simultaneous interval misses its true difference.

The third table is about seeds until decided. The sweeps end by themselves, or are interrupted after a random number of
seeds. It contains the share of sweeps in which all intervals of a kind contain their true differences: the intervals by
which the comparisons were `judged`, those of `one arm`, and the `simultaneous` ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

from fedsweep.report.holm_corrected_tests import holm
from fedsweep.report.intervals_and_power import LEVEL, margin
from fedsweep.report.sequential_tests import Replayed, SequentialRule, replay
from fedsweep.report.text_tables import markdown_table

Array = np.ndarray
LARGE, SMALL = 100.0, 0.01
"""True differences, in units of the standard deviation of the paired differences."""
COVERED = ("comparisons", "seeds", "plain %", "simultaneous %", "shortened %")
BY_LOOKS = ("comparisons", "seeds", "sweep", "one arm %", "judged %", "simultaneous %")
VIOLATED = ("comparisons", "seeds", "false difference %", "false difference or missed %")


@dataclass(frozen=True)
class Situation:
    """The comparisons of a simulated sweep."""

    name: str
    seeds: int
    pairs: tuple[tuple[int, int], ...]
    """The two arms of each comparison."""
    means: tuple[float, ...]
    """The true mean of each arm."""

    def with_seeds(self, seeds: int) -> Situation:
        """Return the same comparisons with another number of seeds."""
        return replace(self, seeds=seeds)

    @property
    def true(self) -> Array:
        """The true difference of each comparison."""
        return np.array([self.means[one] - self.means[other] for one, other in self.pairs])

    def differences(self, repetitions: int) -> Array:
        """Draw the paired differences of all sweeps, with the axes sweep, comparison and seed."""
        rng = np.random.default_rng(0)
        values = rng.normal(size=(repetitions, len(self.means), self.seeds)) + np.array(self.means)[:, None]
        ones, others = np.array(self.pairs).T
        return values[:, ones] - values[:, others]


def independent(name: str, differences: tuple[float, ...]) -> Situation:
    """Return a sweep with three seeds and independent comparisons, each of which has its own two arms."""
    pairs = tuple((2 * place, 2 * place + 1) for place in range(len(differences)))
    return Situation(name, 3, pairs, tuple(mean for one in differences for mean in (one, 0.0)))


SITUATIONS = (
    independent("4 independent, all differences zero", (0.0,) * 4),
    Situation("4 arms with a common baseline", 5, tuple((arm, 0) for arm in range(1, 5)), (0.0,) * 5),
    Situation("all 10 pairs of 5 arms", 5, tuple(combinations(range(5), 2)), (0.0,) * 5),
    independent("4 independent, three large and one very small", (LARGE,) * 3 + (SMALL,)),
)
RULES = (SequentialRule(3, 8, smallest_effect=1.0), SequentialRule(4, 20, smallest_effect=1.0))
"""The rules of the sweeps with seeds until decided; the noise of a difference is 1.4 times the smallest effect."""
THREE_LARGE = independent("4 independent, three large and one zero", (LARGE,) * 3 + (0.0,))


def main() -> None:
    """Print the two tables and, with `--to`, write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=40_000)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    tables = [
        markdown_table(head, rows, [True, *[False] * (len(head) - 1)])
        for head, rows in (
            (COVERED, list(coverage(given.repetitions))),
            (VIOLATED, [violations(THREE_LARGE, given.repetitions)]),
            (BY_LOOKS, list(coverage_by_looks(given.repetitions))),
        )
    ]
    text = "\n\n".join(tables)
    print(text)
    if given.to is not None:
        given.to.write_text(f"{text}\n", encoding="utf-8")


def coverage(repetitions: int) -> Iterator[list[str]]:
    """Yield the row of each situation: the share of sweeps in which all intervals contain their true differences."""
    for situation in SITUATIONS:
        differences, true = situation.differences(repetitions), situation.true
        plain, simultaneous = (intervals(differences, level) for level in (LEVEL, LEVEL / len(true)))
        found = [np.stack(one) for one in (plain, simultaneous, shortened(differences, simultaneous))]
        shares = [((low <= true) & (true <= high)).all(axis=1).mean() for low, high in found]
        yield [situation.name, str(situation.seeds), *(f"{100 * one:.1f}" for one in shares)]


def coverage_by_looks(repetitions: int) -> Iterator[list[str]]:
    """Yield the rows of the sweeps with seeds until decided."""
    for situation, rule in ((one.with_seeds(rule.at_most), rule) for rule in RULES for one in SITUATIONS):
        differences, seeds = situation.differences(repetitions), f"{rule.first_look} to {rule.at_most}"
        interrupted = np.random.default_rng(1).integers(rule.first_look, rule.at_most, repetitions)
        lengths = [(interrupted == length, length) for length in range(rule.first_look, rule.at_most)]
        cut = [(replay(differences[own, :, :length], rule)) for own, length in lengths if own.any()]
        for name, found in (("ended", [replay(differences, rule)]), ("interrupted", cut)):
            covered = np.concatenate([_covered(one, situation.true) for one in found])
            shares = covered.all(axis=1).mean(axis=0)
            yield [situation.name, seeds, name, *(f"{100 * shares[place]:.1f}" for place in (0, 1, 3))]


def _covered(found: Replayed, true: Array) -> Array:
    """Return whether each interval contains the true difference, with the axes sweep, comparison and interval.

    An interval that does not exist yet counts as one that contains it.
    """
    half = np.where(np.isfinite(found.errors[..., None]), found.borders * found.errors[..., None], np.inf)
    return np.abs(found.means - true)[..., None] <= half


def violations(situation: Situation, repetitions: int) -> list[str]:
    """Return the row of a situation: the share of sweeps with a false difference, and of those with any error."""
    differences, true = situation.differences(repetitions), situation.true
    low, high = intervals(differences, LEVEL / len(true))
    false = (significant(differences) & (true == 0)).any(axis=1)
    missed = ((true < low) | (high < true)).any(axis=1)
    shares = false.mean(), (false | missed).mean()
    return [situation.name, str(situation.seeds), *(f"{100 * one:.1f}" for one in shares)]


def intervals(differences: Array, level: float) -> tuple[Array, Array]:
    """Return the ends of Student's t interval of each comparison, with a coverage of 1 - `level`."""
    means, spreads = differences.mean(axis=-1), differences.std(axis=-1, ddof=1)
    half = spreads * margin(1.0, differences.shape[-1], level)
    return means - half, means + half


def shortened(differences: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return intervals that end at zero where the difference is significant and the interval contains zero."""
    low, high = found
    cut, above = significant(differences) & (low < 0) & (high > 0), differences.mean(axis=-1) > 0
    return np.where(cut & above, 0.0, low), np.where(cut & ~above, 0.0, high)


def significant(differences: Array) -> Array:
    """Return whether each comparison of each sweep is significant after Holm's correction."""
    p = stats.ttest_1samp(differences, 0.0, axis=-1).pvalue
    return np.array([holm(one) for one in p]) <= LEVEL


if __name__ == "__main__":
    main()
