"""Arms that a search space or `--exclude` leaves out of a grid."""

import pytest

from fedsweep.cli.excluded import excluded_arms
from fedsweep.common.errors import UserError
from fedsweep.results.arms import agrees
from fedsweep.sweep.plan.plan import Plan
from tests.sweep.helpers import GRID, SAMPLED, fedsweep, write_space

RANKS = {**GRID, "space": {"lora.rank": {"grid": [1, 4, 8]}, "lora.dropout": {"grid": [0.0, 0.1]}}}


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        ([], 6),
        ([{"lora.rank": 1}], 4),
        ([{"lora.rank": 1, "lora.dropout": 0.1}], 5),
        ([{"lora.rank": 1.0, "lora.dropout": 0}, {"lora.dropout": 0.1}], 2),
    ],
)
def test_exactly_the_arms_that_agree_with_an_entry_are_left_out(tmp_path, monkeypatch, excluded, left):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "all", RANKS)
    write_space(tmp_path, "fewer", {**RANKS, "exclude": excluded})
    every, kept = Plan.read("all", {}, {}), Plan.read("fewer", {}, {})
    assert kept.arms == [arm for arm in every.arms if not any(agrees(one, arm) for one in excluded)]
    assert kept.num_trials == len(kept.grid()) == 2 * left
    assert {one.key for one in kept.grid()} <= {one.key for one in every.grid()}
    assert (kept.digests() == every.digests()) is (not excluded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exclude": [{"lora.rank": 5}]}, "`exclude.0` must match an arm, but {lora.rank: 5} matches none; the values"),
        ({"exclude": [{"lora.rnk": 4}]}, "`lora.rnk` is not varied; did you mean `lora.rank` or"),
        ({"exclude": [{"lora.rank": 4}]}, "`exclude` must not leave out the `baseline` lora.rank=4."),
        ({"exclude": [{}], "baseline": None}, "`exclude` must leave at least one arm, but it leaves none."),
        (
            {"exclude": [{"lora.rank": 1}], "comparisons": [{"arm": {"lora.rank": 1}, "against": {"lora.rank": 8}}]},
            "`comparisons.0.arm` must match an arm, but {lora.rank: 1} matches none",
        ),
        ({**SAMPLED, "exclude": [{"optimizer.lr": 0.1}]}, "`exclude` needs `search` grid, but it is tpe."),
    ],
    ids=["value", "name", "baseline", "none left", "compared", "sampled"],
)
def test_a_wrong_entry_is_reported_before_anything_runs(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "wrong", {**RANKS, **changes})
    with pytest.raises(UserError) as error:
        Plan.read("wrong", {}, {})
    assert message in str(error.value)


def test_the_option_leaves_out_arms_as_the_entry_does(tmp_path):
    write_space(tmp_path, "ranks", RANKS)
    words = "tune", "ranks", "--exclude", "lora.rank=1", "--exclude", "lora.rank=8,lora.dropout=0.1", "--dry-run"
    assert "6 trials of fedra_digits" in fedsweep(tmp_path, *words, trains=False).stdout


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("lora.rank=1", [{"lora.rank": 1}]),
        ("lora.rank=1.0,lora.dropout=0.1", [{"lora.rank": 1.0, "lora.dropout": 0.1}]),
        ("rank=8,dropout=0", [{"lora.rank": 8, "lora.dropout": 0.0}]),
        ("rank 8, dropout 0.1", [{"lora.rank": 8, "lora.dropout": 0.1}]),
        ("rank 8 \u00b7 dropout 0.1", [{"lora.rank": 8, "lora.dropout": 0.1}]),
        ("rank 1", [{"lora.rank": 1, "lora.dropout": 0.0}, {"lora.rank": 1, "lora.dropout": 0.1}]),
        ("rank 1, \u20260.1", [{"lora.rank": 1, "lora.dropout": 0.1}]),
        ("lora.rank=5", [{"lora.rank": 5}]),  # a mistake that is reported with all others
    ],
)
def test_an_excluded_arm_can_be_named_as_for_drop(tmp_path, monkeypatch, text, entries):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "ranks", RANKS)
    assert excluded_arms([text, text], "ranks", ["federation.rounds=3"], {"exclude": ["x"]}) == [*entries, *entries]


@pytest.mark.parametrize(
    ("space", "text", "message"),
    [
        (RANKS, "rank 5", "no arm of wrong is named `rank 5`"),
        (RANKS, "nonsense", "its arms are lora.rank=1, lora.dropout=0; lora.rank=1, lora.dropout=0.1;"),
        (SAMPLED, "rank 1", "`--exclude` needs `search` grid, but search space wrong has `search` tpe."),
        ({**RANKS, "objective": {"mode": "most"}}, "rank 1", "objective.mode"),
    ],
)
def test_a_name_of_no_arm_is_reported(tmp_path, monkeypatch, space, text, message):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "wrong", space)
    with pytest.raises(UserError) as error:
        excluded_arms([text], "wrong", [], {})
    assert message in str(error.value)
