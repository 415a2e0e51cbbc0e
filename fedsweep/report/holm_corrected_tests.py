"""Tests of arms against their baseline, paired by seed, with Holm's correction for the number of tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from fedsweep.report.intervals_and_power import (
    LEVEL,
    Interval,
    bootstrap_interval,
    detectable_effect,
    margin,
    negated,
    seeds_interval,
    seeds_needed,
    t_interval,
)
from fedsweep.report.sequential_tests import Conclusion
from fedsweep.report.sequential_tests import Verdict as Sequential

ROUNDING = 1e-12  # paired differences with a smaller spread, relative to the values, differ only by rounding
PATTERNS = 2**14  # number of sign patterns: all for up to 14 pairs, a random sample for more pairs

Verdict = Literal["higher", "lower", "no detectable difference", "constant", "too few seeds"] | Conclusion


@dataclass(frozen=True)
class Comparison:
    """The difference between an arm and its baseline (arm minus baseline), in the unit of the objective.

    `interval` and the p-values are None if there are fewer than two common seeds. They are also None if all seeds have
    the same non-zero difference, since a standard deviation of 0 would make any difference significant. If the
    difference is 0 for all seeds, the p-values are 1 and `interval` is None.
    """

    seeds: tuple[int, ...]
    difference: float | None
    interval: Interval | None = None
    """The 95% interval by Student's t, uncorrected."""
    p: float | None = None
    """The p-value of the two-sided paired t-test."""
    p_holm: float | None = None
    bootstrap: Interval | None = None
    """The 95% interval by the studentized bootstrap, uncorrected; None for fewer than five pairs."""
    p_exact: float | None = None
    """The p-value of the sign-flip test, which assumes only a symmetric distribution; at least 2 / 2^n for n pairs."""
    p_exact_holm: float | None = None
    images: Interval | None = None
    """The 95% interval over seeds and groups of images, uncorrected; None if the predictions were not recorded.

    With seeds until decided, it is valid at every look.
    """
    images_equivalence: Interval | None = None
    """The 90% interval of two one-sided tests over seeds and groups of images; None without tests of equivalence."""
    effect: float | None = None
    """Hedges' g of the paired differences."""
    spread: float | None = None
    """The standard deviation of the paired differences (divisor n - 1); None if all differences are equal."""
    level: float = LEVEL
    """The level of Holm's first step: 0.05 divided by the number of tests."""
    tests: int = 1
    """The number of tests that Holm's correction covers."""
    correction: Literal["Holm", "Bonferroni"] = "Holm"
    """The correction of `p_holm` and `p_exact_holm`: Bonferroni's for a pair that was picked among several."""
    sequential: Sequential | None = None
    """The verdict of a sweep with seeds until decided; None if the number of seeds was fixed in advance.

    `interval` is then the interval by which the comparison was judged, and there are no p-values.
    """

    @property
    def verdict(self) -> Verdict:
        """The conclusion at level 0.05 after Holm's correction.

        `constant` means that no test is possible, because all seeds have the same non-zero difference. With seeds until
        decided, the conclusion is that of the sequential tests.
        """
        if self.sequential is not None:
            return self.sequential.verdict
        if self.difference is None or len(self.seeds) < 2:
            return "too few seeds"
        if self.p_holm is None:
            return "constant"
        if self.p_holm > LEVEL:
            return "no detectable difference"
        return "higher" if self.difference > 0 else "lower"

    @property
    def simultaneous(self) -> Interval | None:
        """The simultaneous 95% interval, at Bonferroni's level, which is the attribute `level`.

        In at least 95% of sweeps, the intervals of all tests that the correction covers contain their true differences.
        The interval is Student's t or, with seeds until decided, a repeated confidence interval. It is None for a
        single test, whose own interval has this property.

        Source: O. J. Dunn (1961), Multiple comparisons among means.
        """
        if self.difference is None or self.spread is None or self.level >= LEVEL:
            return None
        if self.sequential is not None:
            return self.sequential.simultaneous_interval
        half = margin(self.spread, len(self.seeds), self.level)
        return self.difference - half, self.difference + half

    @property
    def direction_only(self) -> bool:
        """True if the verdict is `higher` or `lower`, but the simultaneous interval contains 0.

        Holm's method can detect differences that Bonferroni's method does not, and there are no intervals that match
        Holm's method. The opposite never occurs: if the simultaneous interval excludes 0, the difference is
        significant.
        """
        found = self.simultaneous
        return found is not None and self.verdict in ("higher", "lower") and found[0] <= 0 <= found[1]

    @property
    def only_these_images(self) -> bool:
        """True if the interval over seeds excludes 0 and the interval over seeds and images contains 0."""
        if self.interval is None or self.images is None:
            return False
        return not self.interval[0] <= 0 <= self.interval[1] and self.images[0] <= 0 <= self.images[1]

    @property
    def detectable(self) -> float | None:
        """The smallest true difference, in the unit of the objective, that would be detected with a power of 0.8.

        The test is a paired t-test with the seeds of this comparison, at its `level`. The true standard deviation of
        the differences is assumed to be equal to the observed standard deviation.
        """
        return None if self.spread is None else self.spread * detectable_effect(len(self.seeds), self.level)

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds with which the observed difference would be detected with a power of 0.8.

        The test is a paired t-test at the comparison's `level`. The number is None if no test is possible, if the
        difference is already detected, or if more than 10,000 seeds are needed.
        """
        if self.difference is None or self.spread is None or self.verdict != "no detectable difference":
            return None
        return seeds_needed(abs(self.difference) / self.spread, self.level)

    @property
    def seeds_range(self) -> tuple[int | None, int | None] | None:
        """An 80% interval of `seeds_needed`, because the standard deviation of few differences is a rough estimate.

        An end is None if it is more than 10,000. The interval is None if no test is possible, or if the difference is
        already detected.
        """
        if self.difference is None or self.spread is None or self.verdict != "no detectable difference":
            return None
        return seeds_interval(self.difference, self.spread, len(self.seeds), self.level)

    @property
    def exact_can_tell(self) -> bool:
        """True if there are enough common seeds for an exact test to detect a difference after Holm's correction."""
        return least_exact(len(self.seeds)) <= self.level


