"""Boundaries of repeated t-tests that spend a given error probability look by look.

The tests see the values of one sample one after another and test its mean after each value. The exact joint
distribution of the successive t statistics is needed, because for few values it is far from that of a Brownian motion.
The values enter only through r_n, their sum divided by the root of their sum of squares. If the values are normal with
a mean of 0, then r_n is a Markov chain: r_(n+1) = (r_n + y) / sqrt(1 + y^2), where y * sqrt(n) follows Student's t
distribution with n degrees of freedom and is independent of r_2, ..., r_n. The reason is that the direction of a
spherically symmetric vector is independent of its length. The t statistic is a monotone function of r_n, so a
recursive integration in one dimension is exact up to the width of its cells.

Sources: K. Lan and D. DeMets (1983), Discrete sequential boundaries for clinical trials, for error spending;
P. Armitage, C. McPherson and B. Rowe (1969), Repeated significance tests on accumulating data, for the recursion.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

EDGES = np.linspace(-5.0, 7.0, 241)
"""The edges of the cells of the recursion. The scale is normal: z is the normal quantile of a t statistic's p-value."""
CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
NEVER = float(special.ndtr(-EDGES[-1]))
"""A look that may spend less than this probability has an infinite boundary."""


def spent_by(level: float | Array, values: Array, at_most: int, exponent: float) -> Array:
    """Return the error probability that may be spent up to each number of values, `level` * (n / `at_most`)^exponent.

    An exponent of 1 gives boundaries that resemble those of Pocock. An exponent of 3 gives boundaries that resemble
    those of O'Brien and Fleming.

    Source: K. Kim and D. DeMets (1987), Design and analysis of group sequential tests based on the type I error
    spending rate function, Eq. 2.
    """
    return np.asarray(level * (values / at_most) ** exponent, dtype=float)


def t_boundaries(spent: Array, first: int) -> Array:
    """Return the boundaries of one-sided repeated t-tests, as t statistics.

    Under a mean of 0, the probability that the t statistic reaches its boundary at one of the first k looks is
    `spent[:, k - 1]`. A test that uses a row's boundaries on both sides spends at most twice that probability.

    Args:
        spent: The probabilities, at least 0 and increasing along each row. Rows are separate tests, columns are looks.
        first: The number of values at the first look, at least 2. Each further look has one further value.

    Returns:
        An array of the shape of `spent`, infinite for looks that may spend next to nothing.
    """
    looks = range(first, first + spent.shape[1])
    normal = normal_boundaries(spent, (_t_step(n) for n in looks[:-1]))
    degrees = np.array(looks, dtype=float) - 1
    return np.where(np.isinf(normal), np.inf, _student(np.minimum(normal, EDGES[-1]), degrees))


def normal_boundaries(spent: Array, steps: Iterable[Array]) -> Array:
    """Return the boundaries of one-sided repeated tests of a Markov chain, as quantiles of the normal distribution.

    Args:
        spent: The probability that each row's test may spend up to each look.
        steps: An array for each look but the last: for each cell (rows) and each edge (columns), the probability that
            the chain is above the edge at the next look if it is at the cell's centre at this look.
    """
    found = np.full(spent.shape, np.inf)
    above = np.broadcast_to(special.ndtr(-EDGES), (len(spent), len(EDGES)))
    remaining = iter(steps)
    for look in range(spent.shape[1]):
        allowed = spent[:, look] - (spent[:, look - 1] if look else 0.0)
        logs = np.log(np.maximum(np.minimum.accumulate(above, axis=1), 1e-300))
        for row in np.flatnonzero(allowed > NEVER):
            found[row, look] = np.interp(-np.log(allowed[row]), -logs[row], EDGES)
        if look + 1 < spent.shape[1]:
            kept = np.maximum(above - np.where(allowed > NEVER, allowed, 0.0)[:, None], 0.0)
            above = (kept[:, :-1] - kept[:, 1:]) @ next(remaining)  # only paths below the boundary continue
    return found


def _t_step(n: int) -> Array:
    """Return the probability that the t statistic of n + 1 values is above each edge, for each cell at n values."""
    before = _ratio(_student(CENTRES, np.array(n - 1.0)), n)[:, None]
    after = _ratio(_student(EDGES, np.array(float(n))), n + 1)[None, :]
    # Symmetry turns edges below 0 into edges above 0, for which the formula below needs no case distinctions.
    sign = np.where(after < 0, -1.0, 1.0)
    upper = _above(sign * after, sign * before, n)
    return np.where(sign < 0, 1 - upper, upper)


def _above(edge: Array, ratio: Array, n: int) -> Array:
    """Return the probability that r_(n+1) is at least `edge`, which is at least 0, if r_n is `ratio`.

    With y = tan(u), r_(n+1) equals sqrt(1 + r_n^2) * sin(u + arctan(r_n)), so that u lies between two angles.
    """
    turn = np.arctan(ratio)
    least = np.arcsin(np.clip(edge / np.sqrt(1 + ratio**2), -1, 1))
    low, high = least - turn, np.pi - least - turn
    below, root = np.zeros(low.shape), np.sqrt(n)
    special.stdtr(n, -np.tan(low) * root, out=below, where=low < np.minimum(high, np.pi / 2))
    beyond = np.zeros(low.shape)
    special.stdtr(n, -np.tan(high) * root, out=beyond, where=(low < high) & (high < np.pi / 2))
    return below - beyond


def _student(normal: Array, degrees: Array) -> Array:
    """Return the t statistics with the same one-sided p-values as standard normal statistics."""
    return np.asarray(-np.sign(normal) * special.stdtrit(degrees, special.ndtr(-np.abs(normal))))


def _ratio(t: Array, n: int) -> Array:
    """Return the sum of n values divided by the root of their sum of squares, as a function of their t statistic."""
    return np.asarray(t * np.sqrt(n) / np.sqrt(n - 1 + t**2))
