"""Bootstrap, exact tests, effect sizes and numbers of seeds, compared with loops, brute force and statsmodels."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.power import TTestPower

from fedsweep.report.holm_corrected_tests import (
    Comparison,
    hedges_g,
    least_exact,
    paired_tests,
    pairs_for_exact,
    sign_flip,
)
from fedsweep.report.intervals_and_power import (
    POWER,
    bootstrap_interval,
    detectable_effect,
    power,
    seeds_interval,
    seeds_needed,
    t_interval,
)

DIFFERENCES = st.lists(st.integers(-1000, 1000).map(lambda count: count / 10_000), min_size=2, max_size=9)


def one(differences: list[float]) -> Comparison:
    baseline = dict.fromkeys(range(len(differences)), 0.5)
    return paired_tests([({seed: 0.5 + more for seed, more in enumerate(differences)}, baseline)])[0]


@given(DIFFERENCES)
@settings(max_examples=20)
def test_the_sign_flip_test_tries_all_sign_patterns(differences):
    observed = abs(sum(differences))
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * one for sign, one in zip(pattern, differences, strict=True))) for pattern in signs]
    assert sign_flip(differences) == pytest.approx(sum(total >= observed - 1e-12 for total in sums) / len(sums))


@given(st.integers(2, 10))
def test_least_exact_returns_the_smallest_p_of_an_exact_test(n):
    clear = [0.1 + 0.01 * place for place in range(n)]
    assert sign_flip(clear) == least_exact(n) == pytest.approx(stats.wilcoxon(clear, method="exact").pvalue)


@pytest.mark.parametrize(("level", "pairs"), [(0.05, 6), (0.025, 7), (0.05 / 3, 7), (0.05 / 4, 8), (0.01, 8)])
def test_pairs_for_exact_returns_the_smallest_sufficient_number(level, pairs):
    assert pairs_for_exact(level) == pairs
    assert least_exact(pairs) <= level < least_exact(pairs - 1)


@pytest.mark.parametrize(
    ("n", "arms", "can"), [(5, 1, False), (6, 1, True), (6, 2, False), (7, 3, True), (7, 4, False)]
)
def test_the_exact_p_is_shown_only_if_it_can_be_small(n, arms, can):
    baseline = dict.fromkeys(range(n), 0.5)
    clear = {seed: 0.6 + 0.001 * seed for seed in range(n)}
    found = paired_tests([(clear, baseline)] * arms)
    assert {one.exact_can_tell for one in found} == {can}
    assert (found[0].p_exact_holm <= 0.05) == can


def test_with_many_pairs_the_sign_flips_are_sampled_deterministically():
    rng = np.random.default_rng(0)
    differences = list(rng.normal(0.5, 1, 24))
    assert sign_flip(differences) == sign_flip(differences) > 0
    assert sign_flip(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


@given(DIFFERENCES.filter(lambda values: len(set(values)) > 1))
def test_the_effect_size_equals_hedges_g_by_hand(differences):
    d = statistics.mean(differences) / statistics.stdev(differences)
    n = len(differences)
    # The exact correction is gamma(m / 2) / (sqrt(m / 2) gamma((m - 1) / 2)), m = n - 1; Hedges approximates it.
    m = n - 1
    exact = math.gamma(m / 2) / (math.sqrt(m / 2) * math.gamma((m - 1) / 2)) if n > 2 else 1.0
    assert hedges_g(differences) == pytest.approx(d * exact, rel=0.02 if n > 3 else 0.03, abs=1e-12)


def by_loops(values: list[float], drawn: np.ndarray) -> tuple[float, float]:
    """Return the studentized bootstrap interval of `values`, by a loop over the resampled indices `drawn`."""
    n, mean = len(values), statistics.mean(values)
    pivots = []
    for row in drawn:
        sample = [values[place] for place in row]
        if (spread := statistics.stdev(sample)) > 1e-12:
            pivots.append((statistics.mean(sample) - mean) / (spread / math.sqrt(n)))
    low, high = np.quantile(pivots, [0.025, 0.975])
    error = statistics.stdev(values) / math.sqrt(n)
    return mean - high * error, mean - low * error


def test_the_bootstrap_agrees_with_a_loop_over_other_resamples():
    values = [0.012, -0.004, 0.021, 0.009, 0.003, 0.017, -0.001]
    drawn = np.random.default_rng(1).integers(7, size=(4_000, 7))
    assert bootstrap_interval(values) == pytest.approx(by_loops(values, drawn), abs=0.0015)
    assert bootstrap_interval(values) == bootstrap_interval(values)


@given(st.floats(-5, 5), st.floats(0.1, 50))
@settings(max_examples=20)
def test_the_bootstrap_is_equivariant_to_shift_and_scale(shift, scale):
    values = [0.3, 1.2, -0.4, 0.9, 0.1, 0.7]
    low, high = bootstrap_interval(values)
    moved = bootstrap_interval([shift + scale * value for value in values])
    assert moved == pytest.approx((shift + scale * low, shift + scale * high), abs=1e-6 * (scale + abs(shift)))


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [1.0] * 8, [1.0, 1.0, 1.0, 1.0, 2.0], []])
def test_too_few_different_values_have_no_bootstrap(values):
    assert bootstrap_interval(values) is None


@pytest.mark.parametrize("values", [[], [1.0], [0.25, 0.25, 0.25]])
def test_values_without_a_spread_have_no_t_interval(values):
    assert t_interval(values) is None


def test_the_t_interval_equals_a_calculation_by_hand():
    # 4, 5, 6: mean 5, sd 1, t(0.975, 2) = 4.30265.
    assert t_interval([4.0, 5.0, 6.0]) == pytest.approx((5 - 4.30265 / 3**0.5, 5 + 4.30265 / 3**0.5), abs=1e-5)


@pytest.mark.parametrize("n", [3, 5, 10, 30])
@pytest.mark.parametrize("effect", [0.2, 0.5, 1.0])
def test_power_equals_statsmodels(n, effect):
    theirs = TTestPower().power(effect, n, 0.05)
    assert power(effect, n, 0.05) == pytest.approx(theirs, abs=2e-5)


@pytest.mark.parametrize(("n", "effect"), [(2, 9.0), (3, 2.0), (4, 8.0), (8, 1.2)])
def test_power_is_the_share_of_samples_with_a_significant_result(n, effect):
    drawn = np.random.default_rng(n).normal(effect, 1, (40_000, n))
    found = stats.ttest_1samp(drawn, 0, axis=1).pvalue <= 0.01
    assert power(effect, n, 0.01) == pytest.approx(found.mean(), abs=0.008)


@pytest.mark.parametrize("level", [0.05, 0.05 / 3, 0.001])
@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_detectable_effects_have_the_promised_power(n, level):
    assert power(detectable_effect(n, level), n, level) == pytest.approx(POWER, abs=1e-6)


@given(st.floats(0.05, 6))
@settings(max_examples=15)
def test_the_seeds_needed_suffice_and_one_less_does_not(effect):
    n = seeds_needed(effect, 0.05)
    assert power(effect, n, 0.05) >= POWER
    assert n == 2 or power(effect, n - 1, 0.05) < POWER
    assert seeds_needed(0.5, 0.05) == 34  # as in every table of the paired t-test


def test_a_tiny_difference_needs_too_many_seeds():
    assert seeds_needed(0.001, 0.05) is None


@pytest.mark.parametrize(("share", "inside"), [(0.07, False), (0.13, True), (0.87, True), (0.93, False)])
def test_with_a_known_difference_the_range_of_seeds_has_a_coverage_of_four_in_five(share, inside):
    """The observed standard deviation is below its quantile `share` in this share of all sweeps with three seeds."""
    spread = float(stats.chi2.ppf(share, 2) / 2) ** 0.5
    low, high = seeds_interval(0.9, spread, 3, 0.05 / 3)
    assert (low <= seeds_needed(0.9, 0.05 / 3) <= high) is inside


def test_more_seeds_give_a_narrower_range_around_the_estimate():
    ranges = [seeds_interval(0.01, 0.02, n, 0.05) for n in (3, 6, 20, 100)]
    estimate = seeds_needed(0.5, 0.05)
    assert all(low < estimate < high for low, high in ranges)
    assert [high - low for low, high in ranges] == sorted((high - low for low, high in ranges), reverse=True)
    assert seeds_interval(0.0, 0.02, 3, 0.05) == (None, None)


def test_planning_uses_the_level_of_holm_and_only_undetected_differences():
    alone = one([0.01, 0.03, -0.01])
    baseline = dict.fromkeys(range(3), 0.5)
    arm = {0: 0.51, 1: 0.53, 2: 0.49}
    among = paired_tests([(arm, baseline)] * 4)[0]
    assert (alone.level, among.level) == (0.05, 0.0125)
    assert alone.detectable < among.detectable
    assert alone.seeds_needed < among.seeds_needed
    clear = one([0.100, 0.102, 0.101])
    assert clear.verdict == "higher"
    assert clear.seeds_needed is None
    assert clear.seeds_range is None
    assert alone.seeds_range[0] < alone.seeds_needed < alone.seeds_range[1]
    assert clear.detectable == pytest.approx(0.001 * detectable_effect(3, 0.05))


@given(DIFFERENCES)
@settings(max_examples=20)
def test_exchanging_the_sides_changes_only_the_sign_of_every_number(differences):
    there, back = one(differences), one([-value for value in differences])
    assert there.p_exact == back.p_exact
    assert there.detectable == pytest.approx(back.detectable) if there.detectable else back.detectable is None
    if there.effect is not None:
        assert there.effect == pytest.approx(-back.effect)
    if there.bootstrap is not None and back.bootstrap is not None:
        assert there.bootstrap == pytest.approx([-end for end in reversed(back.bootstrap)], abs=2e-4)
