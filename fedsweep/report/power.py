"""What a paired t-test of so many seeds can see: the smallest difference, and the seeds that one would take."""

from functools import cache

import numpy as np
from scipy import stats
from scipy.optimize import brentq

POWER = 0.8
"""Share of sweeps in which a difference is to be detected."""
MOST_SEEDS = 10_000
NODES, WEIGHTS = np.polynomial.legendre.leggauss(256)
"""Of a quadrature over -1 to 1; scipy's noncentral t is not a number for many arguments."""


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
