"""Comparisons of arms that stop as soon as they are decided ("seeds until decided").

All arms run the seeds 0, 1, 2, ... A look takes place once a seed has finished in both arms of all comparisons that are
still open. At each look, two families of repeated t-tests judge the paired differences:

- Two-sided tests of "the mean difference is 0" decide that an arm is `higher` or `lower`.
- Two one-sided tests decide that an arm is `within` the smallest effect that matters.

Each family has its own error of at most `level`, over all comparisons and all looks. A family starts with Holm's first
step, which divides the level by the number of comparisons. Each rejection passes its share of the level on to the
hypotheses that the family has not rejected. At each level, error spending gives the boundaries.

Sources: W. Maurer and F. Bretz (2013), Multiple testing in group sequential trials using graphical approaches, for
Holm's method with repeated tests; C. Jennison and B. Turnbull (1989), Interim analyses: the repeated confidence
interval approach, for intervals that are valid at every look; D. Schuirmann (1987), A comparison of the two one-sided
tests procedure and the power approach for assessing the equivalence of average bioavailability.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedsweep.report.intervals_and_power import LEVEL, Interval, negated
from fedsweep.report.spending_boundaries import Array, spent_by, t_boundaries

DIFFERENCE_EXPONENT, EQUIVALENCE_EXPONENT = 1.0, 3.0
"""The exponents of the error spending of the two families, chosen with `benchmarks/sequential.py`."""
ROUNDING = 1e-12
"""Differences with a smaller range, relative to the largest difference, are treated as equal."""

Conclusion = Literal["open", "higher", "lower", "within", "out of reach", "open at the limit"]
CONCLUSIONS: tuple[Conclusion, ...] = ("open", "higher", "lower", "within", "out of reach", "open at the limit")
OPEN, HIGHER, LOWER, WITHIN, OUT_OF_REACH, AT_THE_LIMIT = range(6)
OPPOSITE: dict[Conclusion, Conclusion] = {"higher": "lower", "lower": "higher"}
FAMILIES = ((HIGHER, LOWER), (WITHIN,))
"""The conclusions that reject a hypothesis of the first and of the second family of tests."""
Numbers = NDArray[np.int64]
Truths = NDArray[np.bool_]


@dataclass(frozen=True)
class SequentialRule:
    """The rule that decides when a comparison needs no further seeds.

    Raises:
        ValueError: If a value is out of its range.
    """

    first_look: int = 4
    """The number of seeds at the first look, at least 2. After failed seeds, tests wait for as many pairs."""
    at_most: int = 20
    """The largest number of seeds."""
    smallest_effect: float | None = None
    """The smallest difference that matters, in the unit of the differences. None leaves out tests of equivalence."""
    level: float = LEVEL
    """The error of each of the two families of tests."""
    give_up: float = 0.05
    """A comparison ends as `out of reach` if the probability of a decision at the last look falls below this value.

    The probability is predicted from the seeds so far. With 0, comparisons run until they are decided or at the limit.
    """

    def __post_init__(self) -> None:
        if not 2 <= self.first_look <= self.at_most:
            raise ValueError(f"first_look must be between 2 and at_most = {self.at_most}, not {self.first_look}")
        if self.smallest_effect is not None and not 0 < self.smallest_effect < np.inf:
            raise ValueError(f"smallest_effect must be a positive number, not {self.smallest_effect}")
        if not 0 < self.level < 0.5:
            raise ValueError(f"level must be between 0 and 0.5, not {self.level}")
        if not 0 <= self.give_up < 1:
            raise ValueError(f"give_up must be at least 0 and less than 1, not {self.give_up}")


@dataclass(frozen=True)
class Verdict:
    """The conclusion about one comparison, with intervals of the mean difference: arm minus the other arm.

    All intervals are repeated confidence intervals. With normal differences, each covers the true mean difference at
    all looks at once with at least the stated probability. They are therefore valid at whatever look a sweep ended, and
    they contain the truth more often than stated at any single look. They are None before the first look, and if the
    differences do not vary, since no t statistic exists then.
    """

    verdict: Conclusion
    """`open` means that the comparison needs further seeds."""
    seeds: int
    """The number of seeds at the look of the decision or, for an open comparison, at the last complete look."""
    pairs: int
    """The number of `seeds` that did not fail."""
    difference: float | None
    """The mean of the paired differences, or None if there are none."""
    interval: Interval | None = None
    """The interval of this comparison alone, with a coverage of at least 1 - level."""
    judged_interval: Interval | None = None
    """The interval at the level at which Holm's method judges the comparison; at least as long as `interval`.

    It excludes 0 if and only if the verdict is `higher` or `lower`.
    """
    equivalence_interval: Interval | None = None
    """The interval of the two one-sided tests, with a coverage of at least 1 - 2 * level; None without such tests.

    It lies between -smallest_effect and +smallest_effect if the verdict is `within`, and not if it is `open`, `out of
    reach` or `open at the limit`.
    """

    simultaneous_interval: Interval | None = None
    """The interval at Bonferroni's level, level / number of comparisons; at least as long as `judged_interval`.

    With a probability of at least 1 - level, the intervals of all comparisons contain their true mean differences, at
    all looks at once. The judged intervals lack this joint property, because Holm's method gives the level of rejected
    hypotheses to the others.
    """

    constant: bool = False
    """True if at least two pairs have finished and all have the same difference, so that no t statistic exists.

    Such a comparison stays open up to the limit, because the next seed can make a test possible.
    """

    def mirrored(self) -> "Verdict":
        """Return the verdict about the opposite direction of the comparison, in which all differences are negated."""
        return replace(
            self,
            verdict=OPPOSITE.get(self.verdict, self.verdict),
            difference=None if self.difference is None else -self.difference,
            interval=negated(self.interval),
            judged_interval=negated(self.judged_interval),
            equivalence_interval=negated(self.equivalence_interval),
            simultaneous_interval=negated(self.simultaneous_interval),
        )


Name = TypeVar("Name", bound=Hashable)


def judge(differences: Mapping[Name, Sequence[float]], rule: SequentialRule) -> dict[Name, Verdict]:
    """Return the verdict of each comparison.

    The looks are replayed from the first. The verdicts therefore depend only on the differences, not on the order in
    which trials ended, and seeds that were recorded after a decision change nothing.

    Args:
        differences: For each comparison, the paired differences (arm minus other arm) of the seeds 0, 1, 2, ... in this
            order, without gaps. A difference that is not finite stands for a failed seed: it counts as a seed, but not
            as a pair. The tests then assume that failures do not depend on the differences.
        rule: The rule of the sweep.
    """
    if not differences:
        return {}
    length = max(1, *map(len, differences.values()))
    values = np.full((1, len(differences), length), np.nan)
    for place, one in enumerate(differences.values()):
        values[0, place, : len(one)] = one
    found = replay(values, rule, np.array([len(one) for one in differences.values()]))
    return {name: found.verdict(place) for place, name in enumerate(differences)}


def repeated_interval(differences: Sequence[float], rule: SequentialRule) -> Interval | None:
    """Return the repeated 95% interval of the mean of paired differences that had no part in the decisions.

    The interval is valid at whatever look the sweep ended, because it covers the true mean at all looks at once. It is
    not corrected for the number of comparisons. Return None before the first look, and if the differences do not vary.

    Args:
        differences: The paired differences of the seeds that did not fail.
        rule: The rule of the sweep.
    """
    _, mean, error = (float(one) for one in _moments(np.asarray(differences, dtype=float)))
    half = _boundaries(1, rule.first_look, rule.at_most, rule.level)[0][1, len(differences)] * error
    return (mean - float(half), mean + float(half)) if np.isfinite(half) else None


@dataclass(frozen=True)
class Replayed:
    """The state of simulated or recorded sweeps at the end of each comparison.

    All arrays have a row for each sweep and a column for each comparison.
    """

    conclusions: Numbers
    """The places of the conclusions in `CONCLUSIONS`."""
    seeds: Numbers
    """The number of seeds at the look of the decision, or at the last complete look."""
    pairs: Numbers
    """The number of seeds that did not fail."""
    means: Array
    errors: Array
    """The standard errors of the means; NaN if no t statistic exists."""
    borders: Array
    """The boundaries of the intervals along a third axis, in the order of the attributes of `Verdict`."""

    def verdict(self, place: int, sweep: int = 0) -> Verdict:
        """Return the verdict of the comparison in column `place`."""
        at = (sweep, place)
        mean, error = float(self.means[at]), float(self.errors[at])
        own, judged, near, joint = (
            (mean - float(border) * error, mean + float(border) * error) if np.isfinite(border * error) else None
            for border in self.borders[at]
        )
        pairs = int(self.pairs[at])
        conclusion, constant = CONCLUSIONS[self.conclusions[at]], pairs > 1 and bool(np.isnan(error))
        difference = mean if pairs else None
        return Verdict(conclusion, int(self.seeds[at]), pairs, difference, own, judged, near, joint, constant)


def replay(values: Array, rule: SequentialRule, lengths: Numbers | None = None) -> Replayed:
    """Apply the rule to many sweeps at once, look by look.

    Args:
        values: The paired differences, with the axes sweep, comparison and seed.
        rule: The rule.
        lengths: The number of recorded seeds of each comparison; all seeds if it is not given.
    """
    shape = values.shape[:2]
    lengths = np.full(shape[1], values.shape[2]) if lengths is None else lengths
    tables = _boundaries(shape[1], rule.first_look, rule.at_most, rule.level)
    effect = 0.0 if rule.smallest_effect is None else rule.smallest_effect
    conclusions, seeds, pairs = (np.zeros(shape, np.int64) for _ in range(3))
    means, errors, borders = np.zeros(shape), np.full(shape, np.nan), np.full((*shape, 4), np.inf)
    for look in range(1, min(rule.at_most, values.shape[2]) + 1):
        complete = np.all((conclusions != OPEN) | (lengths >= look), axis=1)
        going = (conclusions == OPEN) & complete[:, None]
        if not going.any():
            break
        count, mean, error = _moments(values[:, :, :look])
        judged, near = _judged(conclusions, going, tables, (count, mean, error), effect)
        near = near if effect else np.full(shape, np.inf)
        new = np.stack([tables[0][1, count], judged, near, tables[0][shape[1], count]], axis=-1)
        for kept, at_look in ((seeds, look), (pairs, count), (means, mean), (errors, error)):
            np.copyto(kept, at_look, where=going)
        np.copyto(borders, new, where=going[:, :, None])
        if look == rule.at_most:
            conclusions[going & (conclusions == OPEN)] = AT_THE_LIMIT
        elif look >= rule.first_look:
            at_end = count + rule.at_most - look
            ends = [_border(conclusions, table, at_end, kinds) for table, kinds in zip(tables, FAMILIES, strict=True)]
            with np.errstate(divide="ignore", invalid="ignore"):  # comparisons without pairs
                hope = _chance(mean, error, count, at_end, ends, effect)
            hope = np.where(count == 0, 0.0, hope)  # NaN for equal differences, which the next seed can part
            conclusions[going & (conclusions == OPEN) & (hope < rule.give_up)] = OUT_OF_REACH
    return Replayed(conclusions, seeds, pairs, means, errors, borders)


def _judged(
    conclusions: Numbers, going: Truths, tables: tuple[Array, Array], now: tuple[Numbers, Array, Array], effect: float
) -> tuple[Array, Array]:
    """Record the decisions of one look in `conclusions`.

    Holm's steps are repeated within the look until nothing more is rejected.

    Args:
        conclusions: The conclusions before the look.
        going: True for comparisons that this look may decide.
        tables: The boundaries of both families.
        now: The number of pairs, the mean and its standard error.
        effect: The smallest effect, or 0 without tests of equivalence.

    Returns:
        For each family, the boundary by which each comparison was judged.
    """
    count, mean, error = now
    found = []
    for table, kinds in zip(tables, FAMILIES, strict=True):
        border = _border(conclusions, table, count, kinds)
        while True:
            still = going & (conclusions == OPEN)
            border = np.where(still, _border(conclusions, table, count, kinds), border)
            # The same sums as those of the ends of the intervals, so that rounding cannot part the two.
            reach = np.abs(mean) + border * error < effect if WITHIN in kinds else np.abs(mean) - border * error > 0
            hits = still & reach
            if not hits.any():
                break
            conclusions[hits] = WITHIN if WITHIN in kinds else np.where(mean[hits] > 0, HIGHER, LOWER)
        found.append(border)
    return found[0], found[1]


def _border(conclusions: Numbers, table: Array, count: Numbers, kinds: tuple[int, ...]) -> Array:
    """Return the boundary of each comparison for the number of hypotheses that its family has not rejected."""
    left = conclusions.shape[1] - np.isin(conclusions, kinds).sum(axis=1)
    return np.asarray(table[np.maximum(left, 1)[:, None], count])


def _moments(values: Array) -> tuple[Numbers, Array, Array]:
    """Return the number, mean and standard error of the finite values along the last axis.

    The mean of no values is 0. The standard error is NaN if there are fewer than two values or if all are equal.
    """
    there = np.isfinite(values)
    count = there.sum(axis=-1)
    mean = np.where(there, values, 0.0).sum(axis=-1) / np.maximum(count, 1)
    deviations = np.where(there, values - mean[..., None], 0.0)
    spread = np.sqrt(np.square(deviations).sum(axis=-1) / np.maximum(count - 1, 1))
    size = np.where(there, np.abs(values), 0.0).max(axis=-1)
    varied = (count > 1) & (np.abs(deviations).max(axis=-1) > ROUNDING * size)
    return count, mean, np.where(varied, spread / np.sqrt(np.maximum(count, 1)), np.nan)


def _chance(mean: Array, error: Array, count: Numbers, at_end: Numbers, ends: Sequence[Array], effect: float) -> Array:
    """Return the predicted probability that the last look decides a comparison, at its present level.

    The standard deviation is assumed to stay as it is. With a flat prior of the true mean, the mean at the last look
    then follows a scaled t distribution around the present mean.
    """
    spread = error * np.sqrt(count)
    scale = spread * np.sqrt((at_end - count) / (count * at_end))
    last = spread / np.sqrt(at_end)
    far, near = ends[0] * last, np.maximum(effect - ends[1] * last, 0.0)

    def below(border: Array) -> Array:
        return np.asarray(special.stdtr(count - 1, (border - mean) / scale))

    return 1 - below(far) + below(-far) + below(near) - below(-near)


@lru_cache
def _boundaries(comparisons: int, first_look: int, at_most: int, level: float) -> tuple[Array, Array]:
    """Return the boundaries of the t statistics of both families.

    Rows are the number of hypotheses that share the level, columns are the number of pairs. The boundaries are infinite
    for fewer pairs than at the first look.
    """
    shares = level / np.arange(1, comparisons + 1)[:, None]
    looks = np.arange(first_look, at_most + 1, dtype=float)
    spent = [spent_by(shares / 2, looks, at_most, DIFFERENCE_EXPONENT)]
    spent.append(spent_by(shares, looks, at_most, EQUIVALENCE_EXPONENT))
    borders = np.full((2, comparisons + 1, at_most + 1), np.inf)
    borders[:, 1:, first_look:] = t_boundaries(np.concatenate(spent), first_look).reshape(2, comparisons, -1)
    return borders[0], borders[1]
