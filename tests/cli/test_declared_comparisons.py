"""The setting `comparisons` of a search space: what it contains, and the error messages about it before a sweep."""

import hashlib
import json
from typing import Any

import pytest
import yaml

from fedsweep.common.errors import UserError
from fedsweep.results.arms import identity
from fedsweep.results.declared_comparisons import declared_pairs
from fedsweep.sweep.plan.comparison_checks import MOST, wrong_comparisons
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running import open_sweep
from fedsweep.sweep.running.time_estimate import seed_forecast_lines
from tests.cli.conftest import GRID, Refused, write
from tests.places import without_place

RANKS = "values of `lora.rank` are 1, 4, 8, 16."
MINE: dict[str, Any] = {
    "experiment": "fedra_digits",
    "named": {"plain": {}, "drop": {"lora.dropout": 0.1}},
    "space": {
        "lora.rank": {"grid": [2, 4]},
        "method": {"grid": ["fedra", "inclusivefl"]},
        "method.beta": {"grid": [0.1, 0.2], "when": {"method.name": "inclusivefl"}},
    },
    "seeds": [0, 1],
}


def compare(arm: dict[str, Any], against: dict[str, Any], **metric: str) -> dict[str, Any]:
    return {"arm": arm, "against": against, **metric}


@pytest.mark.parametrize(
    ("comparisons", "sentence"),
    [
        ([compare({"lora.rank": 5}, {"lora.rank": 8})],
         f"`comparisons.0.arm` must match an arm, but {{lora.rank: 5}} matches none; the {RANKS}"),
        ([compare({"lora.rank": 4}, {"lora.rank": 7})],
         f"`comparisons.0.against` must match an arm, but {{lora.rank: 7}} matches none; the {RANKS}"),
        ([compare({"lora.rnk": 4}, {"lora.rank": 8})], "`comparisons.0.arm` must match an arm, but {lora.rnk: 4} "
         "matches none; `lora.rnk` is not varied; did you mean `lora.rank`?"),
        ([compare({"seed": 4}, {"lora.rank": 8})], "`comparisons.0.arm` must match an arm, but {seed: 4} matches none; "
         "`seed` is not varied, but lora.rank."),
        ([compare({"lora.rank": 4}, {"lora.rank": 4})],
         "`comparisons.0` must compare different arms, but it compares lora.rank=4 with itself."),
        ([compare({}, {"lora.rank": 16}), compare({"lora.rank": 16}, {"lora.rank": 4})], "`comparisons` must contain "
         "each comparison once, but 0 and 1 both compare lora.rank=16 with lora.rank=4 by accuracy/mean."),
        ([compare({"lora.rank": 4}, {"lora.rank": 1}), compare({"lora.rank": 4}, {"lora.rank": 1},
                                                              metric="accuracy/mean")],
         "`comparisons` must contain each comparison once, but 0 and 1 both compare lora.rank=4 with lora.rank=1 by "
         "accuracy/mean."),
        ([compare({"lora.rank": 4}, {"lora.rank": 1}, metric="accuracy/worst_doman")],
         "`comparisons.0.metric` accuracy/worst_doman is not reported by this run; did you mean "
         "`accuracy/worst_domain` or `accuracy/mean` or `accuracy/domain/thick`?"),
        ([compare({"lora.rank": 4}, {})], "`comparisons.0.against` must have at least 1 item, but it is {}."),
        ([{"arm": {"lora.rank": 4}}], "`comparisons.0.against` is missing."),
        ("every", '`comparisons` must be \'all\', or a list, but it is "every".'),
    ],
)  # fmt: skip
def test_wrong_comparisons_are_rejected_before_the_sweep(refused: Refused, comparisons, sentence):
    write("search_spaces", "mine", f"{GRID}\ncomparisons: {json.dumps(comparisons)}\n")
    assert without_place(refused("tune", "mine")) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--scheduler", "asha"], "`scheduler` none, because pruned trials are not compared, but it is asha."),
        (["--scheduler", "arms"], "`scheduler` none, because pruned trials are not compared, but it is arms."),
    ],
)
def test_comparisons_need_a_grid_without_pruning(refused: Refused, options, sentence):
    write("search_spaces", "mine", f"{GRID}\ncomparisons: all\n")
    assert refused("tune", "mine", *options) == f"search space mine: `comparisons` needs {sentence}"


