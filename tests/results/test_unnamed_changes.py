"""The changes that arms make without naming them, in settings and in derived values."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.results.unnamed_changes import DERIVED, ResolvedArm, unnamed_changes

RANKS = st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True)


def ranked(rank: int, alpha: float | None, scaling: float | None = None, **named: Any) -> ResolvedArm:
    lora = {"rank": rank, "alpha": alpha, "scaling": scaling}
    return ResolvedArm(
        {"lora.rank": rank, **named},
        {"seed": rank, "lora": lora},
        {"scaling": scaling if scaling is not None else (alpha or 0) / rank},
    )


def optimized(arm: Any, **settings: Any) -> ResolvedArm:
    return ResolvedArm(arm, {"optimizer": settings}, {})


@given(RANKS, st.floats(0.5, 64))
def test_the_scaling_is_mentioned_if_ranks_share_an_alpha_and_not_if_they_share_a_scaling(ranks, value):
    held = unnamed_changes([ranked(rank, alpha=value) for rank in ranks])
    assert [one.startswith("scaling differs between arms: ") for one in held] == [True] * (len(ranks) > 1)
    assert unnamed_changes([ranked(rank, alpha=None, scaling=value) for rank in ranks]) == []


def test_an_alpha_that_follows_the_rank_leaves_nothing_to_mention():
    assert unnamed_changes([ranked(rank, 2.0 * rank, **{"lora.alpha": 2.0 * rank}) for rank in (2, 8)]) == []


def test_arms_that_name_the_alpha_name_the_scaling():
    arms = [ResolvedArm({"lora.alpha": one}, {"lora": {"alpha": one}}, {"scaling": one / 8}) for one in (4.0, 8.0)]
    assert unnamed_changes(arms) == []


def test_the_rank_changes_the_scaling_even_if_the_alpha_varies_too():
    arms = [ranked(rank, alpha, **{"lora.alpha": alpha}) for rank in (2, 8) for alpha in (8.0, 16.0)]
    assert unnamed_changes(arms) == ["scaling differs between arms: 4, 8, 1, 2 (lora.alpha / lora.rank)"]


def test_named_arms_are_examined_for_derived_values_only():
    arms = [ranked(rank, alpha=8.0, arm=f"model {rank}") for rank in (2, 8)]
    arms = [ResolvedArm({"arm": one.arm["arm"]}, one.config, one.derived) for one in arms]
    assert unnamed_changes(arms) == ["scaling differs between arms: 4, 1 (lora.alpha / lora.rank)"]


def test_many_values_are_given_as_a_range():
    (said,) = unnamed_changes([ranked(2**power, alpha=8.0) for power in range(8)])
    assert said == "scaling differs between arms: 0.0625 to 8 (lora.alpha / lora.rank)"


SGD, ADAM = {"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.0002}
LR = "optimizer.lr differs between arms: 0.1, 0.0002"
CHOICES = {
    "another optimizer by name": ({"optimizer.name": "sgd"}, {"optimizer.name": "adam"}, [LR]),
    "another optimizer as a bare word": ({"optimizer": "sgd"}, {"optimizer": "adam"}, [LR]),
    "one side names the rate": ({"optimizer": SGD}, {"optimizer": {"name": "adam"}}, [LR]),
    "both sides name the rate": ({"optimizer": SGD}, {"optimizer": ADAM}, []),
    "the rate is an entry": (
        {"optimizer": "sgd", "optimizer.lr": 0.1}, {"optimizer": "adam", "optimizer.lr": 0.0002}, []),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second", "said"), CHOICES.values(), ids=CHOICES.keys())
def test_another_component_changes_the_settings_that_its_arm_does_not_name(
    first: Mapping[str, Any], second: Mapping[str, Any], said: list[str]
):
    assert unnamed_changes([optimized(first, **SGD), optimized(second, **ADAM)]) == said


def test_a_default_beside_named_values_of_the_same_component_is_not_mentioned():
    arms = [
        optimized({"optimizer": {"name": "sgd"}}, name="sgd", lr=0.01),
        optimized({"optimizer": {"name": "sgd", "lr": 0.1}}, name="sgd", lr=0.1),
    ]
    assert unnamed_changes(arms) == []


def test_removed_components_are_named():
    arms = [
        ResolvedArm({"without": []}, {"method": {"cross": True, "gate": {"on": True}}}, {}),
        ResolvedArm({"without": ["method.cross"]}, {"method": {"cross": False, "gate": {"on": True}}}, {}),
        ResolvedArm({"without": ["method.gate"]}, {"method": {"cross": True, "gate": {"on": False}}}, {}),
    ]
    assert unnamed_changes(arms) == []


def test_arms_of_earlier_versions_without_derived_values_are_accepted():
    assert unnamed_changes([ResolvedArm({"lora.rank": rank}, {}, {}) for rank in (2, 8)]) == []
    assert len(DERIVED) == 5
