"""The rules that `sequential.py` compares with fedsweep's rule: fixed designs, other boundaries, and AdaStop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from fedsweep.report.sequential_tests import HIGHER, LOWER, OPEN, WITHIN
from fedsweep.report.spending_boundaries import t_boundaries

Array = np.ndarray
AT_MOST, LEVEL = 20, 0.05
Spending = Callable[[Array, Array], Array]
"""A function of the levels (one-sided) and of the shares of the seeds: the probability spent so far."""


def power_family(exponent: float) -> Spending:
    """Return the error spending of Kim and DeMets (1987)."""
    return lambda level, share: level * share**exponent


def obrien_fleming(level: Array, share: Array) -> Array:
    """Return the error spending of Lan and DeMets (1983) that resembles the boundaries of O'Brien and Fleming."""
    return 2 * stats.norm.sf(stats.norm.isf(level / 2) / np.sqrt(share))


def pocock(level: Array, share: Array) -> Array:
    """Return the error spending of Lan and DeMets (1983) that resembles the boundaries of Pocock."""
    return level * np.log(1 + (np.e - 1) * share)


def hwang(gamma: float) -> Spending:
    """Return the error spending of Hwang, Shih and DeCani (1990)."""
    return lambda level, share: level * (1 - np.exp(-gamma * share)) / (1 - np.exp(-gamma))


def spending_tables(comparisons: int, first: int, different: Spending, equivalent: Spending) -> tuple[Array, Array]:
    """Return the boundaries of both families of tests, by the number of hypotheses left and of seeds."""
    shares = LEVEL / np.arange(1, comparisons + 1)[:, None]
    looks = np.arange(first, AT_MOST + 1)[None] / AT_MOST
    tables = np.full((2, comparisons + 1, AT_MOST + 1), np.inf)
    for table, spent in zip(tables, (different(shares / 2, looks), equivalent(shares, looks)), strict=True):
        table[1:, first:] = t_boundaries(np.asarray(spent), first)
    return tables[0], tables[1]


def anytime_tables(comparisons: int, variance: float) -> tuple[Array, Array]:
    """Return the boundaries of an e-process for the t statistic, with Holm's method for e-values.

    The e-process is the ratio of the likelihoods of the t statistic for an effect size with a normal prior and for an
    effect size of 0. A two-sided e-process at twice the level stands in for the one-sided e-processes.

    Source: H. Wang and A. Ramdas (2025), Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance, the e-process with a right Haar prior of the standard deviation and a normal prior of the effect size.

    Args:
        comparisons: The number of comparisons.
        variance: The variance of the prior.
    """
    tables = np.full((2, comparisons + 1, AT_MOST + 1), np.inf)
    for n in range(2, AT_MOST + 1):
        growth, free = 1 + n * variance, n - 1
        for table, level in zip(tables, (LEVEL, 2 * LEVEL), strict=True):
            # The e-process reaches j / level where (1 + t^2 / free) / (1 + t^2 / (free * growth)) equals `ratio`.
            reached = np.arange(1, comparisons + 1) / level * np.sqrt(growth)
            ratio = reached ** (2 / n)
            square = free * (ratio - 1) / np.maximum(1 - ratio / growth, 1e-300)
            table[1:, n] = np.where(ratio < growth, np.sqrt(square), np.inf)
    return tables[0], tables[1]


def moments(values: Array) -> tuple[Array, Array]:
    """Return the means of the first n values and their standard errors, for all n along the last axis."""
    count = np.arange(1, values.shape[-1] + 1)
    centred = values - values[..., :1]
    means = centred.cumsum(axis=-1) / count
    squares = np.square(centred).cumsum(axis=-1) - count * means**2
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.sqrt(np.maximum(squares, 0) / (count - 1) / count)
    return means + values[..., :1], errors


def decide(
    conclusions: Array, mean: Array, error: Array, borders: tuple[Array, Array], near_first: bool = False
) -> None:
    """Apply Holm's steps of both families at one look.

    Args:
        conclusions: The conclusions, which the function changes.
        mean: The means of the differences.
        error: The standard errors of the means.
        borders: The boundaries of both families, indexed by the number of hypotheses left.
        near_first: Call a comparison `within` that both families could decide.
    """
    total = conclusions.shape[1]
    families = list(zip(((HIGHER, LOWER), (WITHIN,)), borders, strict=True))
    for kinds, border in families[::-1] if near_first else families:
        while True:
            left = total - np.isin(conclusions, kinds).sum(axis=1)
            reach = border[np.maximum(left, 1)][:, None] * error
            inside = np.abs(mean) + reach < 1 if WITHIN in kinds else np.abs(mean) > reach
            hits = (conclusions == OPEN) & inside
            if not hits.any():
                break
            conclusions[hits] = WITHIN if WITHIN in kinds else np.where(mean[hits] > 0, HIGHER, LOWER)


