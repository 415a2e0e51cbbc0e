"""The derivation of seeds and random streams from the seed of a run and names."""

import copy
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsweep
from fedsweep.common.randomness import STREAMS, PartialSeed, derived_seed, stream

WORDS = st.text("ab1\x1f\u00e9")
KEYS = st.lists(st.integers() | WORDS, max_size=3)


@given(st.integers(0), WORDS, KEYS)
def test_a_derived_seed_is_a_function_of_its_arguments(seed, purpose, key):
    derived = derived_seed(seed, purpose, *key)
    assert derived == derived_seed(seed, purpose, *key)
    assert 0 <= derived < 2**63


@given(st.integers(0, 1000), st.integers(0, 1000), KEYS)
def test_another_seed_gives_another_derived_seed(first, second, key):
    assert (derived_seed(first, "batches", *key) == derived_seed(second, "batches", *key)) == (first == second)


def test_every_argument_changes_the_derived_seed():
    arguments = [(0, "batches", 1, "a"), (1, "batches", 1, "a"), (0, "dropout", 1, "a"), (0, "batches", 2, "a"),
                 (0, "batches", 1, "b"), (0, "batches", "a", 1), (0, "batches", 1), (0, "batches", "1", "a"),
                 (0, "batches", 11, ""), (10, "batches", 1, "a")]  # fmt: skip
    assert len({derived_seed(*one) for one in arguments}) == len(arguments) == 10


def test_seeds_are_the_same_on_every_machine():
    assert derived_seed(0, "cohort") == 6924757245679827362  # printf "0\x1fcohort" | sha256sum, 63 bits
    assert derived_seed(3, "batches", 7, "noisy") == 663145024632713075
    assert stream(0, "cohort", 3).integers(0, 1000, 5).tolist() == [745, 622, 895, 868, 457]


def test_streams_are_independent():
    alone = stream(0, "cohort", 1).random(3).tolist()
    first, second = stream(0, "cohort", 1), stream(0, "cohort", 2)
    mixed = [(first.random(), second.random())[0] for _ in range(3)]
    assert mixed == alone


PURPOSES = [(name, purpose) for name, group in STREAMS.items() for purpose in sorted(group.purposes)]
GROUPS = st.sets(st.sampled_from([*STREAMS]), min_size=1)


def test_a_purpose_belongs_to_one_group():
    purposes = [purpose for _, purpose in PURPOSES]
    assert len(purposes) == len(set(purposes))
    assert all(group.meaning and group.purposes for group in STREAMS.values())


@given(st.integers(1, 1000), GROUPS, st.sampled_from(PURPOSES), KEYS)
def test_a_partial_seed_determines_only_its_groups(seed, groups, purpose, key):
    own, name = purpose
    expected = derived_seed(seed if own in groups else 0, name, *key)
    assert derived_seed(PartialSeed(seed, groups), name, *key) == expected


@given(st.integers(0, 3), GROUPS, st.integers(0, 3), GROUPS)
def test_partial_seeds_are_keys_of_their_own(first, some, second, others):
    one, other = PartialSeed(first, some), PartialSeed(second, others)
    same = (first, some) == (second, others)
    assert (one == other) == (f"{one}" == f"{other}") == (repr(one) == str(other)) == ({one: 1}.get(other) == 1) == same
    assert one != first
    assert first not in {one: 1}
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):  # noqa: S301
        assert (copied, type(copied), copied.streams) == (one, PartialSeed, one.streams)


def test_a_partial_seed_knows_all_streams_of_a_run():
    rooms = ("data", "models", "training", "methods", "federation")
    code = [path.read_text() for room in rooms for path in (Path(fedsweep.__file__).parent / room).rglob("*.py")]
    seeds = r"(?:self\.|trainer\.|federation\.|config\.)?(?:seed|streams)"
    used = {one for text in code for one in re.findall(rf'(?:stream|derived_seed)\({seeds}, "([^"]+)"', text)}
    used -= {"diffusers"}  # has a seed of its own
    assert {"batches", "jacobian", "surrogate", "gate", "dirichlet"} <= used <= {purpose for _, purpose in PURPOSES}
    for _, purpose in PURPOSES:
        assert any(f'"{purpose}"' in text for text in code), purpose
    with pytest.raises(ValueError, match="`weather` belongs to no group"):
        stream(PartialSeed(1, ["batches"]), "weather")
