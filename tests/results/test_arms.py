"""The identity of arms, their text, and the values that a paper reports for them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.results.arms import (
    Reference,
    arm_argument,
    at_commas,
    identity,
    parse_arm,
    shown_setting,
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc", min_size=1)
VALUES = st.recursive(
    LEAVES, lambda one: st.lists(one) | st.dictionaries(st.text("abc", min_size=1), one), max_leaves=9
)


def reference(*arms: tuple[dict, dict]) -> Reference:
    data = {"source": "Table 1", "arms": [{"arm": arm, "values": values} for arm, values in arms]}
    return Reference.of(data, "test")


@given(VALUES, VALUES)
def test_two_values_have_one_identity_if_their_json_is_equal(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (identity({"x": one}) == identity({"x": other})) == same


@given(VALUES)
def test_a_value_is_shown_on_one_line_without_quotes_or_braces(value):
    shown = shown_setting(value)
    assert not set(shown) & set("{}'\"\n")
    assert shown


LEAVES_OF_FILES = (
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text("a,='\"[: #1e")
)
ARGUMENTS = st.recursive(
    LEAVES_OF_FILES, lambda one: st.lists(one) | st.dictionaries(st.text("abc"), one), max_leaves=9
)


@given(st.dictionaries(st.text("ab._", min_size=1), ARGUMENTS, min_size=1, max_size=3))
@settings(max_examples=25)
def test_the_text_of_an_arm_is_parsed_as_that_arm(arm):
    assert identity(parse_arm(arm_argument(arm))) == identity(arm)


def test_text_is_split_at_commas_outside_brackets_and_quotes():
    text = "a={x: [1, 2], y: 3},b='1,2',c=\"]\",d="
    assert at_commas(text) == ["a={x: [1, 2], y: 3}", "b='1,2'", 'c="]"', "d="]


@pytest.mark.parametrize("text", ["", "lora.rank", "=4", "a=1,,b=2", "a=1,a=2", "a=[1"])
def test_invalid_arms_are_rejected(text):
    with pytest.raises(UserError, match=r"arm"):
        parse_arm(text)


@given(st.floats(0, 100), st.text("abc/", min_size=1))
def test_reference_accuracies_in_percent_are_returned_as_shares(printed, name):
    paper = reference(({"rank": 4}, {f"accuracy/{name}": printed, f"loss/{name}": printed}))
    assert paper.value({"rank": 4}, f"accuracy/{name}") == pytest.approx(printed / 100, abs=1e-12)
    assert paper.value({"rank": 4}, f"loss/{name}") == printed
    assert paper.value({"rank": 8}, f"loss/{name}") is None
    assert paper.value({"rank": 4.0}, f"loss/{name}") is None, "4 and 4.0 must be different arms"


def test_every_accuracy_with_two_decimals_has_short_digits():
    paper = reference(({"rank": 4}, {f"accuracy/{one}": one / 100 for one in range(10_001)}))
    for hundredths in range(10_001):
        assert paper.value({"rank": 4}, f"accuracy/{hundredths}") == hundredths / 10_000


@pytest.mark.parametrize("wrong", [-0.01, 100.01, 7717])
def test_an_accuracy_outside_0_to_100_percent_is_rejected(wrong):
    with pytest.raises(UserError, match=f"but `accuracy/mean` of rank=4 is {wrong:g}"):
        reference(({"rank": 4}, {"accuracy/mean": wrong}))
    assert reference(({"rank": 4}, {"loss/test": wrong})).metrics() == ["loss/test"]


def test_a_reference_with_the_same_arm_twice_is_rejected():
    reference(({"rank": 1}, {"accuracy/mean": 1}), ({"rank": 1.0}, {"accuracy/mean": 1}))
    with pytest.raises(UserError, match=r"must list each arm once, but it lists rank=1, lr=2 twice"):
        reference(({"lr": 2, "rank": 1}, {"accuracy/mean": 1}), ({"rank": 1, "lr": 2}, {"accuracy/mean": 1}))
