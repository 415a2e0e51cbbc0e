"""Sequential tests compared with published boundaries, direct integration, a reference in loops, and simulations."""

import math
import statistics
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsweep.report.expected_seeds import Forecast, expected_seeds
from fedsweep.report.sequential_tests import HIGHER, LOWER, WITHIN, SequentialRule, judge, repeated_interval, replay
from fedsweep.report.spending_boundaries import CENTRES, EDGES, normal_boundaries, spent_by, t_boundaries

RULE = SequentialRule(first_look=3, at_most=8, smallest_effect=1.0)
DECIDED = ("higher", "lower", "within")
VALUES = st.lists(st.integers(-300, 300).map(lambda count: count / 128), min_size=0, max_size=8)
SWEEPS = st.lists(VALUES, min_size=1, max_size=4)
# Means and spreads for which all verdicts occur.
DRAWS = st.tuples(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.1, 0.3, 1.0, 3.0]))


def drawn(seed: int, comparisons: int, spread: float, seeds: int = 8) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    centres = rng.choice([0.0, 0.5, 1.0, -2.0], comparisons)
    return {f"{place}": list(rng.normal(centre, spread, seeds)) for place, centre in enumerate(centres)}


# Boundaries


def test_boundaries_agree_with_the_published_ones_of_lan_and_demets():
    # Two-sided level 0.05, five equally spaced looks, known variance (Reboussin, DeMets, Kim and Lan, 2000).
    times = np.arange(1, 6) / 5
    obrien = 2 * stats.norm.sf(stats.norm.isf(0.025 / 2) / np.sqrt(times))
    pocock = 0.025 * np.log(1 + (math.e - 1) * times)

    def step(k):
        return stats.norm.sf(EDGES[None, :], math.sqrt(k / (k + 1)) * CENTRES[:, None], math.sqrt(1 / (k + 1)))

    found = normal_boundaries(np.stack([obrien, pocock]), (step(k) for k in range(1, 5)))
    published = [[4.877, 3.357, 2.680, 2.290, 2.031], [2.438, 2.427, 2.410, 2.397, 2.386]]
    np.testing.assert_allclose(found, published, atol=1.5e-3)


def test_the_first_boundary_is_a_quantile_of_students_t():
    found = t_boundaries(np.array([[0.01, 0.02], [0.001, 0.05]]), 4)
    np.testing.assert_allclose(found[:, 0], stats.t.isf([0.01, 0.001], 3), rtol=1e-3)


@pytest.mark.parametrize("spent", [(0.01, 0.03), (0.001, 0.1), (0.05, 0.06)])
def test_two_looks_agree_with_an_integral_over_the_sphere(spent):
    # The direction of three independent normal values is uniform: z and the angle in the plane of x and y are, too.
    z = (np.arange(1000) + 0.5) / 500 - 1
    angle = (np.arange(2000) + 0.5) / 1000 * np.pi
    x, y = np.sqrt(1 - z[:, None] ** 2) * np.cos(angle), np.sqrt(1 - z[:, None] ** 2) * np.sin(angle)
    mean = (x + y + z[:, None]) / 3
    t = mean / np.sqrt((1 / 3 - mean**2) / 2)
    first = (x + y) / np.abs(x - y)
    low, high = t_boundaries(np.array([spent]), 2)[0]
    assert ((first >= low) | (t >= high)).mean() == pytest.approx(spent[1], rel=0.01)


def test_the_error_is_spent_as_planned_at_every_look():
    looks = np.arange(3.0, 13)
    spent = np.stack([spent_by(0.025, looks, 12, 1), spent_by(0.05, looks, 12, 3)])
    borders = t_boundaries(spent, 3)
    values = np.random.default_rng(5).normal(size=(200_000, 12))
    count = np.arange(1, 13)
    means = values.cumsum(axis=1) / count
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.sqrt((np.square(values).cumsum(axis=1) / count - means**2) / (count - 1))
    for border, planned in zip(borders, spent, strict=True):
        crossed = np.logical_or.accumulate((means / errors)[:, 2:] >= border, axis=1).mean(axis=0)
        np.testing.assert_allclose(crossed, planned, atol=4.5 * math.sqrt(0.05 / 200_000))


