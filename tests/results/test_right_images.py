"""The file with the test images that a trial predicts correctly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, TrialPlan, TrialStore
from fedsweep.results.folders import read_right
from fedsweep.results.records import RIGHT
from fedsweep.results.right_images import RightImages, numbered, packed_bits

PARTS = st.lists(
    st.tuples(st.lists(st.booleans(), max_size=20), st.none() | st.lists(st.integers(0, 2**40), min_size=20)),
    min_size=1,
    max_size=4,
)


def record(parts: list[tuple[list[bool], list[int] | None]], data: str = "d") -> RightImages:
    """Return the record of domains `0`, `1`, ...; the last one is held out."""
    right = {str(place): np.array(bits, bool) for place, (bits, _) in enumerate(parts)}
    groups = [None if own is None else np.array(own[: len(bits)], np.int64) for bits, own in parts]
    return RightImages.of_domains(data, right, {str(len(parts) - 1)}, groups)


@given(PARTS)
def test_the_file_returns_the_bits_and_the_partition_into_groups(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[list[bool], list[int] | None]]
) -> None:
    path = tmp_path_factory.mktemp("right") / RIGHT
    path.write_bytes(record(parts).content())
    found = read_right(path)
    for place, (bits, _) in enumerate(parts):
        assert found.of_domain(place).tolist() == bits
    assert [(one.name, one.images, one.held_out) for one in found.domains] == [
        (str(place), len(bits), place == len(parts) - 1) for place, (bits, _) in enumerate(parts)
    ]
    labels: list[object] = []  # the group of each image, which no other image has if there are no groups
    for place, (bits, own) in enumerate(parts):
        labels += [(place, row) if own is None else own[row] for row in range(len(bits))]
    first: dict[object, int] = {}
    assert found.group_numbers.tolist() == [first.setdefault(label, len(first)) for label in labels]


@given(st.integers(1, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_shares_are_the_means_over_the_rounds(images: int, earlier: int, random: Any) -> None:
    rounds = np.array([[random.random() < 0.5 for _ in range(images)] for _ in range(earlier + 1)])
    half = images // 2
    parts = [{"a": one[:half], "b": one[half:]} for one in rounds]
    packed = [packed_bits(one.values()) for one in parts[:-1]]
    kept = RightImages.of_domains("d", parts[-1], (), [None, None], packed)
    found = RightImages.model_validate_json(kept.content())
    found.check("file")
    assert found == kept
    assert found.earlier is not None
    assert len(found.earlier) == earlier
    assert found.values_of_rounds().tolist() == rounds.mean(axis=0).tolist()
    assert np.concatenate([found.of_domain(0), found.of_domain(1)]).tolist() == rounds[-1].tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_shares_of_sampled_images_have_the_means_of_the_samples(
    sizes: list[int], earlier: int, random: Any
) -> None:
    tested = [np.array([random.random() < 0.4 for _ in range(size)]) for size in sizes]
    for one in tested:
        one[random.randrange(len(one))] = True
    rounds = [[np.array([random.random() < 0.5 for _ in range(size)]) for size in sizes] for _ in range(earlier + 1)]
    samples = [packed_bits([bits[one] for bits, one in zip(of, tested, strict=True)]) for of in rounds[:-1]]
    last = {str(place): bits for place, bits in enumerate(rounds[-1])}
    kept = RightImages.of_domains("d", last, (), [None] * len(sizes), samples, tested)
    found = RightImages.model_validate_json(kept.content())
    found.check("file")
    assert found.in_sample is not None
    assert found.in_sample.tolist() == np.concatenate(tested).tolist()
    for place, share in enumerate(np.split(found.values_of_rounds(), found.starts[1:-1])):
        means = [of[place][tested[place]].mean() for of in rounds[:-1]]
        assert share.mean() == pytest.approx(np.mean([*means, rounds[-1][place].mean()]), abs=1e-12)
        for image, is_tested in enumerate(tested[place]):
            of_rounds = [float(rounds[-1][place][image])]
            for of, mean in zip(rounds, means, strict=False):
                weight = sizes[place] / int(tested[place].sum()) if is_tested else 0.0
                of_rounds.append(mean + weight * (float(of[place][image]) - mean))
            assert share[image] == pytest.approx(np.mean(of_rounds), abs=1e-12)


def test_an_image_that_was_not_tested_counts_as_the_accuracy_of_the_sample() -> None:
    """The earlier round tested the first, the second and the fourth of five images, with an accuracy of two thirds."""
    last, tested = np.array([True, False, True, True, False]), np.array([True, True, False, True, False])
    kept = RightImages.of_domains("d", {"a": last}, (), [None], [np.packbits([True, False, True])], [tested])
    right, wrong = 2 / 3 + 5 / 3 * (1 - 2 / 3), 2 / 3 - 5 / 3 * 2 / 3
    earlier = [right, wrong, 2 / 3, right, 2 / 3]
    expected = [(one + after) / 2 for one, after in zip(earlier, (1, 0, 1, 1, 0), strict=True)]
    assert kept.values_of_rounds() == pytest.approx(expected, abs=1e-12)
    assert np.mean(expected) == pytest.approx((3 / 5 + 2 / 3) / 2)


def test_a_sample_of_all_images_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    *before, last = ({"a": rng.random(9) < 0.5, "b": rng.random(4) < 0.5} for _ in range(3))
    packed = [packed_bits(one.values()) for one in before]
    whole = RightImages.of_domains("d", last, (), [None, None], packed)
    sampled = RightImages.of_domains("d", last, (), [None, None], packed, [np.full(9, True), np.full(4, True)])
    assert sampled.earlier == whole.earlier
    assert sampled.values_of_rounds() == pytest.approx(whole.values_of_rounds(), abs=1e-15)


def test_a_file_without_earlier_rounds_is_as_before() -> None:
    whole = record([([True, False, True], None)])
    assert whole.earlier is None
    assert set(json.loads(whole.content())) == {"data", "domains", "right", "groups"}
    assert RightImages.model_validate_json(whole.content()) == whole
    assert whole.values_of_rounds().tolist() == [1, 0, 1]


def test_the_number_of_a_group_does_not_depend_on_its_name() -> None:
    assert numbered([np.array([7, 3, 7]), None, np.array([3, 9])], [3, 2, 2]).tolist() == [0, 1, 0, 2, 3, 1, 4]


def test_the_file_is_short() -> None:
    rng = np.random.default_rng(0)
    scans = np.sort(rng.permutation(1797)[:359])
    digits = {f"style {place}": rng.random(359) < 0.7 for place in range(6)}
    assert len(RightImages.of_domains("0" * 64, digits, (), [scans] * 6).content()) < 2_000
    many = {f"domain {place}": rng.random(176_000 // 6) < 0.7 for place in range(6)}
    assert len(RightImages.of_domains("0" * 64, many, (), [None] * 6).content()) < 32_000
    last = np.concatenate(list(digits.values()))
    changed = [np.packbits(last ^ (rng.random(len(last)) < 0.03)) for _ in range(5)]  # of six rounds
    assert len(RightImages.of_domains("0" * 64, digits, (), [scans] * 6, changed).content()) < 4_000


@pytest.mark.parametrize(
    "change",
    [
        {"right": "AAAA"},
        {"right": "?"},
        {"groups": "eJwDAAAAAAE="},
        {"groups": "!"},
        {"groups": "AAAA"},
        {"earlier": ["eJwDAAAAAAE="]},
        {"earlier": ["!"]},
        {"earlier": ["AAAA"]},
        {"sample": "eJwDAAAAAAE="},
        {"sample": "!"},
        {"sample": "AAAA"},
        {"sample": "eNr73wAAAoABgA=="},  # without earlier rounds
        {"sample": "eNpjYAAAAAIAAQ==", "earlier": ["eNpjYAAAAAIAAQ=="]},  # of no image
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: dict[str, str]) -> None:
    whole = record([([True] * 9, None)])
    path = tmp_path / RIGHT
    path.write_text(json.dumps({**json.loads(whole.content()), **change}))
    with pytest.raises(UserError, match=f"{RIGHT} is damaged: its bits and groups do not fit"):
        read_right(path)
    path.write_bytes(whole.content()[:40])
    with pytest.raises(UserError, match=RIGHT):
        read_right(path)
    path.write_bytes(whole.content())
    assert read_right(path) == whole


def test_a_reused_trial_has_the_file(tmp_path: Path) -> None:
    first, second = TrialStore(tmp_path / "first"), TrialStore(tmp_path / "second")
    plan = TrialPlan(key="k", number=0, arm={}, seed=0, config={})
    for store in (first, second):
        store.plan(plan)
    (first.folder / RIGHT).write_bytes(record([([True, False], None)]).content())
    assert first.read().right == first.folder / RIGHT
    assert second.read().right is None
    first.end(Outcome(outcome="failed", round=0))
    second.copy(first, ("finished",))
    assert (second.folder / RIGHT).read_bytes() == (first.folder / RIGHT).read_bytes()
    assert second.read().right == second.folder / RIGHT
    assert first.read().artifacts == {}  # files that are sent to MLflow