def test_comparisons_need_trained_trials_of_a_grid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("search_spaces", "mine", f"{GRID}\ncomparisons: all\n")
    with pytest.raises(UserError, match="`comparisons` needs trained trials, but `measure` parameters trains none"):
        Plan.read("mine", {}, {"measure": "parameters"})
    with pytest.raises(UserError, match="`comparisons` needs `search` grid, but it is random"):
        Plan.read("mine", {}, {"search": "random"})


UNTIL = {"until": "decided"}


def test_seeds_until_decided_need_comparisons_by_the_objective(refused: Refused):
    second = compare({"lora.rank": 4}, {"lora.rank": 1}, metric="accuracy/worst_domain")
    comparisons = [compare({"lora.rank": 4}, {"lora.rank": 1}, metric="accuracy/mean"), second]
    write("search_spaces", "mine", f"{GRID}\ncomparisons: {json.dumps(comparisons)}\n")
    assert refused("tune", "mine", "--until-decided") == (
        "search space mine: `comparisons.1.metric` must be the objective accuracy/mean, by which `seeds` {until: "
        "decided} decides, but it is accuracy/worst_domain; leave this comparison out, or list the seeds, for example "
        "[0, 1, 2]."
    )


def plan(**entries: Any) -> Plan:
    write("search_spaces", "mine", yaml.safe_dump({**MINE, **entries}, sort_keys=False))
    return Plan.read("mine", {}, {})


@pytest.fixture
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_folder")
def test_arms_are_compared_within_each_value_of_the_axes_that_are_not_named():
    found = plan(comparisons=[compare({"method": "inclusivefl"}, {"method": "fedra"})])
    pairs = declared_pairs(found.space.comparisons, found.arms, "accuracy/mean", {})
    assert len(pairs) == 2 * 2 * 2, "named arms, ranks, and values of beta, which FedRA does not have"
    for pair in pairs:
        arm, against = json.loads(pair.arm), json.loads(pair.against)
        assert (arm.pop("method"), against.pop("method")) == ("inclusivefl", "fedra")
        assert arm.pop("method.beta") in (0.1, 0.2)
        assert arm == against
    named = plan(comparisons=[compare({"arm": "drop"}, {"arm": "plain"})])
    pairs = declared_pairs(named.space.comparisons, named.arms, "accuracy/mean", {})
    assert {(json.loads(pair.arm)["arm"], json.loads(pair.against)["arm"]) for pair in pairs} == {("drop", "plain")}
    assert len(pairs) == len(named.arms) / 2


@pytest.mark.usefixtures("_folder")
def test_an_arm_without_a_counterpart_is_rejected():
    with pytest.raises(UserError) as error:
        plan(comparisons=[compare({"method": "fedra"}, {"method": "inclusivefl"})])
    assert without_place(str(error.value)) == (
        "`comparisons.0` compares the arm lora.rank=2, method=fedra, plain with {method: "
        "inclusivefl}, but no arm has these values and otherwise those of the arm."
    )
    with pytest.raises(UserError) as error:
        plan(comparisons=[compare({"arm": "drap"}, {"arm": "plain"})])
    assert without_place(str(error.value)) == (
        "`comparisons.0.arm` must match an arm, but {arm: drap} matches none; the values of `arm` "
        "are plain, drop; did you mean `drop`?"
    )


@pytest.mark.usefixtures("_folder")
def test_a_second_metric_must_be_reported_by_the_compared_arms_only():
    brick = {"experiment": "fedbrick_digits", "named": None, "fixed": {"evaluation.metrics": ["structural_bias"]}}
    space = {"method.over": {"grid": ["fedra", "depthfl"]}, "method.brick": {"grid": [False, True]}}
    metric = "structural_bias/brick_error"
    within = compare({"method.over": "fedra", "method.brick": True}, {"method.over": "depthfl"}, metric=metric)
    assert plan(**brick, space=space, comparisons=[within]).space.comparisons[0].metric == metric
    with pytest.raises(UserError, match=f"`comparisons.0.metric` {metric} is not reported by the arm .*brick=false"):
        plan(
            **brick, space=space, comparisons=[compare({"method.brick": True}, {"method.brick": False}, metric=metric)]
        )


