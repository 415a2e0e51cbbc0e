"""The derivation of seeds and random streams from the seed of a run and names."""

from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.randomness import derived_seed, stream

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
