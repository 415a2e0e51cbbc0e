"""Statistics of arms, compared with loops in plain Python and closed forms of Student's t."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.holm_corrected_tests import Comparison, holm, paired_tests
from fedsweep.report.table import AblationTable
from tests.report.helpers import tabulate

ACCURACY = st.integers(0, 10_000).map(lambda count: count / 10_000)
THREE = st.tuples(ACCURACY, ACCURACY, ACCURACY)


def by_seed(values):
    return dict(enumerate(values))


def one(arm, baseline) -> Comparison:
    (found,) = paired_tests([(by_seed(arm), by_seed(baseline))])
    return found


def step_down(p_values, level):
    """Return, for each hypothesis, whether Holm's original step-down procedure rejects it at `level`."""
    rejected = [False] * len(p_values)
    for step, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[place] * (len(p_values) - step) > level:
            break
        rejected[place] = True
    return rejected


def test_holms_correction_equals_a_calculation_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; the last one may not be below 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_the_same_hypotheses_as_the_step_down_procedure(p_values, level):
    assert [p <= level for p in holm(p_values)] == step_down(p_values, level)


@given(THREE, THREE)
@settings(max_examples=25)
def test_three_pairs_agree_with_the_closed_form_of_student_t(arm, baseline):
    differences = [a - b for a, b in zip(arm, baseline, strict=True)]
    mean = sum(differences) / 3
    sd = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    found = one(arm, baseline)
    assert found.difference == pytest.approx(mean, abs=1e-12)
    if sd < 1e-10:
        assert found.interval is None
        return
    # With two degrees of freedom F(t) = 1/2 + t / (2 sqrt(2 + t^2)), which also inverts in closed form.
    t = mean / (sd / math.sqrt(3))
    quantile = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    half = quantile * sd / math.sqrt(3)
    assert found.p == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t), rel=1e-6, abs=1e-9)
    assert found.interval == pytest.approx((mean - half, mean + half), abs=1e-9)


def test_a_comparison_equals_a_calculation_by_hand():
    # Differences 1, 2, 3 points: mean 2, sd 1, t = 2 sqrt(3), p = 1 - sqrt(12 / 14), half-width 4.30265 / sqrt(3).
    found = one([0.61, 0.63, 0.65], [0.60, 0.61, 0.62])
    assert found.seeds == (0, 1, 2)
    assert found.difference == pytest.approx(0.02)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert found.p_holm == pytest.approx(found.p)
    assert found.interval == pytest.approx((0.02 - 0.0248414, 0.02 + 0.0248414), abs=1e-6)
    assert found.verdict == "no detectable difference"


@given(st.lists(st.tuples(ACCURACY, ACCURACY), min_size=2, max_size=6))
@settings(max_examples=25)
def test_exchanging_arm_and_baseline_changes_the_sign_only(pairs):
    arm, baseline = zip(*pairs, strict=True)
    there, back = one(arm, baseline), one(baseline, arm)
    assert there.difference == -back.difference
    assert there.p == back.p
    opposite = {"higher": "lower", "lower": "higher"}
    assert back.verdict == opposite.get(there.verdict, there.verdict)


def test_pairs_are_matched_by_seed_and_only_common_seeds_count():
    (found,) = paired_tests([({3: 0.9, 1: 0.52, 0: 0.51, 2: 0.54}, {2: 0.53, 0: 0.50, 1: 0.50, 7: 0.1})])
    assert found.seeds == (0, 1, 2)
    assert found.difference == pytest.approx((0.01 + 0.02 + 0.01) / 3)


@pytest.mark.parametrize(("arm", "baseline"), [({0: 0.5}, {1: 0.5}), ({}, {0: 0.5}), ({0: 0.5}, {0: 0.4, 1: 0.5})])
def test_too_few_common_seeds_have_no_interval_and_no_p(arm, baseline):
    (found,) = paired_tests([(arm, baseline)])
    assert (found.interval, found.p, found.p_holm) == (None, None, None)
    assert found.verdict == "too few seeds"


