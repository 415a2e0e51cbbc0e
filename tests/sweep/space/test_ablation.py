"""The arms of component ablations, the changes of each arm, and its label."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.results.arms import ABLATED, arm_label
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.sweep.space.designs import ablation_arms, left_out_values
from fedsweep.sweep.space.search_space import SearchSpace
from fedsweep.tracking.trial_description import run_name
from tests.places import without_place
from tests.sweep.helpers import write_space

LEFT_OUT = {
    "method.server_epochs": 0,
    "method.compensate": False,
    "method.domains": "shared",
    "lora.dropout": 0.5,
    "optimizer.clip_norm": None,
}
"""Hyperparameters of the experiment fedbrick_digits, with other values than those of the experiment."""
FILE: dict[str, Any] = {
    "experiment": "fedbrick_digits",
    "ablate": {"method.anneal": False, "method.compensate": "off"},
    "search": {"name": "grid"},
    "scheduler": {"name": "none"},
}
RANKS = {"lora.rank": {"grid": [4, 8]}}
SOME = st.lists(st.sampled_from(sorted(LEFT_OUT)), min_size=1, unique=True)
SUBSETS = st.sampled_from(["one", "all"])


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(changes: dict[str, Any] | None = None, **entries: Any) -> Plan:
        write_space(tmp_path, "mine", FILE | entries)
        return Plan.read("mine", changes or {}, {})

    return make


def space(**entries: Any) -> SearchSpace:
    return SearchSpace.of(FILE | entries, "search space mine")


@given(SOME)
def test_an_ablation_has_one_arm_for_each_component_or_for_each_set(components):
    assert len(ablation_arms(components, "one")) == len(components) + 1
    assert len(ablation_arms(components, "all")) == 2 ** len(components)


@given(SOME, SUBSETS)
def test_the_full_method_is_the_first_arm_and_no_set_is_repeated(components, subsets):
    sets = [arm[ABLATED] for arm in ablation_arms(components, subsets)]
    assert sets[0] == []
    assert len({frozenset(one) for one in sets}) == len(sets)
    assert sorted(sets, key=len) == sets
    assert sets[1 : len(components) + 1] == [[name] for name in components]


@given(SOME, SUBSETS, st.booleans())
def test_an_ablation_crosses_with_every_axis(components, subsets, crossed):
    ablate = {name: LEFT_OUT[name] for name in components}
    arms = space(ablate=ablate, subsets=subsets, space=RANKS if crossed else {}).arms(dict)
    alone = ablation_arms(components, subsets)
    assert [{ABLATED: arm[ABLATED]} for arm in arms] == alone * (2 if crossed else 1)
    assert [arm.get("lora.rank") for arm in arms] == (
        [4] * len(alone) + [8] * len(alone) if crossed else [None] * len(alone)
    )


@pytest.mark.parametrize("axes", [{}, RANKS])
def test_an_arm_differs_from_the_full_method_only_in_its_components(read, axes):
    plan = read(ablate=LEFT_OUT, subsets="all", space=axes)
    arms = plan.arms
    assert len(arms) == 2 ** len(LEFT_OUT) * (2 if axes else 1)
    for arm in arms:
        full, found = (flat(plan.resolve(one, 3)) for one in ({**arm, ABLATED: []}, arm))
        assert {name: found[name] for name in found if found[name] != full[name]} == {
            name: LEFT_OUT[name] for name in arm[ABLATED]
        }


def test_the_full_method_is_the_experiment_with_the_fixed_changes(read):
    plan = read({"local.steps": 2}, fixed={"federation.rounds": 3})
    full = plan.resolve({ABLATED: []}, 0)
    assert full == plan.base
    assert (full.local.steps, full.federation.rounds) == (2, 3)


@pytest.mark.parametrize("word", ["off", False])
def test_off_and_false_are_equivalent(read, word):
    plan = read(ablate={"method.compensate": word})
    assert plan.resolve({ABLATED: ["method.compensate"]}, 0).method.compensate is False


def test_off_and_on_become_booleans_for_boolean_hyperparameters_only():
    known = {"true": True, "false": False, "word": "softmax", "number": 1.0}
    ablate = {"true": "off", "false": "on", "word": "off", "number": "off", "unknown": "on"}
    expected = {"true": False, "false": True, "word": "off", "number": "off", "unknown": "on"}
    assert left_out_values(ablate, known) == expected


def test_the_full_method_is_the_baseline_unless_another_is_named(read):
    assert space().baseline == {ABLATED: []}
    assert space(space=RANKS).baseline == {ABLATED: []}
    assert space(baseline=None).baseline is None
    assert space(ablate=None, space=RANKS).baseline is None
    named = {ABLATED: ["method.anneal"]}
    assert space(baseline=named).baseline == named
    assert space(baseline={"lora.rank": 4}, space=RANKS).baseline == {"lora.rank": 4}


def test_trials_of_an_ablation_have_readable_names_everywhere(read, tmp_path):
    plan = read(space=RANKS, seeds=[0], subsets="all")
    trials = plan.grid()
    sets = ["full", "without anneal", "without compensate", "without anneal, compensate"]
    assert [trial.label for trial in trials] == [f"lora.rank={rank}, {words}" for rank in (4, 8) for words in sets]
    assert [run_name(trial) for trial in trials[:2]] == [f"rank 4 · {words} · seed 0" for words in sets[:2]]
    assert len({trial.key for trial in trials}) == 8
    manifest = new_sweep(plan, Store(tmp_path / "mlruns")).manifest()
    assert manifest.varied == ("lora.rank", "method.anneal", "method.compensate")
    assert manifest.baseline == {ABLATED: []}


def test_labels_show_the_whole_name_of_a_component_outside_the_method():
    assert arm_label({ABLATED: ["method.momentum", "optimizer.momentum"]}) == "without momentum, optimizer.momentum"


def test_a_reference_may_contain_any_arm(read):
    arms = [{ABLATED: []}, {ABLATED: ["method.anneal"]}]
    printed = [{"arm": arm, "values": {"accuracy/mean": 50 + place}} for place, arm in enumerate(arms)]
    paper = read(reference={"source": "Table 4", "arms": printed}).reference
    assert [paper.value(arm, "accuracy/mean") for arm in space().arms(dict)] == [0.5, 0.51, None]


TO_WRITE = (
    "write `baseline: {without: []}` or `baseline: {without: [method.anneal]}` or "
    "`baseline: {without: [method.compensate]}`."
)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"ablate": {}}, "`ablate` must have at least 1 item, but it is {}."),
        ({"ablate": None}, "at least one of `space`, `named` and `ablate` must be given, but none is."),
        ({"ablate": ["method.anneal"]}, '`ablate` must be a mapping of names to values, but it is ["method.anneal"].'),
        (
            {"ablate": {"method.aneal": False}},
            "`method.aneal` is not a hyperparameter of this run; did you mean `method.anneal` or `method.rank` or "
            "`method.name`?",
        ),
        (
            {"ablate": {"method.anneal": True}},
            "`ablate` sets `method.anneal` to true, but it already has this value in the arm full.",
        ),
        (
            {"ablate": {"method.anneal": "on"}},
            "`ablate` sets `method.anneal` to true, but it already has this value in the arm full.",
        ),
        (
            {"ablate": {"method.server_epochs": 0}, "fixed": {"method": "fedbrick", "method.server_epochs": 0}},
            "`method.server_epochs` is varied by the search space and cannot also be in `fixed`.",
        ),
        (
            {"ablate": {"method.lambda_w": 0}, "fixed": {"method": {"name": "fedbrick", "lambda_w": 0.0}}},
            "`ablate` sets `method.lambda_w` to 0, but it already has this value in the arm full.",
        ),
        (
            {"space": {"method.anneal": {"grid": [True, False]}}},
            "`method.anneal` is left out by `ablate` and cannot also vary in `space`.",
        ),
        (
            {"space": {"method.anneal, lora.rank": {"grid": [[True, 4]]}}},
            "`method.anneal` is left out by `ablate` and cannot also vary in `space`.",
        ),
        (
            {"space": {"method": {"grid": [{"name": "fedbrick", "compensate": False}, "fedbrick"]}}},
            "`ablate` sets `method.compensate` to false, but it already has this value in the arm "
            "method=fedbrick (compensate false), full.",
        ),
        (
            {"ablate": {"seed": 1}},
            "`seed` must not be a hyperparameter of the search space; list the seeds in `seeds`.",
        ),
        ({"search": {"name": "tpe"}, "seeds": [0]}, "`ablate` needs `search` grid, but it is tpe."),
        (
            {"ablate": None, "space": RANKS, "subsets": "all"},
            "`subsets` all needs components in `ablate`, but there are none.",
        ),
        ({"subsets": "every"}, "`subsets` must be 'one' or 'all', but it is \"every\"."),
        (
            {"baseline": {ABLATED: ["method.compensate", "method.anneal"]}},
            "`baseline` must be one of the arms, but {'without': ['method.compensate', 'method.anneal']} is not; "
            f"{TO_WRITE}",
        ),
        ({"baseline": {}}, f"`baseline` must be one of the arms, but {{}} is not; {TO_WRITE}"),
    ],
)
def test_an_invalid_ablation_is_rejected(read, entries, sentence):
    with pytest.raises(UserError) as refusal:
        read(**entries)
    assert without_place(str(refusal.value)) == sentence


@pytest.mark.parametrize(
    ("ablate", "sentence"),
    [
        ({"method.anneal": 3}, "without anneal: `method.anneal` must be true or false, but it is 3."),
        (
            {"method.lambda_w": "off"},
            'without lambda_w: `method.lambda_w` must be a number, but it is "off".',
        ),
    ],
)
def test_the_error_about_a_wrong_type_names_the_arm(read, ablate, sentence):
    with pytest.raises(UserError) as refusal:
        read(ablate=ablate)
    assert without_place(str(refusal.value)) == f"arm {sentence}"


def test_a_component_cannot_be_overridden(read):
    with pytest.raises(UserError, match=r"`method.anneal` is varied by search space mine and cannot be overridden"):
        read({"method.anneal": False})


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ({"space": {f"axis{number}": {"grid": [*range(12)]} for number in range(8)}}, "429,981,696"),
        ({"ablate": {f"method.part{number}": False for number in range(14)}, "subsets": "all"}, "16,384"),
        ({"named": {str(number): {"lora.rank": 1} for number in range(10_001)}}, "10,001"),
    ],
)
def test_a_grid_that_is_too_large_to_be_listed_is_rejected(entries: dict[str, Any], count: str) -> None:
    said = rf"^here: a grid can have at most 10,000 arms, but this one has {count}; give fewer values, or sample arms"
    with pytest.raises(UserError, match=said):
        SearchSpace.of({"experiment": "fedra_digits", **entries}, "here")


def test_a_design_that_changes_one_factor_at_a_time_may_have_many_factors() -> None:
    axes = {f"axis{number}": {"grid": [*range(12)]} for number in range(8)}
    given = {"space": axes, "design": "one_factor", "baseline": dict.fromkeys(axes, 0)}
    space = SearchSpace.of({"experiment": "fedra_digits", **given}, "here")
    assert len(space.arms(dict)) == 1 + 8 * 11