def paired_tests(
    pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]], choices: int = 1
) -> list[Comparison]:
    """Compare each arm with its baseline, and apply Holm's correction to the p-values.

    Args:
        pairs: Two dicts from seed to objective for each comparison: the arm's, and that of the arm's baseline.
        choices: The number of pairs among which each given pair was picked. The p-values are also multiplied by this
            number (Bonferroni's correction), because a pair may have been picked for its large difference.
    """
    found = [_paired(arm, baseline) for arm, baseline in pairs]
    p = [one.p for one in found if one.p is not None]
    corrected, exact = iter(holm(p)), iter(holm([one.p_exact for one in found if one.p_exact is not None]))
    tests = max(len(p), 1)
    level = LEVEL / (tests * choices)
    # Comparisons without a p-value have the correction too, because it is in the headings of their columns.
    found = [
        replace(one, level=level, tests=tests, correction="Holm" if choices == 1 else "Bonferroni") for one in found
    ]
    return [
        one
        if one.p is None
        else replace(one, p_holm=min(1, choices * next(corrected)), p_exact_holm=min(1, choices * next(exact)))
        for one in found
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, in the order of `p_values`.

    The method multiplies the smallest of m p-values by m, the next by m - 1, and so on. A corrected p-value is at most
    1, and at least as large as the corrected value of every smaller p-value.

    Source: S. Holm (1979), A simple sequentially rejective multiple test procedure.

    >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, np.arange(len(p), 0, -1) * p[order]))
    return [float(value) for value in adjusted]


def least_exact(n: int) -> float:
    """Return the smallest possible p-value of a two-sided sign-flip or Wilcoxon test of `n` pairs.

    The smallest p-value occurs if all differences have the same sign.

    >>> least_exact(3), least_exact(5), least_exact(6)
    (0.25, 0.0625, 0.03125)
    """
    return min(1.0, 2.0 ** (1 - n))