def test_a_larger_level_has_smaller_boundaries_at_every_look():
    # This condition of Maurer and Bretz makes passing on the level of a rejected hypothesis valid.
    looks = np.arange(3.0, 21)
    for exponent in (1, 3):
        levels = 0.05 / np.arange(1, 9)[:, None]
        found = t_boundaries(np.asarray(spent_by(levels, looks, 20, exponent)), 3)
        assert np.isfinite(found).all()
        assert (np.diff(found, axis=0) > 0).all()


def test_a_look_that_may_spend_nothing_has_an_infinite_boundary():
    found = t_boundaries(np.array([[0.0, 0.02]]), 3)
    assert found[0, 0] == np.inf
    assert found[0, 1] == pytest.approx(stats.t.isf(0.02, 3), rel=3e-3)


# Verdicts


@cache
def borders(level, exponent, first, last):
    spent = np.asarray(spent_by(level, np.arange(first, last + 1.0), last, exponent))
    return t_boundaries(spent[None], first)[0]


def reference(differences: dict[str, list[float]], rule: SequentialRule) -> dict[str, tuple[str, int]]:
    """Judge with loops over looks and comparisons, without giving up."""

    def border(level, exponent, n):
        return borders(level, exponent, rule.first_look, rule.at_most)[n - rule.first_look]

    found: dict[str, tuple[str, int]] = {}
    unequal = near = len(differences)
    for n in range(rule.first_look, rule.at_most + 1):
        if any(len(values) < n for name, values in differences.items() if name not in found):
            break
        rejected = True
        while rejected:
            rejected = False
            for name, values in differences.items():
                mean, spread = statistics.fmean(values[:n]), statistics.stdev(values[:n]) / math.sqrt(n)
                if name not in found and spread and abs(mean) > border(rule.level / 2 / unequal, 1, n) * spread:
                    found[name] = ("higher" if mean > 0 else "lower", n)
                    unequal, rejected = unequal - 1, True
                    break
        rejected = True
        while rejected:
            rejected = False
            for name, values in differences.items():
                mean, spread = statistics.fmean(values[:n]), statistics.stdev(values[:n]) / math.sqrt(n)
                if name not in found and spread and abs(mean) + border(rule.level / near, 3, n) * spread < 1.0:
                    found[name] = ("within", n)
                    near, rejected = near - 1, True
                    break
    return found


@pytest.mark.parametrize("seed", range(10))
def test_verdicts_agree_with_a_reference_in_loops(seed):
    rule = replace(RULE, at_most=6, give_up=0.0)
    differences = drawn(seed, 1 + seed % 3, 0.25, seeds=6)
    expected = reference(differences, rule)
    found = {name: (one.verdict, one.seeds) for name, one in judge(differences, rule).items() if one.verdict in DECIDED}
    assert found == expected


def test_the_reference_has_seen_every_verdict():
    rule = replace(RULE, at_most=6, give_up=0.0)
    seen = {
        verdict for seed in range(10) for verdict, _ in reference(drawn(seed, 1 + seed % 3, 0.25, 6), rule).values()
    }
    assert seen == set(DECIDED)


@given(SWEEPS, st.integers(-3, 3), st.booleans())
@settings(max_examples=60)
def test_verdicts_do_not_depend_on_the_unit_and_mirror_with_the_sign(sweep, power, mirrored):
    differences = {str(place): values for place, values in enumerate(sweep)}
    factor = 2.0**power * (-1 if mirrored else 1)
    turned = {"higher": "lower", "lower": "higher"} if mirrored else {}
    rule = replace(RULE, smallest_effect=abs(factor))
    scaled = judge({name: [factor * one for one in values] for name, values in differences.items()}, rule)
    for name, one in judge(differences, RULE).items():
        assert scaled[name].verdict == turned.get(one.verdict, one.verdict)
        assert scaled[name].seeds == one.seeds
        if one.interval is not None:
            assert sorted(scaled[name].interval) == sorted(factor * end for end in one.interval)


