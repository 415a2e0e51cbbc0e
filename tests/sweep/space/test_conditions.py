"""Axes with conditions, and experimental designs, compared with a reference that tries every combination."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.results.arms import counterparts, identity
from fedsweep.sweep.space import search_space as space_module
from fedsweep.sweep.space.designs import Factorial
from fedsweep.sweep.space.search_space import SearchSpace

NAMES = ["a", "b", "c", "d", "e"]
BASE = dict.fromkeys(NAMES, 1)
"""The values of inactive axes. They are also values of the axes, so that a condition on an inactive axis may hold."""
FILE: dict[str, Any] = {"experiment": "fedra_digits", "scheduler": {"name": "none"}}


@st.composite
def axes(draw) -> dict[str, Any]:
    """Draw up to five axes in any order, each with optional conditions on alphabetically earlier axes."""
    found = {}
    for place, name in enumerate(NAMES[: draw(st.integers(1, 5))]):
        axis: dict[str, Any] = {"values": draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True))}
        asked = draw(st.lists(st.sampled_from(NAMES[:place]), max_size=2, unique=True)) if place else []
        if asked:
            one_of = st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True))
            axis["when"] = {one: draw(one_of) for one in asked}
        found[name] = axis
    return dict(draw(st.permutations(list(found.items()))))


def space(found: dict[str, Any], kind: str = "grid", **entries: Any) -> SearchSpace:
    spelt = {
        name: {kind: axis["values"], **({"when": axis["when"]} if "when" in axis else {})}
        for name, axis in found.items()
    }
    search = {"search": {"name": "grid"}} if kind == "grid" else {"search": {"name": "tpe"}, "seeds": [0]}
    return SearchSpace.of(FILE | search | {"space": spelt} | entries, "mine")


def run(arm: dict[str, Any]) -> dict[str, Any]:
    return BASE | arm


def collapsed(found: dict[str, Any], raw: dict[str, int]) -> dict[str, int]:
    """Return the combination `raw` without the values of inactive axes, by the definition of conditions."""

    def there(name: str) -> bool:
        wanted = found[name].get("when", {})
        return all(value(one) in (asked if isinstance(asked, list) else [asked]) for one, asked in wanted.items())

    def value(name: str) -> int:
        return raw[name] if name in raw and there(name) else BASE[name]

    return {name: raw[name] for name in found if there(name)}


def reference(found: dict[str, Any]) -> list[dict[str, int]]:
    """Return every combination of the axes `found` without inactive values, in the order of first appearance."""
    raw = itertools.product(*(axis["values"] for axis in found.values()))
    arms = [collapsed(found, dict(zip(found, values, strict=True))) for values in raw]
    seen: dict[str, dict[str, int]] = {}
    for arm in arms:
        seen.setdefault(identity(arm), arm)
    return list(seen.values())


@given(axes())
def test_a_grid_with_conditions_equals_the_full_grid_without_inactive_values(found):
    arms = space(found).arms(run)
    assert arms == reference(found)
    assert [list(arm) for arm in arms] == [[name for name in found if name in arm] for arm in arms]


@given(axes(), st.randoms())
def test_exactly_the_active_axes_are_sampled(found, rng):
    sampled, drawn = space(found, "choice"), {}
    raw = {name: rng.choice(axis["values"]) for name, axis in found.items()}
    while (name := sampled.next_name(drawn, run)) is not None:
        assert name not in drawn
        drawn[name] = raw[name]
    assert drawn == collapsed(found, raw)


@given(axes())
def test_probes_of_a_sampled_search_are_the_arms_of_the_grid(found):
    probes = {identity(one) for one in space(found, "choice").probes(run)}
    assert probes == {identity(one) for one in reference(found)}


def items(arm: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(arm.items())


@settings(max_examples=60)
@given(axes())
def test_probes_of_too_many_combinations_contain_every_reachable_pair(found):
    possible = reference(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space_module, "PROBED", 0)
        assert space(found, "choice").probes(run) == []
    pairs = Factorial.pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space_module, "PROBED", max(0, len(possible) - 1))
        patch.setattr(Factorial, "pairs", lambda self, deciding, _: pairs(self, deciding, 10_000))
        chosen = space(found, "choice").probes(run)
    assert {identity(one) for one in chosen} <= {identity(one) for one in possible}
    for size in (1, 2):
        seen, reachable = (
            {subset for arm in arms for subset in itertools.combinations(items(arm), size)}
            for arms in (chosen, possible)
        )
        assert seen == reachable


def test_few_arms_contain_all_pairs_of_many_axes():
    wide = {f"x{place}": {"values": [1, 2, 3, 4]} for place in range(9)}  # 4 ** 9 combinations
    chosen = space(wide, "choice").probes(dict)
    assert 16 <= len(chosen) < 60
    for one, other in itertools.combinations(wide, 2):
        assert len({(arm[one], arm[other]) for arm in chosen}) == 16


def test_probes_contain_the_ends_of_ranges_and_the_values_in_conditions():
    file = FILE | {
        "search": {"name": "tpe"},
        "seeds": [0],
        "space": {
            "a": {"integer": [1, 9]},
            "b": {"uniform": [0.0, 1.0], "when": {"a": [5, 9, 20]}},
            "c": {"loguniform": [0.1, 1.0]},
        },
    }
    probes = SearchSpace.of(file, "mine").probes(dict)
    assert {one["a"] for one in probes} == {1, 9, 5}
    assert {one["a"] for one in probes if "b" in one} == {9, 5}
    assert len(probes) == (1 + 2 * 2) * 2


@settings(max_examples=20)
@given(axes(), st.randoms())
def test_one_factor_has_the_baseline_and_each_single_change(found, rng):
    """All axes in this test are unconditional."""
    bare = {name: {"values": axis["values"]} for name, axis in found.items()}
    baseline = {name: rng.choice(axis["values"]) for name, axis in bare.items()}
    arms = space(bare, design="one_factor", baseline=baseline).arms(run)
    assert len(arms) == 1 + sum(len(axis["values"]) - 1 for axis in bare.values())
    assert arms[0] == baseline
    assert [sum(arm[name] != baseline[name] for name in bare) for arm in arms[1:]] == [1] * (len(arms) - 1)
    assert len({identity(arm) for arm in arms}) == len(arms)
    assert {identity(arm) for arm in arms} <= {identity(arm) for arm in space(bare).arms(run)}
    assert set(counterparts(arms, baseline)) == {identity(arm) for arm in arms}


@given(axes(), st.randoms())
def test_one_factor_with_conditions_has_the_grid_arms_with_a_single_change(found, rng):
    full = space(found).arms(run)
    whole = [arm for arm in full if len(arm) == len(found)]
    if not whole:
        return
    baseline = rng.choice(whole)
    arms = space(found, design="one_factor", baseline=baseline).arms(run)
    expected = [
        collapsed(found, baseline | {name: value})
        for name, axis in found.items()
        for value in axis["values"]
        if value != baseline[name]
    ]
    assert arms == [baseline, *expected]
    assert {identity(arm) for arm in arms} <= {identity(arm) for arm in full}
    others = counterparts(arms, baseline)
    assert all(others[identity(arm)] == baseline for arm in arms)


@given(axes(), st.randoms())
def test_an_arm_is_compared_with_the_arm_that_differs_only_in_the_values_of_the_baseline(found, rng):
    arms = space(found).arms(run)
    whole = rng.choice(arms)
    baseline = {name: whole[name] for name in whole if rng.random() < 0.5}
    others = counterparts(arms, baseline)
    for arm in arms:
        fitting = [
            one for one in arms if items(baseline | one) == items(one) and one.items() <= (arm | baseline).items()
        ]
        assert len(fitting) <= 1
        assert others.get(identity(arm)) == (fitting[0] if fitting else None)


def test_conditions_see_the_changes_of_named_arms():
    named = {"A": {"method": "ft"}, "B": {}}
    file = FILE | {
        "search": {"name": "grid"},
        "named": named,
        "space": {"lora.rank": {"grid": [4, 8], "when": {"method": "fedra"}}},
    }
    arms = SearchSpace.of(file, "mine").arms(lambda arm: {"method": "fedra", **named.get(arm.get("arm"), {})})
    assert arms == [{"arm": "A"}, {"lora.rank": 4, "arm": "B"}, {"lora.rank": 8, "arm": "B"}]


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ({"a": {"a": 1}}, "`when` of `space.a` must not depend on the axis itself."),
        ({"a": {"a.name": 1}}, "`when` of `space.a` must not depend on the axis itself."),
        ({"a": {"b": 1}, "b": {"a.name": 1}}, "the conditions of `space` must not be circular, but `space.a` "
         "depends on `space.b`, which depends on `space.a`."),
        ({"a": {"b": 1}, "b": {"c": 1}, "c": {"a": 1}}, "the conditions of `space` must not be circular, but `space.a` "
         "depends on `space.b`, which depends on `space.c`, which depends on `space.a`."),
    ],
)  # fmt: skip
def test_circular_conditions_are_rejected(conditions, sentence):
    found = {name: {"values": [1, 2], "when": when} for name, when in conditions.items()}
    with pytest.raises(UserError) as refusal:
        space(found)
    assert str(refusal.value) == f"mine: {sentence}"


@pytest.mark.parametrize(
    ("kind", "entries", "sentence"),
    [
        (
            "grid",
            {},
            "`design` one_factor needs a `baseline`, of which it changes one value at a time, but there is none.",
        ),
        ("choice", {}, "`design` one_factor needs `search` grid, but it is tpe."),
    ],
)
def test_one_factor_needs_a_grid_with_a_baseline(kind, entries, sentence):
    with pytest.raises(UserError) as refusal:
        space({"a": {"values": [1, 2]}}, kind, design="one_factor", **entries)
    assert str(refusal.value) == f"mine: {sentence}"
