"""Confidence intervals of paired differences, detectable differences, and the seeds that a difference needs."""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from fedsweep.common.randomness import stream

LEVEL = 0.05
"""Two-sided level of the tests after Holm's correction; intervals are at 1 - LEVEL, uncorrected."""
LEAST_RESAMPLED = 5
"""Values from which on a bootstrap can hold its level: of three or four there are too few different resamples."""
RESAMPLES = 9_999
Interval = tuple[float, float]


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval of the mean; None of fewer than two values, or where they do not differ."""
    if len(values) < 2 or not np.ptp(values):
        return None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    low, high = stats.t.interval(1 - LEVEL, len(values) - 1, mean, error)
    return float(low), float(high)


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """The studentized bootstrap interval of the mean, from 9,999 resamples that are the same in every call.

    Percentile and BCa intervals of so few values are too short: at n = 6 they hold the mean in 85% of samples, this
    one in 94 to 95% (`benchmarks/honesty.py`). None of fewer than five values, or where too many resamples have no
    spread.

    Source: B. Efron (1981), Nonparametric standard errors and confidence intervals; P. Hall (1988).
    """
    n = len(values)
    if n < LEAST_RESAMPLED:
        return None
    observed = np.asarray(values, dtype=float)
    mean, error = observed.mean(), observed.std(ddof=1) / np.sqrt(n)
    drawn = observed[_places(n)]
    means = drawn.mean(axis=1)
    spreads = np.sqrt(np.square(drawn - means[:, None]).sum(axis=1) / (n - 1))
    usable = spreads > 1e-9 * spreads.max()  # equal values differ in the last bits of their deviations
    if usable.sum() < RESAMPLES * (1 - LEVEL / 5):
        return None  # a share of the resamples like that would move the ends
    pivots = (means[usable] - mean) / (spreads[usable] / np.sqrt(n))
    low, high = np.quantile(pivots, (LEVEL / 2, 1 - LEVEL / 2))
    return float(mean - high * error), float(mean - low * error)


@lru_cache(maxsize=4)
def _places(n: int) -> NDArray[np.int64]:
    return stream(0, "bootstrap", n).integers(n, size=(RESAMPLES, n))


POWER = 0.8
"""Share of sweeps in which a difference is to be detected."""
MOST_SEEDS = 10_000
NODES, WEIGHTS = np.polynomial.legendre.leggauss(256)
"""Quadrature over -1 to 1; scipy's noncentral t is not a number for many arguments."""


def power(effect: float, n: int, level: float) -> float:
    """Probability that a two-sided paired t-test at this level detects a difference of `effect` standard deviations.

    The deviation is that of the paired differences. Source: J. Cohen (1988), Statistical power analysis, chapter 2.
    """
    free = n - 1
    # T = (Z + shift) / S, and S^2 is chi-squared over its degrees of freedom: an integral over the quantiles of S.
    borders = stats.t.isf(level / 2, free) * np.sqrt(stats.chi2.ppf((NODES + 1) / 2, free) / free)
    shift = effect * n**0.5
    beyond = stats.norm.cdf(shift - borders) + stats.norm.cdf(-shift - borders)
    return float(WEIGHTS @ beyond / 2)


@cache
def detectable_effect(n: int, level: float) -> float:
    """The difference, in standard deviations of the paired differences, that n seeds detect with a power of 0.8."""
    high = 1.0
    while power(high, n, level) < POWER:
        high *= 2
    return float(brentq(lambda effect: power(effect, n, level) - POWER, 0.0, high, xtol=1e-10))


@cache
def seeds_needed(effect: float, level: float) -> int | None:
    """The fewest seeds that detect such a difference with a power of 0.8; None where that is more than 10,000."""
    if power(effect, MOST_SEEDS, level) < POWER:
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= POWER else (middle, high)
    return high
