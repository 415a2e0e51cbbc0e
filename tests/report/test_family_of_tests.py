"""The family of tests of a sweep: Holm's correction, simultaneous intervals, and the pairs that are declared."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.holm_corrected_tests import mirrored, paired_tests
from fedsweep.report.intervals_and_power import margin
from fedsweep.results.declared_comparisons import DeclaredComparison
from tests.report.conftest import Trials, make_manifest

ENDS = {
    4: [0.5010, 0.5220, 0.4915, 0.5123],
    8: [0.6012, 0.6204, 0.5921, 0.6033],
    16: [0.6100, 0.6137, 0.6000, 0.6111],
    32: [0.6300, 0.6312, 0.6203, 0.6401],
}
WORST = "accuracy/worst_domain"


def compare(arm: int, against: int, metric: str | None = None) -> DeclaredComparison:
    return DeclaredComparison(arm={"lora.rank": arm}, against={"lora.rank": against}, metric=metric)


def family(comparisons, **changes):
    """Return the comparison with the baseline of each rank, and the declared tests keyed by both ranks and metric."""
    manifest = make_manifest(comparisons=comparisons, seeds=(0, 1, 2, 3), **changes)
    arms = summarise(manifest, Trials().arms(ENDS).records)
    by_key = {one.key: one.arm.values["lora.rank"] for one in arms}
    declared = {
        (by_key[test.pair.arm], by_key[test.pair.against], test.pair.metric): test
        for one in arms
        for test in one.declared
    }
    return {one.arm.values["lora.rank"]: one.comparison for one in arms if one.comparison}, declared


def reference(pairs) -> dict:
    """Return Holm's p-values of all pairs of ranks, computed by SciPy and statsmodels."""
    p = [stats.ttest_rel(ENDS[one], ENDS[other]).pvalue for one, other in pairs]
    return dict(zip(pairs, multipletests(p, method="holm")[1], strict=True))


def test_the_correction_covers_the_comparisons_with_the_baseline_and_the_declared_ones():
    baseline, declared = family((compare(4, 16), compare(32, 16)))
    wanted = reference([(4, 8), (16, 8), (32, 8), (4, 16), (32, 16)])
    found = {(rank, 8): one for rank, one in baseline.items()}
    found |= {ranks[:2]: test.comparison for ranks, test in declared.items()}
    assert {pair: one.p_holm for pair, one in found.items()} == pytest.approx(wanted)
    assert {one.tests for one in found.values()} == {5}
    assert {one.level for one in found.values()} == {0.05 / 5}
    alone = family(())[0]
    assert {rank: one.p_holm for rank, one in alone.items()} == pytest.approx(
        {rank: p for (rank, _), p in reference([(4, 8), (16, 8), (32, 8)]).items()}
    )


def test_a_declared_comparison_with_the_baseline_is_one_test_in_either_direction():
    (baseline, declared), (other, back) = family((compare(16, 8),)), family((compare(8, 16),))
    assert declared[16, 8, "accuracy/mean"].comparison == baseline[16]
    assert declared[16, 8, "accuracy/mean"].with_baseline
    assert {one.tests for one in (*baseline.values(), *other.values())} == {3}
    turned = back[8, 16, "accuracy/mean"].comparison
    assert (turned.difference, turned.p_holm) == (-other[16].difference, other[16].p_holm)
    assert turned.interval == (-other[16].interval[1], -other[16].interval[0])
    assert turned.simultaneous == pytest.approx((-other[16].simultaneous[1], -other[16].simultaneous[0]))
    assert turned.verdict == {"higher": "lower", "lower": "higher"}.get(other[16].verdict, other[16].verdict)
    assert mirrored(turned) == other[16]


def test_the_same_pair_by_another_metric_is_another_test():
    baseline, declared = family((compare(16, 8, WORST), compare(32, 16)))
    assert {one.tests for one in baseline.values()} == {5}
    second = declared[16, 8, WORST]
    assert not second.with_baseline
    assert second.comparison.difference == pytest.approx(baseline[16].difference)  # made up so in the fixture