def test_p_is_one_without_any_difference():
    found = one([0.3, 0.4, 0.5], [0.3, 0.4, 0.5])
    assert (found.difference, found.p, found.interval) == (0.0, 1.0, None)
    assert found.verdict == "no detectable difference"


def test_a_constant_difference_is_not_called_significant():
    # In floating point 0.61 - 0.60 and 0.51 - 0.50 differ in the last bits, so a test would return a p near 0.
    found = one([0.61, 0.51, 0.31], [0.60, 0.50, 0.30])
    assert found.difference == pytest.approx(0.01)
    assert (found.interval, found.p, found.p_holm) == (None, None, None)
    assert found.verdict == "constant"


def test_holm_counts_the_arms_that_can_be_tested():
    baseline = by_seed([0.5, 0.5, 0.5])
    varied, constant, lonely = by_seed([0.58, 0.60, 0.62]), by_seed([0.6, 0.6, 0.6]), {0: 0.9}
    found = paired_tests([(arm, baseline) for arm in (lonely, varied, constant, varied)])
    assert [one.p_holm is None for one in found] == [True, False, True, False]
    assert found[1].p_holm == pytest.approx(2 * found[1].p)


@pytest.mark.parametrize(("sign", "verdict"), [(1, "higher"), (-1, "lower")])
def test_the_verdict_follows_the_sign_after_correction(sign, verdict):
    clear = by_seed([0.5 + sign * step for step in (0.100, 0.102, 0.101)])
    assert paired_tests([(clear, by_seed([0.5] * 3))])[0].verdict == verdict


def test_the_correction_can_change_the_verdict():
    baseline = by_seed([0.5] * 3)
    borderline, noise = by_seed([0.54, 0.55, 0.56]), by_seed([0.49, 0.50, 0.52])
    alone = paired_tests([(borderline, baseline)])[0]
    together = paired_tests([(arm, baseline) for arm in (borderline, noise, noise, noise)])[0]
    assert (alone.verdict, together.verdict) == ("higher", "no detectable difference")
    assert alone.interval == together.interval


def test_arm_statistics_equal_a_calculation_by_hand(manifest, trials):
    trials.arms({8: [0.60, 0.62, 0.67], 4: [0.58]})
    eight = next(one for one in summarise(manifest(), trials.records) if one.is_baseline)
    assert eight.n == 3
    assert eight.mean == pytest.approx(0.63)
    assert eight.sd == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2))
    assert eight.mean_of_last == pytest.approx((0.3 + 0.4 + 0.5 + 0.63) / 4)
    assert eight.columns["worst_domain"] == pytest.approx(0.53)
    assert eight.worst_domain_name == "sketch"
    assert eight.columns["megabytes"] == pytest.approx(4 * 1.5)
    assert eight.comparison is None


def test_one_seed_has_a_mean_and_no_sd(manifest, trials):
    trials.arms({8: [0.6]})
    (only,) = summarise(manifest(), trials.records)
    assert (only.mean, only.sd) == (0.6, None)


@pytest.mark.parametrize("outcome", ["pruned", "failed", None])
def test_trials_that_did_not_finish_change_no_number(manifest, trials, outcome):
    trials.arms({4: [0.5, 0.52], 8: [0.6, 0.65]})
    before = summarise(manifest(), trials.records)
    trials.add(4, 2, [0.2, 0.99], outcome)
    trials.add(8, 2, [0.2, 0.01], outcome)
    after = summarise(manifest(), trials.records)
    assert len(before) == len(after) == 2
    for old, new in zip(before, after, strict=True):
        assert {**vars(old), "arm": None} == {**vars(new), "arm": None}
        assert len(new.arm.trials) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_runs_without_a_finite_objective_are_not_part_of_the_mean(manifest, trials, value):
    trials.arms({4: [0.5, 0.52], 8: [0.6, 0.65]})
    trials.add(4, 2, [0.2, value])
    four, _ = summarise(manifest(), trials.records)
    assert (four.n, four.mean) == (2, pytest.approx(0.51))
    assert four.mean_of_last == pytest.approx((0.3 + 0.4 + 0.5 + 0.51) / 4)
    assert four.columns["worst_domain"] == pytest.approx(0.41)


