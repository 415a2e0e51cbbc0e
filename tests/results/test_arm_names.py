"""Every name that fedsweep prints for an arm or a trial selects this arm or trial."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.report.figures.canvas import distinct
from fedsweep.report.units_and_labels import arm_words
from fedsweep.results import TrialPlan
from fedsweep.results.arm_names import BASELINE, select
from fedsweep.results.arms import arm_argument, arm_label, distinct_labels, equality, setting, shown_setting
from fedsweep.tracking.trial_description import run_name

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(-1e6, 1e6)
    | st.sampled_from([1.0, 1, 0.1, 1e-3, 5e-324, 1e22])
    | st.sampled_from(["8", "1.0", "1e3", "null", "none", "true", "False", "", "~", "a, b", "a=1", "#", "x y", "· a"])
    | st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=6)
)
OBJECTS = st.fixed_dictionaries(
    {"name": st.sampled_from(["dirichlet", "label_skew", "8"])}, optional={"alpha": SCALARS, "heads": st.lists(SCALARS)}
)
VALUES = st.recursive(SCALARS | OBJECTS, lambda one: st.lists(one, max_size=3) | OBJECTS, max_leaves=5)
NAMES = ("lora.rank", "partition", "partition.alpha", "optimizer.lr", "server.lr")
ARMS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
    | st.fixed_dictionaries({"arm": st.text("aé, =1·'[", min_size=1).map(str.strip).filter(bool)})
    | st.fixed_dictionaries({"lora.rank": VALUES, "without": st.lists(st.sampled_from(["method.cross", "lora.mu"]))}),
    min_size=1,
    max_size=4,
    unique_by=equality,
)


def printed(arm: dict) -> set[str]:
    """Return the names that tables, sentences, figures, plans and MLflow's run names print for an arm."""
    plan = TrialPlan(key="k", number=0, arm=arm, seed=3, config={})
    by_column = ", ".join(f"{name}={shown_setting(value)}" for name, value in arm.items())
    in_csv = ",".join(f"{name}={json.dumps(value)}" for name, value in arm.items())
    names = {arm_label(arm), arm_words(arm, list(arm)), in_csv, run_name(plan).removesuffix(" · seed 3")}
    names |= {arm_words(arm, list(arm)) + BASELINE}
    return names | ({by_column} if not {"arm", "without"} & {*arm} else set())


@given(ARMS)
@settings(max_examples=150, deadline=None)
def test_each_printed_name_of_an_arm_selects_this_arm(arms):
    owners: dict[str, set[int]] = {}
    for place, arm in enumerate(arms):
        for name in printed(arm) - {"", "seed 3"}:  # the run of an arm without entries is named after its seed
            owners.setdefault(name, set()).add(place)
    assert owners
    for name, places in owners.items():
        found = select(name, arms)
        assert set(found) & places, f"{name!r} selects none of the arms that print it"
        if len(places) == 1:
            assert found == [*places], f"{name!r} must select one arm"
    for place, name in enumerate(distinct_labels(arms)):
        assert select(name, arms) == [place], f"{name!r} must select one arm"


@given(ARMS, st.integers(20, 40))
@settings(max_examples=150, deadline=None)
def test_each_label_of_a_figure_selects_its_arm(arms, letters):
    dotted = list(dict.fromkeys(name for arm in arms for name in arm))
    words = [arm_words(arm, dotted) for arm in arms]
    bare = ["".join(text.split()) for text in words]
    for place, label in enumerate(distinct(words, [BASELINE, *[""] * (len(arms) - 1)], 2, letters)):
        found = select(label, arms, dotted)
        assert place in found, f"{label!r} does not select the arm that prints it"
        if bare.count(bare[place]) == 1:
            assert found == [place], f"{label!r} must select one arm"


@given(ARMS, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_each_printed_name_of_a_trial_selects_this_trial(arms, seed):
    trials = [{**arm, "seed": one} for arm in arms for one in range(4)]
    names = distinct_labels(arms)
    for place, arm in enumerate(arms):
        wanted = [4 * place + seed]
        for suffix in (f" · seed {seed}", f", seed={seed}", f",seed={seed}"):
            assert select(names[place] + suffix, trials) == wanted
        assert select(arm_argument({**arm, "seed": seed}), trials) == wanted


DEALT = {"partition": {"name": "dirichlet", "alpha": 1.0, "clients": None}, "lora.rank": 4}
POOLED = {"partition": {"name": "label_skew", "alpha": 0.3}, "lora.rank": 8}


@pytest.mark.parametrize(
    "text",
    [
        "partition=dirichlet (alpha 1, clients null), lora.rank=4",
        "partition dirichlet (alpha 1, clients null), rank 4",
        'partition={"name": "dirichlet", "alpha": 1, "clients": null}',
        "partition=dirichlet",
        "partition.name=dirichlet",
        "partition.alpha=1",
        "rank=4.0",
        "alpha=1.0,rank=4",
    ],
)
def test_an_arm_with_an_object_is_selected_by_its_parts(text):
    assert select(text, [DEALT, POOLED]) == [0]


@pytest.mark.parametrize(
    "text", ["", "rank=5", "rank=true", "partition=dirichlt", "rank=4,rank=4", "rank 4 rank 4", ","]
)
def test_other_texts_select_no_arm(text):
    assert select(text, [DEALT, POOLED, {"lora.rank": 1}]) == []


def test_a_complete_name_is_preferred_to_a_part_of_a_longer_name():
    arms = [{"method": "fedra"}, {"method": "fedra", "lora.rank": 4}]
    assert select("method=fedra", arms) == [0]
    assert select("rank 4", arms) == [1]
    assert select("method=fedra, rank 4", arms) == [1]


def test_settings_that_print_alike_differ_in_quotes():
    values = [8, "8", None, "null", "none", True, "true", 8.5, "8.5", [], "[]", "", "a"]
    assert len({setting("x", value, "=") for value in values}) == len(values)