def test_there_is_a_largest_number_of_comparisons():
    arms = [{"lora.rank": rank} for rank in range(46)]
    assert [*wrong_comparisons("all", arms[:45], "loss/test")] == []
    assert [*wrong_comparisons("all", arms, "loss/test")] == [
        f"`comparisons` must contain at most {MOST:,} pairs of arms, but it contains 1,035."
    ]
    assert [*wrong_comparisons("all", arms[:1], "loss/test")] == [
        "`comparisons` all needs at least two arms, but there is only one."
    ]


@pytest.mark.usefixtures("_folder")
def test_the_comparisons_belong_to_the_definition_of_a_sweep():
    """A sweep cannot be resumed with other comparisons, and older sweeps, which had none, can be resumed."""
    declared = [compare({"arm": "drop"}, {"arm": "plain"})]
    before, after = plan(), plan(comparisons=declared)
    assert before.digests()["definition"] != after.digests()["definition"]
    excluded = {"resources", "reference", "columns", "comparisons", "tune_each", "exclude"}
    older = [before.space.model_dump(mode="json", exclude=excluded), before.base.model_dump(mode="json")]
    assert before.digests()["definition"] == hashlib.sha256(identity(older).encode()).hexdigest()
    manifest = open_sweep._manifest(after, fresh=True)
    assert [one.model_dump() for one in manifest.comparisons] == [{**declared[0], "metric": None}]
    assert [trial.key for trial in before.grid()] == [trial.key for trial in after.grid()]


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("comparisons", "alone"),
    [
        ([compare({"arm": "drop"}, {"arm": "plain"})], None),
        ([compare({"lora.rank": 4}, {"lora.rank": 2})], None),
        ("all", None),
        ([compare({"method": "inclusivefl"}, {"method": "fedra"})], None),
        ([compare({"lora.rank": 4, "arm": "drop"}, {"arm": "plain"})], "lora.rank=2, method=fedra, plain"),
        ([compare({"lora.rank": 2}, {"arm": "plain"})], "lora.rank=4, method=fedra, plain"),
    ],
)
def test_each_arm_needs_a_comparison_if_its_seeds_depend_on_decisions(comparisons, alone):
    """The baseline is optional if arms are compared with each other."""
    if alone is None:
        found = plan(seeds=UNTIL, comparisons=comparisons)
        assert found.space.baseline is None
        return
    with pytest.raises(UserError) as error:
        plan(seeds=UNTIL, comparisons=comparisons)
    assert without_place(str(error.value)) == (
        f"`seeds` {{until: decided}} needs a comparison for every arm, but the arm {alone} is "
        "compared with nothing; add one to `comparisons`, or leave the arm out."
    )


@pytest.mark.usefixtures("_folder")
def test_a_wrong_comparison_is_the_only_mistake():
    """The arms that the comparison was meant for are not also reported as compared with nothing."""
    with pytest.raises(UserError) as error:
        plan(seeds=UNTIL, comparisons=[compare({"lora.rank": 5}, {"lora.rank": 4})])
    assert str(error.value).count("`") == 4
    assert "`comparisons.0.arm` must match an arm" in str(error.value)


def test_the_shipped_space_runs_until_its_comparisons_are_decided():
    found = Plan.read("ablations/brick_per_method", {}, {"seeds": {**UNTIL, "smallest_effect": 2.0}})
    first, *lines = seed_forecast_lines(found)
    assert first == (
        "Expected seeds per arm (and of the baseline) with 7 comparisons, by the standard deviation (sd) of the "
        "paired differences:"
    )
    assert len(lines) == 3
    assert [*seed_forecast_lines(Plan.read("ablations/brick_per_method", {}, {}))] == []