def test_the_explanation_states_how_many_pairs_an_exact_test_needs(manifest, trials):
    for seed in range(8):
        trials.add(8, seed, [0.2, 0.6 + seed / 1000])
        trials.add(4, seed, [0.2, 0.5 + (seed % 3) / 100])
        trials.add(16, seed, [0.2, 0.55 + (seed % 3) / 100], "finished" if seed < 3 else "failed")
    table = AblationTable(sweep := manifest(seeds=tuple(range(8))), summarise(sweep, trials.records))
    section = table.sections[0]
    shown = {row[0]: row[section.head.index("exact p")] for row in section.rows}
    assert (shown["16"], shown["4"] != "-") == ("-", True)
    assert "differences; it needs at least 7 pairs. Explanations: " in section.explained
    assert not any("No exact test" in sentence for sentence in table.caption())


def test_impossible_differences_are_not_called_detectable(manifest, trials):
    trials.arms({4: [0.5, 0.7], 8: [0.6, 0.6]})
    table = tabulate(manifest, trials)
    said = "a test with 2 seeds would not even detect a difference of 100 points (with a power of 80%)."
    assert table.findings()[0].endswith(said)


@pytest.mark.parametrize("baseline", [None, {"lora.rank": 32}])
def test_without_a_baseline_arm_nothing_is_compared_and_the_best_comes_first(manifest, trials, baseline):
    trials.arms({2: [0.5, 0.5], 4: [0.7, 0.6], 8: [0.6, 0.6]})
    found = summarise(manifest(baseline=baseline), trials.records)
    assert [one.arm.values["lora.rank"] for one in found] == [4, 8, 2]
    assert all(one.comparison is None and not one.is_baseline for one in found)


@pytest.mark.parametrize(("mode", "expected"), [("max", [4, 2, 32, 64, 16, 8]), ("min", [2, 4, 64, 32, 16, 8])])
def test_pruned_arms_follow_by_round_and_value(manifest, trials, mode, expected):
    trials.arms({2: [0.5], 4: [0.6]})
    trials.add(8, 0, [], None)
    trials.add(16, 0, [0.2, 0.9], "pruned")
    trials.add(32, 0, [0.2, 0.3, 0.8], "pruned")
    trials.add(64, 0, [0.2, 0.3, 0.7], "pruned")
    found = summarise(manifest(baseline=None, mode=mode), trials.records)
    assert [one.arm.values["lora.rank"] for one in found] == expected


def test_numbers_of_arms_are_sorted_but_words_keep_the_order_of_the_plan(manifest, trials):
    for method in ("fedra", "all_large"):
        for rank in (16, 2, 8):
            trials.add({"method": method, "lora.rank": rank}, 0, [0.1, 0.2])
    baseline = {"lora.rank": 8, "method": "fedra"}
    found = summarise(manifest(baseline=baseline), trials.records)
    ordered = [tuple(one.arm.values.values()) for one in found]
    assert ordered == [(method, rank) for method in ("fedra", "all_large") for rank in (2, 8, 16)]
    assert [one.is_baseline for one in found] == [False, True, False, False, False, False]


def test_arms_differ_if_their_json_values_differ(manifest, trials):
    for seed, value in enumerate([1, True, [1, 2], {"name": "a"}, None, "1"]):
        trials.add({"x": value}, seed, [0.1, 0.2])
    assert len(summarise(manifest(baseline={"x": True}), trials.records)) == 6


def test_an_arm_that_a_search_drew_twice_counts_once_per_seed(manifest, trials):
    trials.add(4, 0, [0.1, 0.5])
    trials.add(4, 0, [0.1, 0.5])
    (only,) = summarise(manifest(baseline=None), trials.records)
    assert (only.n, only.sd) == (1, None)
