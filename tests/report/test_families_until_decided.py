"""The verdicts of a family of comparisons, with the baseline or declared, in a sweep with seeds until decided."""

import math
from functools import lru_cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsweep.report.seeds_until_decided import seeds_that_count, sequential_verdicts
from fedsweep.report.sequential_tests import DIFFERENCE_EXPONENT, EQUIVALENCE_EXPONENT, SequentialRule, judge
from fedsweep.report.spending_boundaries import spent_by, t_boundaries
from fedsweep.results.declared_comparisons import Pair, declared_pairs, family_of
from fedsweep.results.seeds import UntilDecided

METRIC = "loss/test"
UNTIL = UntilDecided(at_least=3, at_most=7, smallest_effect=1.0)
DIFFERENT, WITHIN = "higher lower", "within"
FAMILIES = (DIFFERENT, WITHIN)
ARMS = [{"lora.rank": rank} for rank in (1, 4, 8)]
KEYS = ['{"lora.rank": 1}', '{"lora.rank": 4}', '{"lora.rank": 8}']
ALL = [Pair(one, other, METRIC) for one, other in combinations(KEYS, 2)]
STAR = dict.fromkeys(KEYS, KEYS[2])


def drawn(seed: int) -> dict[str, dict[int, float]]:
    """Return the values of three arms, some of which differ, by seed; a few seeds are missing or have failed."""
    rng = np.random.default_rng(seed)
    found = {}
    for key in KEYS:
        ends = rng.normal(rng.choice([0.0, 0.8, 4.0]), rng.choice([0.1, 0.5, 1.5]), 7)
        ends[rng.random(7) < 0.03] = np.nan
        found[key] = dict(enumerate(ends[: rng.choice([5, 7, 7])]))
    return found


@lru_cache
def border(left: int, count: int, kinds: str) -> float:
    """Return the boundary of the t statistic of `count` pairs if `left` hypotheses share the level."""
    sides, exponent = (2, DIFFERENCE_EXPONENT) if kinds == DIFFERENT else (1, EQUIVALENCE_EXPONENT)
    spent = spent_by(np.array([[0.05 / left / sides]]), np.arange(3.0, 8.0), 7, exponent)
    return float(t_boundaries(spent, 3)[0, count - 3])


def decision(one: np.ndarray, left: int, kinds: str) -> str:
    """Return the verdict of one test of the differences, or an empty text."""
    if len(one) < 3:
        return ""
    half = border(left, len(one), kinds) * stats.sem(one)
    low, high = one.mean() - half, one.mean() + half
    if kinds == WITHIN:
        return "within" * bool(low > -1 and high < 1)
    return "higher" if low > 0 else "lower" if high < 0 else ""


def hope(one: np.ndarray, look: int, left: list[int]) -> float:
    """Return the probability that the seventh seed decides, if the differences continue as so far."""
    n, sd, total = len(one), one.std(ddof=1), len(one) + 7 - look
    last = stats.t(n - 1, one.mean(), sd * math.sqrt((total - n) / (n * total)))
    far, near = (border(m, total, kinds) * sd / math.sqrt(total) for m, kinds in zip(left, FAMILIES, strict=True))
    near = max(1.0 - near, 0.0)
    return float(last.sf(far) + last.cdf(-far) + last.cdf(near) - last.cdf(-near))


def reference(values: dict[str, dict[int, float]]) -> dict[Pair, tuple[str, int]]:
    """Return the verdict and the number of seeds of all pairs, in plain loops over looks, families and pairs."""
    found = dict.fromkeys(ALL, ("open", 0))

    def left(kinds: str) -> int:
        return max(1, 3 - sum(verdict in kinds.split() for verdict, _ in found.values()))

    for look in range(1, 8):
        going = [pair for pair in ALL if found[pair][0] == "open"]
        if any(look > len(values[arm]) for pair in going for arm in pair[:2]):
            break
        gaps = {
            pair: np.array([values[pair[0]][seed] - values[pair[1]][seed] for seed in range(look)]) for pair in going
        }
        gaps = {pair: one[np.isfinite(one)] for pair, one in gaps.items()}
        found |= dict.fromkeys(going, ("open", look))
        for kinds in FAMILIES * (look >= 3):
            hits = {ALL[0]: ""}
            while hits:
                still = [pair for pair in going if found[pair][0] == "open"]
                hits = {pair: said for pair in still if (said := decision(gaps[pair], left(kinds), kinds))}
                found |= {pair: (said, look) for pair, said in hits.items()}
        still = [pair for pair in going if found[pair][0] == "open"]
        if look == 7:
            found |= dict.fromkeys(still, ("open at the limit", look))
        elif look >= 3:
            levels = [left(kinds) for kinds in FAMILIES]
            given_up = [pair for pair in still if len(gaps[pair]) > 1 and hope(gaps[pair], look, levels) < 0.05]
            found |= dict.fromkeys(given_up, ("out of reach", look))
    return found


def test_all_pairs_of_three_arms_agree_with_a_reference_in_plain_loops():
    seen = set()
    for seed in range(60):
        values = drawn(seed)
        found = sequential_verdicts(UNTIL, METRIC, values, ALL)
        assert {pair: (one.verdict, one.seeds) for pair, one in found.items()} == reference(values)
        seen |= {one.verdict for one in found.values()}
        counted = seeds_that_count(UNTIL, found)
        for arm in KEYS:
            own = [7 if one.verdict == "open" else one.seeds for pair, one in found.items() if arm in pair]
            assert counted[arm] == max(own)
    assert seen >= {"higher", "lower", "within", "out of reach", "open"}


@given(
    st.integers(0, 10**6), st.permutations(ALL), st.permutations(KEYS), st.lists(st.booleans(), min_size=3, max_size=3)
)
@settings(max_examples=50, deadline=None)
def test_verdicts_do_not_depend_on_the_direction_or_the_order(seed, family, arms, turned):
    values = drawn(seed)
    other = [
        Pair(two, one, metric) if turn else Pair(one, two, metric)
        for (one, two, metric), turn in zip(family, turned, strict=True)
    ]
    backwards = {arm: dict(reversed(values[arm].items())) for arm in arms}
    first, second = (
        sequential_verdicts(UNTIL, METRIC, values, ALL),
        sequential_verdicts(UNTIL, METRIC, backwards, other),
    )
    by_test = {pair.test: (pair, one) for pair, one in second.items()}
    for pair, one in first.items():
        found, verdict = by_test[pair.test]
        assert (verdict if found == pair else verdict.mirrored()) == one


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_without_declared_comparisons_the_arms_are_judged_against_the_baseline(seed):
    values = drawn(seed)
    differences = {}
    for arm in KEYS[:2]:
        seeds = range(min(len(values[arm]), len(values[KEYS[2]])))
        differences[arm] = [values[arm][one] - values[KEYS[2]][one] for one in seeds]
    found = sequential_verdicts(UNTIL, METRIC, values, family_of((), ARMS, METRIC, STAR))
    assert {pair.arm: one for pair, one in found.items()} == judge(differences, SequentialRule(3, 7, 1.0))
    assert {pair.against for pair in found} == {KEYS[2]}


@pytest.mark.parametrize("against", [STAR, {}])
def test_the_family_contains_each_pair_once(against):
    family = family_of("all", ARMS, METRIC, against)
    assert len(family) == len({pair.test for pair in family}) == 3
    declared = declared_pairs("all", ARMS, METRIC, against)
    assert {pair.test for pair in declared} == {pair.test for pair in family}
    assert family[:2] == [Pair(arm, KEYS[2], METRIC) for arm in KEYS[:2]] if against else family == declared
