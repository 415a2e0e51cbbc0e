"""The setting `seeds` of a search space: its forms, the streams that seeds determine, and changes by the user."""

from typing import Any

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import STREAMS
from fedsweep.results.seeds import UntilDecided
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.requested_space import read
from fedsweep.sweep.space.search_space import SearchSpace
from tests.sweep.helpers import GRID, write_space

SOME = ["allocation", "batches"]
UNTIL = {"until": "decided", "at_most": 6}


@pytest.fixture
def space(tmp_path, monkeypatch):
    """Return a function that writes a search space with the given `seeds` and reads it with the user's changes."""
    monkeypatch.chdir(tmp_path)

    def make(given: Any, overrides: Any = None, entries: Any = None, **options: Any) -> Plan:
        write_space(tmp_path, "mine", {**GRID, "seeds": given, **(entries or {})})
        return Plan.of(read("mine", overrides or {}, options))

    return make


@pytest.mark.parametrize(
    ("seeds", "sentence"),
    [
        (3, "`seeds` must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is 3."),
        (
            "decided",
            '`seeds` must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is "decided".',
        ),
        ({**UNTIL, "at_most": 100_000}, "`seeds.at_most` must be less than or equal to 200, but it is 100000."),
        ({**UNTIL, "first": -1}, "`seeds.first` must be greater than or equal to 0, but it is -1."),
        (
            {**UNTIL, "smallest_effect": 500},
            "`seeds.smallest_effect` must be less than 100 percentage points for an accuracy, but it is 500.",
        ),
        ([], "`seeds` must have at least 1 item, but it is []."),
        ([0, -1.5], "`seeds.1` must be an integer, but it is -1.5."),
        ([0, 0], "`seeds` must be distinct and not negative, but they are [0, 0]."),
        ({"list": [0, 0]}, "`seeds` must be distinct and not negative, but they are [0, 0]."),
        ({"list": []}, "`seeds.list` must have at least 1 item, but it is []."),
        ({"list": [0], "vry": SOME}, "`seeds.vry` is not an entry of a search space; did you mean `seeds.vary`"),
        ({"list": [0], "vary": []}, "`seeds.vary` must have at least 1 item, but it is []."),
        ({"list": [0], "vary": ["batch"]}, "`seeds.vary.0` must be 'partition', 'cohort', 'allocation', 'batches',"),
        ({**UNTIL, "vry": SOME}, "`seeds.vry` is not an entry of a search space; did you mean `seeds.vary`"),
        ({**UNTIL, "list": [0]}, "must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is {"),
        ({"vary": SOME}, "must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is {'vary':"),
        ({"until": "never"}, "`seeds.until` must be 'decided', but it is \"never\"."),
    ],
)
def test_a_mistake_is_explained_for_the_form_that_was_written(seeds, sentence):
    with pytest.raises(UserError) as refused:
        SearchSpace.of({**GRID, "seeds": seeds}, "here")
    assert sentence in str(refused.value)
    assert "mapping" not in str(refused.value)


@pytest.mark.parametrize("seeds", [{"list": [3, 5], "vary": SOME}, {**UNTIL, "vary": SOME}])
def test_every_trial_has_the_streams_that_seeds_vary(space, seeds):
    plan = space(seeds)
    assert {tuple(plan.resolve(one.arm, one.seed).seed_streams) for one in plan.grid()} == {tuple(SOME)}
    assert {one.seed for one in plan.grid()} == {*seeds.get("list", range(6))}
    other = space(seeds.get("list", UNTIL))
    assert not {one.key for one in plan.grid()} & {one.key for one in other.grid()}


def test_the_user_changes_the_seeds_and_keeps_the_streams(space):
    listed, until = {"list": [3, 5], "vary": SOME}, {**UNTIL, "vary": SOME}
    for seeds, asked, expected in (
        (listed, [7], [7]),
        (until, [7], [7]),
        ([1, 2], [7], [7]),
        (listed, {"until": "decided"}, [*range(20)]),
        (until, {"until": "decided", "smallest_effect": 2.0}, [*range(6)]),
        (until, {"until": "decided", "first": 6}, [*range(6, 12)]),
    ):
        plan = space(seeds, seeds=asked)
        assert [*plan.space.planned_seeds] == expected
        assert plan.base.seed_streams == ("all" if seeds == [1, 2] else tuple(SOME))
        assert isinstance(plan.space.seeds, UntilDecided) == isinstance(asked, dict)


def test_the_order_of_the_streams_does_not_matter(space):
    one, other = (space({"list": [0, 1], "vary": vary}) for vary in (SOME, SOME[::-1]))
    assert [trial.key for trial in one.grid()] == [trial.key for trial in other.grid()]
    every, plain = space({"list": [0, 1], "vary": [*STREAMS]}), space([0, 1])
    assert [trial.key for trial in every.grid()] == [trial.key for trial in plain.grid()]


@pytest.mark.parametrize("vary", [["cohort"], ["synthetic", "cohort"], ["partition"], ["evaluation", "partition"]])
def test_a_stream_that_the_experiment_does_not_use_cannot_be_the_only_one(space, vary):
    whole = {"evaluation.images_per_domain": None}
    with pytest.raises(UserError) as refused:
        space({"list": [0, 1], "vary": vary}, whole)
    wanted = "`seed_streams` must name at least one of the random streams from which the run draws, "
    assert f"{wanted}allocation, batches, initial, but it names only " in str(refused.value)
    assert space({"list": [0, 1], "vary": [*vary, "batches"]}, whole).grid()
    assert space({"list": [0, 1], "vary": ["cohort"]}, {"federation.clients_per_round": 1}).grid()


def test_streams_that_the_experiment_sets_stay_if_seeds_vary_says_nothing(space):
    assert space([0, 1], {"seed_streams": ["initial"]}).base.seed_streams == ("initial",)
    assert space({"list": [0, 1]}, {"seed_streams": ["initial"]}).base.seed_streams == ("initial",)


@pytest.mark.parametrize(
    ("overrides", "entries", "sentence"),
    [
        ({"seed_streams": ["initial"]}, {}, "is set by `seeds.vary` of search space mine and cannot be overridden."),
        ({}, {"fixed": {**GRID["fixed"], "seed_streams": "all"}}, "set in `fixed` and by `seeds.vary`; leave out one"),
        ({}, {"space": {"seed_streams": {"grid": ["all"]}}, "baseline": None}, "must be the same for all arms; name"),
    ],
)
def test_streams_are_named_in_one_place(space, overrides, entries, sentence):
    with pytest.raises(UserError) as refused:
        space({"list": [0, 1], "vary": SOME}, overrides, entries)
    assert sentence in str(refused.value)