@given(DRAWS, st.permutations(range(4)), st.lists(st.floats(-5, 5), max_size=3))
@settings(max_examples=60)
def test_the_order_of_arms_and_seeds_after_a_decision_change_nothing(draw, order, further):
    differences = drawn(*draw)
    found = judge(differences, RULE)
    cut = {name: [*values[: found[name].seeds], *further] for name, values in differences.items()}
    shuffled = {str(place): cut[str(place)] for place in order if str(place) in cut}
    assert judge(shuffled, RULE) == found


@given(DRAWS, st.integers(0, 8))
@settings(max_examples=60)
def test_further_seeds_change_no_conclusion(draw, early):
    differences = drawn(*draw)
    before = judge({name: values[:early] for name, values in differences.items()}, RULE)
    after = judge(differences, RULE)
    for name, one in before.items():
        assert one.verdict == "open" or one == after[name]


@given(DRAWS)
@settings(max_examples=100)
def test_intervals_agree_with_the_verdict(draw):
    for one in judge(drawn(*draw), RULE).values():
        assert one.interval is not None
        low, high = one.judged_interval
        assert (low > 0) == (one.verdict == "higher")
        assert (high < 0) == (one.verdict == "lower")
        assert low <= one.interval[0] < one.difference < one.interval[1] <= high
        assert one.simultaneous_interval[0] <= low < high <= one.simultaneous_interval[1]
        inside = one.equivalence_interval[0] > -1 and one.equivalence_interval[1] < 1
        assert inside if one.verdict == "within" else not inside or one.verdict in ("higher", "lower")


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_the_repeated_interval_is_that_of_a_comparison_without_a_part_in_the_decision(draw):
    rule = SequentialRule(3, 8, smallest_effect=1.0)
    differences = drawn(draw, 2, 1.0)
    for name, verdict in judge(differences, rule).items():
        assert repeated_interval(differences[name][: verdict.seeds], rule) == verdict.interval
    assert repeated_interval([0.1, 0.2], rule) is None
    assert repeated_interval([0.1] * 4, rule) is None


def test_a_decided_comparison_passes_its_level_on():
    clear, weak = [3.0, 3.1, 2.9, 3.05], [0.5, 0.9, 0.1, 0.6]
    rule = SequentialRule(first_look=4, at_most=20, give_up=0.0)
    alone, both = judge({"weak": weak}, rule)["weak"], judge({"weak": weak, "clear": clear}, rule)["weak"]
    with_open = judge({"weak": weak, "open": [1.0, -1.0, 2.0, -1.5]}, rule)["weak"]
    assert alone.interval == both.interval == both.judged_interval
    assert with_open.judged_interval[0] < with_open.interval[0] == alone.interval[0]
    assert alone.simultaneous_interval == alone.interval
    assert both.simultaneous_interval == with_open.simultaneous_interval == with_open.judged_interval


def test_looks_wait_for_all_open_comparisons():
    values = [0.1, -2.0, 1.5, 0.2, -0.7]
    found = judge({"ahead": values, "behind": values[:3]}, replace(RULE, give_up=0.0))
    assert found["ahead"].seeds == found["behind"].seeds == 3
    assert found["ahead"].difference == pytest.approx(statistics.fmean(values[:3]))


def test_without_seeds_or_before_the_first_look_comparisons_are_open():
    assert judge({}, RULE) == {}
    none, one = judge({"none": []}, RULE)["none"], judge({"one": [0.5]}, RULE)["one"]
    assert (none.verdict, none.seeds, none.difference) == ("open", 0, None)
    assert (one.verdict, one.seeds, one.difference, one.interval) == ("open", 1, 0.5, None)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_equal_differences_allow_no_test(value):
    for seeds in range(2, 8):
        found = judge({"equal": [value] * seeds}, RULE)["equal"]
        assert (found.verdict, found.seeds, found.interval, found.constant) == ("open", seeds, None, True)
    found = judge({"equal": [value] * 8}, RULE)["equal"]
    assert (found.verdict, found.seeds, found.interval, found.constant) == ("open at the limit", 8, None, True)
    assert not judge({"one": [value]}, RULE)["one"].constant
    assert found.mirrored().constant