def test_all_pairs_are_each_tested_once_and_those_with_the_baseline_in_its_direction():
    baseline, declared = family("all")
    assert {frozenset(ranks[:2]) for ranks in declared} == {*map(frozenset, itertools.combinations(ENDS, 2))}
    assert {one.tests for one in baseline.values()} == {6}
    assert {ranks[0] for ranks, test in declared.items() if test.with_baseline} == {4, 16, 32}
    wanted = reference([ranks[:2] for ranks in declared])
    assert {ranks[:2]: test.comparison.p_holm for ranks, test in declared.items()} == pytest.approx(wanted)


def test_without_a_baseline_the_family_contains_only_declared_comparisons():
    baseline, declared = family((compare(4, 16), compare(32, 16)), baseline=None)
    assert baseline == {}
    assert {test.comparison.tests for test in declared.values()} == {2}


@given(st.integers(2, 6), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_simultaneous_interval_without_zero_implies_a_significant_difference(n, count, seed):
    rng = np.random.default_rng(seed)
    baseline = dict.fromkeys(range(n), 0.0)
    pairs = [(dict(enumerate(rng.normal(rng.choice([0, 1, 3]), 0.5, n))), baseline) for _ in range(count)]
    for one in paired_tests(pairs):
        if count == 1:
            assert one.simultaneous is None
            continue
        low, high = one.simultaneous
        wanted = stats.t.interval(1 - 0.05 / count, n - 1, one.difference, one.spread / n**0.5)
        assert (low, high) == pytest.approx(wanted)
        assert low < one.interval[0] < one.interval[1] < high
        assert low <= 0 <= high or one.p_holm <= 0.05
        assert one.direction_only == (low <= 0 <= high and one.p_holm <= 0.05)


def test_a_difference_that_holms_method_alone_detects_has_only_a_direction():
    """The smaller of two p-values is 0.004, so that the larger one, 0.04, is significant in Holm's second step."""
    clear, faint = (dict(enumerate(values)) for values in ([1.0, 1.1, 1.2, 1.05], [0.1, 0.4, 0.25, 0.55]))
    baseline = dict.fromkeys(range(4), 0.0)
    first, second = paired_tests([(clear, baseline), (faint, baseline)])
    assert 0.025 < second.p < 0.05
    assert second.verdict == "higher"
    assert second.direction_only
    assert not first.direction_only


PAIRS = {
    "independent": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "baseline": [(arm, 0) for arm in range(1, 5)],
    "all pairs": [*itertools.combinations(range(5), 2)],
}


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("design", PAIRS)
def test_simultaneous_intervals_jointly_contain_all_differences_in_95_percent_of_sweeps(design, n):
    """Independent tests leave no slack: a level of 0.05 / 3 instead of 0.05 / 4 would give 93.4%."""
    pairs, sweeps = PAIRS[design], 40_000
    noise = np.random.default_rng(0).standard_normal((sweeps, 8, n))
    differences = np.stack([noise[:, one] - noise[:, other] for one, other in pairs], axis=1)  # true differences are 0
    away = abs(differences.mean(axis=2)) / differences.std(axis=2, ddof=1)
    covered = (away <= margin(1.0, n, _level(len(pairs)))).all(axis=1).mean()
    error = 3 * (0.05 * 0.95 / sweeps) ** 0.5
    assert covered >= 0.95 - error
    if design == "independent":
        assert covered == pytest.approx((1 - 0.05 / len(pairs)) ** len(pairs), abs=error)
    assert (away <= margin(1.0, n, 0.05)).all(axis=1).mean() < 0.9, "uncorrected intervals do not"


def _level(tests: int) -> float:
    """Return the level of the simultaneous intervals of that many comparisons, as the report computes it."""
    sides = dict(enumerate([0.1, 0.3, 0.2])), dict.fromkeys(range(3), 0.0)
    (level,) = {one.level for one in paired_tests([sides] * tests)}
    return level