def pairs_for_exact(level: float) -> int:
    """Return the smallest number of pairs for which the p-value of an exact test can be at most `level`.

    >>> pairs_for_exact(0.05), pairs_for_exact(0.05 / 3)
    (6, 7)
    """
    return math.ceil(1 - math.log2(level))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip test of paired differences.

    The test flips the signs of the differences in all possible ways. The p-value is the share of sign patterns for
    which the mean is at least as far from 0 as the observed mean. For more than 14 pairs, the test uses only the
    observed pattern and 16,384 random patterns, which are the same in every call.
    """
    test = stats.permutation_test(
        (np.asarray(differences),), np.mean, permutation_type="samples", n_resamples=PATTERNS, vectorized=True,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


def hedges_g(differences: Sequence[float]) -> float:
    """Return Hedges' g, the effect size of n paired differences.

    Hedges' g is the mean of the differences divided by their standard deviation (divisor n - 1), times a correction
    factor for small n, 1 - 3 / (4 (n - 1) - 1). For n = 2, this factor would be 0, so no correction is applied.

    Source: L. Hedges (1981), Distribution theory for Glass's estimator of effect size.
    """
    n = len(differences)
    correction = 1 - 3 / (4 * (n - 1) - 1) if n > 2 else 1.0
    return float(np.mean(differences) / np.std(differences, ddof=1) * correction)


def mirrored(found: Comparison) -> Comparison:
    """Return the comparison in the opposite direction: baseline minus arm. The p-values are the same."""
    return replace(
        found,
        difference=None if found.difference is None else -found.difference,
        interval=negated(found.interval),
        bootstrap=negated(found.bootstrap),
        images=negated(found.images),
        images_equivalence=negated(found.images_equivalence),
        effect=None if found.effect is None else -found.effect,
        sequential=None if found.sequential is None else found.sequential.mirrored(),
    )


def sequential_comparison(
    arm: Mapping[int, float], other: Mapping[int, float], verdict: Sequential, counted: Sequence[int], tests: int = 1
) -> Comparison:
    """Return the comparison of two arms whose `verdict` was reached look by look.

    Args:
        arm: The objective of each finished seed of the arm.
        other: The objective of each finished seed of the other arm.
        verdict: The verdict.
        counted: The seeds up to the look of the verdict, failed ones included. Later seeds do not count.
        tests: The number of comparisons that were judged together.
    """
    seeds = tuple(sorted(arm.keys() & other.keys() & {*counted}))
    differences = [arm[seed] - other[seed] for seed in seeds]
    varied = verdict.interval is not None
    return Comparison(
        seeds,
        verdict.difference,
        interval=verdict.judged_interval,
        effect=hedges_g(differences) if varied else None,
        spread=float(np.std(differences, ddof=1)) if varied else None,
        level=LEVEL / tests,
        tests=tests,
        sequential=verdict,
    )


def _paired(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    seeds = tuple(sorted(arm.keys() & baseline))
    differences = [arm[seed] - baseline[seed] for seed in seeds]
    difference = float(np.mean(differences)) if seeds else None
    if len(seeds) < 2:
        return Comparison(seeds, difference)
    # Exact equality would miss 0.61 - 0.60 and 0.51 - 0.50, whose spread of 1e-17 would make any test significant.
    rounding = ROUNDING * max(abs(side[seed]) for side in (arm, baseline) for seed in seeds)
    if max(map(abs, differences)) <= rounding:
        return Comparison(seeds, 0.0, p=1.0, p_exact=1.0)
    if np.ptp(differences) <= rounding:
        return Comparison(seeds, difference)
    return Comparison(
        seeds,
        difference,
        interval=t_interval(differences),
        p=float(stats.ttest_1samp(differences, 0.0).pvalue),
        bootstrap=bootstrap_interval(differences),
        p_exact=sign_flip(differences),
        effect=hedges_g(differences),
        spread=float(np.std(differences, ddof=1)),
    )
