"""The rules of population based training for replaced members, their parents and their new values."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.results.arms import identity
from fedsweep.sweep.pruning.population_replacement import Values, first_generation, successors
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.search_space import SearchSpace
from fedsweep.sweep.space.settings import PopulationScheduler
from tests.sweep.helpers import POPULATION

AXES = {"optimizer.lr": Axis(loguniform=(0.001, 1.0)), "optimizer.momentum": Axis(uniform=(0.0, 0.9))}
SCORES = st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=12)
SCHEDULERS = st.builds(
    PopulationScheduler, quantile=st.sampled_from([0.1, 0.25, 0.5]), resample=st.sampled_from([0.0, 0.25, 1.0])
)


def members_of(scores: list[int | None], seed: int = 0) -> tuple[dict[int, Values], dict[int, float]]:
    """Return random hyperparameters of all members, and the scores of members that did not fail (not None)."""
    drawn = first_generation(AXES, len(scores), seed)
    return dict(enumerate(drawn)), {place: score for place, score in enumerate(scores) if score is not None}


@given(scores=SCORES, scheduler=SCHEDULERS, seed=st.integers(0, 99), order=st.randoms(use_true_random=False))
def test_the_order_of_members_and_names_has_no_effect(
    scores: list[int | None], scheduler: PopulationScheduler, seed: int, order: random.Random
) -> None:
    members, known = members_of(scores)
    found = successors(members, known, 1, AXES, scheduler, seed)
    places = list(members)
    order.shuffle(places)
    members = {place: members[place] for place in places}
    known = {place: known[place] for place in places if place in known}
    assert successors(members, known, 1, dict(reversed(AXES.items())), scheduler, seed) == found


@given(scores=SCORES, scheduler=SCHEDULERS, seed=st.integers(0, 99))
def test_the_worst_members_are_replaced_by_children_of_better_ones_among_the_best(
    scores: list[int | None], scheduler: PopulationScheduler, seed: int
) -> None:
    """The reference is the paper's truncation selection, which uses both ends of the sorted scores."""
    found = successors(*members_of(scores), 1, AXES, scheduler, seed)
    sound = sorted((score for score in scores if score is not None), reverse=True)
    broken = {place for place, score in enumerate(scores) if score is None}
    count = int(scheduler.quantile * len(scores))
    if not sound:
        assert found == {}
        return
    assert broken <= set(found)
    assert len(found) <= max(count, len(broken))
    for place, (copied, _) in found.items():
        parent, own = scores[copied], scores[place]
        assert parent is not None
        assert parent >= sound[: max(count, 1)][-1]
        assert own is None or (own < parent and own <= sound[-max(count - len(broken), 0) :][0])
    if len(set(scores)) == len(scores) and None not in scores:
        assert len(found) == count
    assert not set(found) & {copied for copied, _ in found.values()}, "a parent must not be replaced"


@given(scores=SCORES, scheduler=SCHEDULERS, seed=st.integers(0, 99), generation=st.integers(1, 4))
def test_values_are_the_parents_times_a_factor_or_a_new_draw_within_the_range(
    scores: list[int | None], scheduler: PopulationScheduler, seed: int, generation: int
) -> None:
    members, known = members_of(scores)
    used = [identity(dict(one)) for one in members.values()]
    found = successors(members, known, generation, AXES, scheduler, seed, used)
    given = [identity(dict(values)) for _, values in found.values()]
    assert len({*given, *used}) == len(given) + len(used), "all values must be new and different"
    for parent, values in found.values():
        before = members[parent]
        for name, axis in AXES.items():
            low, high = axis.uniform or axis.loguniform or (math.nan, math.nan)
            assert low <= values[name] <= high
            # Values are drawn anew if the other children of a parent have used all pairs of factors.
            if scheduler.resample == 0 and len(found) == 1 and low < values[name] < high:
                assert min(abs(values[name] / before[name] - factor) for factor in (0.8, 1.2)) < 1e-9