def stopped(values: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the conclusions and the numbers of seeds of a rule with the given boundaries."""
    means, errors = moments(values[:, :, :AT_MOST])
    conclusions = np.zeros(values.shape[:2], np.int64)
    seeds = np.full(values.shape[:2], AT_MOST)
    for n in range(2, AT_MOST + 1):
        before = conclusions == OPEN
        decide(conclusions, means[..., n - 1], errors[..., n - 1], (tables[0][:, n], tables[1][:, n]))
        seeds[before & (conclusions != OPEN)] = n
    return conclusions, seeds


def fixed(values: Array, near_first: bool = False) -> dict[int, Array]:
    """Return the conclusions of a fixed design with n seeds, for every n from 2.

    The design uses the same tests without a correction for looks: Holm's method for t-tests, and for two one-sided
    t-tests. If `near_first` is true, comparisons that both tests could decide are `within`.
    """
    means, errors = moments(values)
    found = {}
    for n in range(2, values.shape[2] + 1):
        shares = np.concatenate([[np.nan], LEVEL / np.arange(1, values.shape[1] + 1)])
        borders = stats.t.isf(shares / 2, n - 1), stats.t.isf(shares, n - 1)
        found[n] = np.zeros(values.shape[:2], np.int64)
        decide(found[n], means[..., n - 1], errors[..., n - 1], borders, near_first)
    return found


def same_power(shares: dict[int, float], wanted: float) -> int:
    """Return the smallest fixed number of seeds with at least the wanted share of right decisions.

    If no number of seeds reaches the share, return the smallest number within 0.5 points of the best share.
    """
    best = max(shares.values())
    return min(n for n, share in shares.items() if share >= (wanted if wanted <= best else best - 0.005))


def adastop_class() -> Any:
    """Return AdaStop's class of comparisons, with faster permutations, or None if the package is not installed."""
    try:
        from adastop import MultipleAgentsComparator
    except ImportError:
        return None

    class AtOnce(MultipleAgentsComparator):  # type: ignore[misc]
        """AdaStop with arrays instead of loops over permutations.

        The package enumerates all 252 permutations of the first look at two times 5 seeds. At later looks, it keeps the
        permutations within the last boundary, and permutes the new seeds at random for all of them but the first. So
        does this class, with other random numbers.
        """

        def drawn(self, count: int, n: int) -> Array:
            """Return for each of `count` permutations which n of 2 n results belong to the first arm."""
            return np.asarray(self.rng.random_sample((count, 2 * n)).argsort(axis=1)[:, :n])

        def compute_mean_diffs(self, k: int, Z: Any) -> Any:  # noqa: N803, the package's name
            """Return the differences of the means for each pair and permutation, summed over k + 1 looks."""
            n = int(self.n[0])
            if k == 0:
                every = np.array([*combinations(range(2 * n), n)])
                self.normalization = len(every)
            else:
                kept = np.abs([*self.mean_diffs.values()]).max(axis=0) <= self.boundary[-1][1]
            for pair in self.current_comparisons:
                if k == 0:
                    before, chosen = 0.0, every
                else:
                    before = np.asarray(self.mean_diffs[str(pair)])[kept]
                    chosen = np.concatenate([[np.arange(n)], self.drawn(len(before) - 1, n)])
                first = np.zeros((len(chosen), 2 * n), bool)
                np.put_along_axis(first, chosen, True, axis=1)
                values = np.concatenate([Z[arm][k * n : (k + 1) * n] for arm in pair])
                one, other = (np.broadcast_to(values, first.shape)[side].reshape(-1, n) for side in (first, ~first))
                self.mean_diffs[str(pair)] = (before + one.mean(axis=1) - other.mean(axis=1)).tolist()
            return self.mean_diffs

    return AtOnce


def adastop(
    compare: Any, trials: Array, seed: int, level: float, group: int = 5, permutations: int = 1000
) -> tuple[Array, Array]:
    """Return AdaStop's conclusions and numbers of seeds, one sweep after another.

    AdaStop's answer "equal" at its last look is recorded as open, because it is not a proof of equivalence.

    Args:
        compare: The class from `adastop_class`.
        trials: The results, with the axes sweep, arm (the baseline first) and seed.
        seed: The seed of the permutations.
        level: The level, called alpha by AdaStop.
        group: The number of seeds between two looks.
        permutations: The number of permutations.
    """
    arms = trials.shape[1]
    conclusions = np.zeros((len(trials), arms - 1), np.int64)
    seeds = np.full(conclusions.shape, AT_MOST)
    pairs = np.empty(arms - 1, object)  # of tuples: AdaStop names pairs by `str`, which is slow for arrays
    pairs[:] = [(0, arm) for arm in range(1, arms)]
    for sweep, results in enumerate(trials):
        test = compare(n=group, K=AT_MOST // group, B=permutations, alpha=level, comparisons=pairs, seed=seed + sweep)
        for look in range(group, AT_MOST + 1, group):
            test.partial_compare({str(arm): results[arm, :look] for arm in range(arms)}, verbose=False)
            for arm, pair in enumerate(pairs):
                answer = test.decisions[str(pair)]
                if conclusions[sweep, arm] == OPEN and answer in ("larger", "smaller"):
                    # The answer is about the baseline, which is the first of the pair.
                    conclusions[sweep, arm] = LOWER if answer == "larger" else HIGHER
                    seeds[sweep, arm] = look
            if test.is_finished:
                break
    return conclusions, seeds