def test_the_first_seed_that_varies_makes_a_test_possible():
    rule = SequentialRule(first_look=2, at_most=8, smallest_effect=4.0)
    equal = judge({"arm": [0.19, 0.19]}, rule)["arm"]
    assert (equal.verdict, equal.seeds) == ("open", 2)
    found = judge({"arm": [0.19, 0.19, 0.0, 0.19, 0.19]}, rule)["arm"]
    assert (found.verdict, found.constant) == ("within", False)


def test_differences_that_differ_only_by_rounding_are_equal():
    differences = [0.61 - 0.60, 0.91 - 0.90, 0.11 - 0.10]
    assert len(set(differences)) > 1
    assert judge({"equal": differences}, RULE)["equal"].interval is None


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_failed_seed_is_a_seed_without_a_pair(gap):
    rule = replace(RULE, first_look=4)
    found, whole = (
        judge({"arm": [2.0, gap, 2.1, 2.2, 1.9]}, rule)["arm"],
        judge({"arm": [2.0, 2.1, 2.2, 1.9]}, rule)["arm"],
    )
    assert (found.verdict, found.seeds, found.pairs) == ("higher", 5, 4)
    assert (whole.verdict, whole.seeds, whole.interval) == ("higher", 4, found.interval)


def test_hopeless_comparisons_get_no_further_seeds():
    values = [10.0, -11.0, 9.0, -8.0, 0.5, 3.0, -4.0, 1.0]
    assert judge({"arm": values}, RULE)["arm"].verdict == "out of reach"
    assert judge({"arm": values}, replace(RULE, give_up=0.0))["arm"].verdict == "open at the limit"


def test_without_a_smallest_effect_nothing_is_within():
    found = judge({"arm": [0.001, -0.001, 0.002, -0.0015]}, replace(RULE, smallest_effect=None, give_up=0.0))["arm"]
    assert (found.verdict, found.equivalence_interval) == ("open", None)
    assert judge({"arm": [0.001, -0.001, 0.002, -0.0015]}, RULE)["arm"].verdict == "within"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_look": 1}, "first_look must be between 2 and at_most = 8, not 1"),
        ({"first_look": 9}, "first_look must be between 2 and at_most = 8, not 9"),
        ({"smallest_effect": 0.0}, "smallest_effect must be a positive number, not 0.0"),
        ({"smallest_effect": math.nan}, "smallest_effect must be a positive number, not nan"),
        ({"level": 0.5}, "level must be between 0 and 0.5, not 0.5"),
        ({"give_up": 1.0}, "give_up must be at least 0 and less than 1, not 1.0"),
    ],
)
def test_rules_with_impossible_values_are_rejected(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(RULE, **changes)


# Error rates


def sweeps(seed: int, comparisons: int, mean: float, spread: float, repetitions: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    trials = rng.normal(0, spread / math.sqrt(2), (repetitions, comparisons + 1, 20))
    return trials[:, 1:] - trials[:, :1] + mean


@pytest.mark.parametrize("comparisons", [1, 3])
def test_the_error_of_the_family_is_near_its_level_and_not_above(comparisons):
    values = sweeps(1, comparisons, 0.0, 1.0)
    found = replay(values, SequentialRule(give_up=0.0))
    wrong = np.isin(found.conclusions, (HIGHER, LOWER)).any(axis=1).mean()
    assert 0.03 < wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    # Repeated tests without spending would be wrong far more often.
    t = [stats.ttest_1samp(values[:, 0, :n], 0, axis=1).pvalue < 0.05 for n in range(4, 21)]
    assert np.any(t, axis=0).mean() > 0.15


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.5), (3.0, 0.5), (0.0, 1.0), (3.0, 1.0)])
def test_errors_stay_rare_if_differences_are_counts_of_images(mean, spread):
    trials = np.random.default_rng(6).normal(0, spread / math.sqrt(2), (4000, 4, 8))
    trials[:, 1:] += mean
    counts = np.round(trials)
    found = replay(counts[:, 1:] - counts[:, :1], SequentialRule(first_look=2, at_most=8, smallest_effect=3.0))
    wrong = (HIGHER, LOWER) if mean == 0 else (WITHIN,)
    assert np.isin(found.conclusions, wrong).any(axis=1).mean() < 0.05