@given(size=st.integers(1, 12), score=st.integers(0, 5), scheduler=SCHEDULERS)
def test_members_with_equal_scores_are_not_replaced(size: int, score: int, scheduler: PopulationScheduler) -> None:
    assert successors(*members_of([score] * size), 1, AXES, scheduler, 0) == {}


def test_any_of_the_best_members_may_become_a_parent() -> None:
    scheduler = PopulationScheduler(quantile=0.5)
    parents = {successors(*members_of([4, 3, 2, 1]), 1, AXES, scheduler, seed)[3][0] for seed in range(20)}
    assert parents == {0, 1}


def test_values_that_were_used_before_are_drawn_anew() -> None:
    """A scheduler with a single factor would give all children of a parent the same values and thus the same run."""
    scheduler = PopulationScheduler(quantile=0.5, factors=(0.5,), resample=0)
    found = successors(*members_of([9, None, None, None]), 1, AXES, scheduler, 0)
    assert len({identity(dict(values)) for _, values in found.values()}) == 3


@given(size=st.integers(1, 9), seed=st.integers(0, 99))
def test_first_values_of_a_name_depend_on_no_other_name_or_member(size: int, seed: int) -> None:
    whole = first_generation(AXES, size, seed)
    alone = first_generation({"optimizer.lr": AXES["optimizer.lr"]}, size + 1, seed)[:size]
    assert [one["optimizer.lr"] for one in whole] == [one["optimizer.lr"] for one in alone]


def test_first_values_fill_their_ranges_evenly() -> None:
    drawn = first_generation(AXES, 400, 0)
    logs = sorted(math.log10(one["optimizer.lr"]) / 3 + 1 for one in drawn)
    linear = sorted(one["optimizer.momentum"] / 0.9 for one in drawn)
    for values in (logs, linear):  # critical Kolmogorov-Smirnov distance at the 1% level: 1.63 / sqrt(n)
        assert max(abs(one - (place + 0.5) / 400) for place, one in enumerate(values)) < 1.63 / math.sqrt(400)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"space": {"lora.rank": {"integer": [1, 8]}}}, "`loguniform` range, but `space.lora.rank` has `integer`"),
        ({"space": {"lora.position": {"choice": ["l0", "both"]}}}, "range, but `space.lora.position` has `choice`"),
        (
            {"space": {"optimizer.lr": {"uniform": [0.1, 0.5], "step": 0.1}}},
            "needs a range without `step` and `when`, but `space.optimizer.lr` has `step`",
        ),
        (
            {"space": {"optimizer.lr": {"uniform": [0.1, 0.5], "when": {"method.name": "fedra"}}}},
            "needs a range without `step` and `when`, but `space.optimizer.lr` has `when`",
        ),
        ({"space": {"lora.scaling": {"uniform": [0.5, 2.0]}}}, "`lora.scaling` cannot change during a run"),
        ({"space": {"optimizer.lrr": {"uniform": [0.5, 2.0]}}}, "did you mean `optimizer.lr`"),
        ({"search": {"name": "tpe", "samples": 8}}, "`scheduler` pbt needs `search` random, whose samples"),
        (
            {"scheduler": {"name": "pbt", "quantile": 0.2}},
            "must replace at least one of 4 samples, but it is 0.2",
        ),
        ({"scheduler": {"name": "pbt", "quantile": 0.6}}, "`scheduler.quantile` must be less than or equal to 0.5"),
        ({"scheduler": {"name": "pbt", "factors": []}}, "`scheduler.factors`"),
        ({"scheduler": {"name": "pbt", "per": ["optimizer.lr"]}}, "`scheduler.per`"),
    ],
)
def test_search_spaces_that_do_not_fit_are_rejected(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        SearchSpace.of({**POPULATION, **changes}, "search space tiny")
    assert sentence in str(refused.value)
