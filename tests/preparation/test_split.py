"""The split into training and test images, which is drawn for each class and depends only on names."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.preparation.layouts.base import Item, Listing
from fedsweep.preparation.plan import plan_domains

NAMES = ("bus", "cat", "dog")


def listing(counts: dict[str, list[int]], splits=None) -> Listing:
    items = [
        Item(f"{domain}/{NAMES[label]}/{number}.png", label, domain, splits and splits[number % len(splits)])
        for domain, numbers in counts.items()
        for label, count in enumerate(numbers)
        for number in range(count)
    ]
    return Listing(NAMES, tuple(counts), tuple(items))


def places(domain) -> dict[str, int]:
    return {item.path: slot for item, slot in zip(domain.items, domain.slots, strict=True)}


@given(st.lists(st.integers(1, 40), min_size=3, max_size=3).filter(lambda many: max(many) > 1), st.floats(0.01, 0.99))
def test_the_share_of_test_images_holds_for_every_class(counts, fraction):
    (domain,) = plan_domains(listing({"photo": counts}), fraction)
    assert sorted(domain.slots) == list(range(sum(counts)))
    tests = Counter(item.label for item, slot in zip(domain.items, domain.slots, strict=True) if slot >= domain.train)
    for label, count in enumerate(counts):
        assert tests[label] == (min(max(round(fraction * count), 1), count - 1) if count > 1 else 0)


def test_the_split_is_the_documented_permutation():
    (domain,) = plan_domains(listing({"photo": [10, 5, 5]}), 0.2)
    paths = sorted(f"photo/bus/{number}.png" for number in range(10))
    chosen = sorted(paths[place] for place in stream(0, "split", "photo", "bus").permutation(10)[:2])
    assert [path for path, slot in places(domain).items() if slot >= domain.train and "bus" in path] == chosen


def test_within_a_split_images_are_sorted_by_label_and_path():
    (domain,) = plan_domains(listing({"photo": [12, 12, 12]}), 0.25)
    paths = sorted(places(domain), key=places(domain).__getitem__)
    for part in (paths[: domain.train], paths[domain.train :]):
        assert part == sorted(part, key=lambda path: (NAMES.index(path.split("/")[1]), path))


def test_the_order_of_files_does_not_matter():
    whole = listing({"photo": [10, 7, 3], "sketch": [4, 4, 4]})
    order = np.random.default_rng(0).permutation(len(whole.items))
    mixed = plan_domains(Listing(NAMES, whole.domains, tuple(whole.items[place] for place in order)), 0.2)
    for one, other in zip(plan_domains(whole, 0.2), mixed, strict=True):
        assert (one.name, one.train, places(one)) == (other.name, other.train, places(other))


def test_the_split_of_a_class_does_not_depend_on_other_classes():
    (few,) = plan_domains(listing({"photo": [10, 2, 2]}), 0.3)
    (many,) = plan_domains(listing({"photo": [10, 40, 30]}), 0.3)

    def tests(domain):
        return {path for path, slot in places(domain).items() if slot >= domain.train and "bus" in path}

    assert tests(few) == tests(many)
    assert len(tests(few)) == 3


def test_domains_are_split_differently():
    photo, sketch = plan_domains(listing({"photo": [40, 40, 40], "sketch": [40, 40, 40]}), 0.5)
    inside = [np.array([slot < one.train for slot in one.slots]) for one in (photo, sketch)]
    assert not np.array_equal(*inside)


def test_listed_splits_are_used():
    (domain,) = plan_domains(listing({"photo": [10, 10, 10]}, ["train", "test"]), 0.2)
    expected = {path for path in places(domain) if int(path.split("/")[-1][0]) % 2}
    assert {path for path, slot in places(domain).items() if slot >= domain.train} == expected


@pytest.mark.parametrize(("only", "lacks"), [("train", "testing"), ("test", "training")])
def test_a_split_without_images_is_rejected(only, lacks):
    rule = "the domain `photo` must have images for training and for testing"
    with pytest.raises(UserError, match=rf"^{rule}, but it has none for {lacks} \(of 6 in total\)\.$"):
        plan_domains(listing({"photo": [2, 2, 2]}, [only]), 0.2)
