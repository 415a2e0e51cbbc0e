"""Confidence intervals of means, and the power of paired t-tests."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from fedsweep.common.randomness import stream

LEVEL = 0.05
"""The two-sided level of the tests after Holm's correction; intervals have a coverage of 1 - LEVEL, uncorrected."""
LEAST_RESAMPLED = 5
"""The least number of values for a bootstrap; fewer values give too few different resamples to keep the level."""
RESAMPLES = 9_999
Interval = tuple[float, float]


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's 95% interval of the mean, or None if there are fewer than two values or all values are equal."""
    if len(values) < 2 or not np.ptp(values):
        return None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    low, high = stats.t.interval(1 - LEVEL, len(values) - 1, mean, error)
    return float(low), float(high)


def margin(spread: float, n: int, level: float) -> float:
    """Return half the length of Student's interval of the mean of `n` values, with a coverage of 1 - `level`.

    `spread` is the standard deviation of the values (divisor n - 1).

    >>> round(margin(1.0, 3, 0.05), 3), round(margin(1.0, 3, 0.05 / 3), 3)
    (2.484, 4.416)
    """
    return float(spread / n**0.5 * stats.t.isf(level / 2, n - 1))


def negated(interval: Interval | None) -> Interval | None:
    """Return the interval of the negated values, such as the interval of a difference in the opposite direction.

    >>> negated((-0.5, 2.0))
    (-2.0, 0.5)
    """
    return None if interval is None else (-interval[1], -interval[0])


def half_width(interval: Interval | None) -> float | None:
    """Return half the length of an interval, or None if there is none."""
    return None if interval is None else (interval[1] - interval[0]) / 2


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """Return the studentized bootstrap's 95% interval of the mean. The same values always give the same interval.

    The bootstrap draws 9,999 resamples. Return None if there are fewer than five values, or if too many resamples
    consist of equal values.

    For few values, percentile and BCa intervals would be too short. With six values, they contain the true mean in 85%
    of samples, whereas the studentized interval contains it in 94 to 95% (`benchmarks/honesty.py`).

    Source: B. Efron (1981), Nonparametric standard errors and confidence intervals; P. Hall (1988).
    """
    n = len(values)
    if n < LEAST_RESAMPLED:
        return None
    observed = np.asarray(values, dtype=float)
    mean, error = observed.mean(), observed.std(ddof=1) / np.sqrt(n)
    drawn = observed[stream(0, "bootstrap", n).integers(n, size=(RESAMPLES, n))]
    means = drawn.mean(axis=1)
    spreads = np.sqrt(np.square(drawn - means[:, None]).sum(axis=1) / (n - 1))
    usable = spreads > 1e-9 * spreads.max()  # equal values differ in the last bits of their deviations
    if usable.sum() < RESAMPLES * (1 - LEVEL / 5):
        return None  # leaving out so many resamples would move the ends of the interval
    pivots = (means[usable] - mean) / (spreads[usable] / np.sqrt(n))
    low, high = np.quantile(pivots, (LEVEL / 2, 1 - LEVEL / 2))
    return float(mean - high * error), float(mean - low * error)


PLANNING = 0.8  # the coverage of an interval of the number of seeds
POWER = 0.8  # the probability of detecting a difference, used for planning
MOST_SEEDS = 10_000
NODES, WEIGHTS = np.polynomial.legendre.leggauss(256)
"""Quadrature over -1 to 1, since scipy's noncentral t returns NaN for many arguments."""


def power(effect: float, n: int, level: float) -> float:
    """Return the power of a two-sided paired t-test, that is, the probability that the test detects a true difference.

    Args:
        effect: The true difference, in units of the standard deviation of the paired differences.
        n: The number of pairs.
        level: The level of the test.

    Source: J. Cohen (1988), Statistical power analysis, chapter 2.
    """
    free = n - 1
    # T = (Z + shift) / S, and S^2 is chi-squared over its degrees of freedom: an integral over the quantiles of S.
    borders = stats.t.isf(level / 2, free) * np.sqrt(stats.chi2.ppf((NODES + 1) / 2, free) / free)
    shift = effect * n**0.5
    beyond = stats.norm.cdf(shift - borders) + stats.norm.cdf(-shift - borders)
    return float(WEIGHTS @ beyond / 2)


@cache
def detectable_effect(n: int, level: float) -> float:
    """Return the smallest true difference that a paired t-test of `n` pairs at `level` detects with a power of 0.8.

    The difference is in units of the standard deviation of the paired differences.
    """
    high = 1.0
    while power(high, n, level) < POWER:
        high *= 2
    return float(brentq(lambda effect: power(effect, n, level) - POWER, 0.0, high, xtol=1e-10))


@cache
def seeds_needed(effect: float, level: float) -> int | None:
    """Return the number of seeds with which a paired t-test at `level` detects `effect` with a power of 0.8.

    `effect` is the true difference, in units of the standard deviation of the paired differences. Return None if more
    than 10,000 seeds are needed.
    """
    found = bisect_left(range(MOST_SEEDS + 1), POWER, lo=2, key=lambda n: power(effect, n, level))
    return found if found <= MOST_SEEDS else None


def seeds_interval(difference: float, spread: float, n: int, level: float) -> tuple[int | None, int | None]:
    """Return an 80% interval of the number of seeds with which a paired t-test detects `difference`, power 0.8.

    The interval follows from the chi-squared interval of the true standard deviation of the paired differences. An end
    is None if it is more than 10,000 seeds.

    Args:
        difference: The true difference.
        spread: The observed standard deviation of the paired differences, which is not 0.
        n: The number of pairs.
        level: The level of the test.
    """
    tail, free = (1 - PLANNING) / 2, n - 1
    borders = [float(stats.chi2.isf(share, free)) for share in (tail, 1 - tail)]
    low, high = (seeds_needed(abs(difference) / (spread * (free / border) ** 0.5), level) for border in borders)
    return low, high