def test_equivalence_is_rarely_called_at_the_smallest_effect():
    found = replay(sweeps(2, 3, 1.0, 0.6), SequentialRule(smallest_effect=1.0))
    wrong = (found.conclusions == WITHIN).any(axis=1).mean()
    assert 0.001 < wrong < 0.05


@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
def test_intervals_contain_the_truth_at_the_moment_of_stopping(mean):
    found = replay(sweeps(3, 1, mean, 1.0), SequentialRule(smallest_effect=1.0))
    miss = (np.abs(found.means - mean) > found.borders[:, :, 0] * found.errors).mean()
    assert 0.001 < miss < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    assert np.isfinite(found.borders).all()


def test_simultaneous_intervals_contain_all_truths_and_judged_ones_fewer():
    """Three differences are clear and pass their level on to the fourth, whose own interval is then a plain one."""
    truth = np.array([9.0, 9.0, 9.0, 0.01])
    noise = np.random.default_rng(0).normal(size=(4000, 4, 8))
    found = replay(noise + truth[:, None], SequentialRule(3, 8, smallest_effect=1.0))
    missed = np.abs(found.means - truth)[..., None] > found.borders * found.errors[..., None]
    one_arm, judged, _, joint = missed.any(axis=1).mean(axis=0)
    assert joint < 0.05 < judged < one_arm


# Forecasts


def forecasts(rule: SequentialRule, arms: int, spread: float) -> dict[str, Forecast]:
    """Return the forecasts for arms that are compared with one baseline."""
    return expected_seeds(rule, [(f"{arm}", "baseline") for arm in range(arms)], spread, {"baseline"})


def test_forecasts_depend_on_the_spread_and_the_number_of_arms():
    rule = SequentialRule(smallest_effect=1.0)
    calm, wild, many = forecasts(rule, 1, 0.25), forecasts(rule, 1, 1.0), forecasts(rule, 5, 1.0)
    assert set(calm) == {"no difference", "smallest effect"}
    for name, one in calm.items():
        assert 4 <= one.seeds == one.baseline < wild[name].seeds < many[name].seeds < many[name].baseline <= 20
        assert one.decided > wild[name].decided > 0.8
    assert forecasts(rule, 1, 0.25) == calm
    assert set(forecasts(SequentialRule(), 2, 1.0)) == {"no difference"}


def test_forecasts_cover_declared_pairs_and_do_without_a_baseline():
    rule = SequentialRule(smallest_effect=1.0)
    star, more = [("b", "a"), ("c", "a")], [("b", "a"), ("c", "a"), ("c", "b")]
    for name, one in expected_seeds(rule, star, 1.0, {"a"}).items():
        other = expected_seeds(rule, more, 1.0, {"a"})[name]
        assert other.seeds > one.seeds, "each arm also waits for the third comparison"
        alone = expected_seeds(rule, more, 1.0)[name]
        assert alone.baseline is None
        assert alone.seeds == pytest.approx(other.seeds, abs=1)  # the three arms are alike
    apart = expected_seeds(rule, [("b", "a"), ("d", "c")], 1.0, {"a", "c"})["no difference"]
    assert apart.seeds == apart.baseline


def test_a_forecast_agrees_with_another_simulation():
    found = forecasts(SequentialRule(smallest_effect=1.0), 3, 1.0)["smallest effect"]
    other = replay(sweeps(4, 3, 1.0, 1.0), SequentialRule(smallest_effect=1.0))
    assert found.seeds == pytest.approx(other.seeds.mean(), abs=0.6)
    assert found.baseline == pytest.approx(other.seeds.max(axis=1).mean(), abs=0.6)


def test_the_draws_of_the_properties_have_all_verdicts():
    seen = {one.verdict for seed in range(60) for one in judge(drawn(seed, 2, 0.3 + seed % 3), RULE).values()}
    assert seen >= {"higher", "lower", "within", "out of reach"}


def test_an_arm_without_any_pair_ends_at_the_first_look_without_warnings():
    rule = SequentialRule(first_look=4, at_most=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = judge({"broken": [math.nan] * 4, "fine": [0.1, 0.2, 0.15, 0.12]}, rule)
    assert (found["broken"].verdict, found["broken"].seeds, found["broken"].pairs) == ("out of reach", 4, 0)
