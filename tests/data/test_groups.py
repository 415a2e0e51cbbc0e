"""Groups of images, such as the renderings of a scan, are on one side of every split in a run."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import load
from fedsweep.data.dealing import deal_by_dirichlet
from fedsweep.data.groups import TooFewGroupsError, held_out, labels_of_groups, linked, merged, repeated
from fedsweep.data.image_sets import pool
from fedsweep.data.partition import Split
from fedsweep.types import Domain, FederatedData, ImageSet
from tests.data.grouped_sources import PREPARED, SOURCES, images, true_groups, videos
from tests.data.test_partition import KINDS, divide, partition

SHARES = ("proxy_share", "test_share", "validation_share", "tuning_share")


@pytest.fixture(scope="module")
def load_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FederatedData]]:
    """Return a function that returns one of the data sets `SOURCES`, which are made in a data folder of their own."""

    @cache
    def loaded(name: str) -> FederatedData:
        made = SOURCES[name](tmp_path_factory.mktemp("images"))
        return made if isinstance(made, FederatedData) else load(made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSWEEP_DATA", str(tmp_path_factory.mktemp("data")))
        yield loaded


def sides(parts: Split, data: FederatedData) -> dict[str, set[int]]:
    """Return the groups of all images with the same use in a run, over all clients and domains."""
    of_clients = {
        use: set().union(*(true_groups(getattr(client, use), data) for client in parts.clients))
        for use in ("train", "validation", "test", "tuning")
    }
    return of_clients | {
        "proxy": set().union(*(true_groups(one, data) for one in parts.proxy.values())),
        "the data set's test split": set().union(*(true_groups(one.test, data) for one in data.domains)),
    }


def traced(found: ImageSet | None) -> list[tuple[int, int]]:
    """Return the tensor and the row of each image."""
    places = found.places(torch.arange(len(found))) if found is not None else ()
    return [(part.data_ptr(), row) for part, _, rows in places for row in rows.tolist()]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["name"])
@pytest.mark.parametrize("used", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)], ids=str)
def test_no_group_is_on_two_sides_and_no_image_is_lost(load_source, source, kind, used):
    data = load_source(source)
    shares = {name: share for name, share, on in zip(SHARES, (0.1, 0.2, 0.15, 0.15), used, strict=True) if on}
    for seed in (0, 3):
        parts = divide(partition(kind | shares), data, seed)
        for (one, groups), (other, others) in itertools.combinations(sides(parts, data).items(), 2):
            assert not groups & others, f"{one} and {other} share groups"
        found = [
            image
            for client in parts.clients
            for use in ("train", "validation", "test", "tuning")
            for image in traced(getattr(client, use))
        ]
        found += [image for one in parts.proxy.values() for image in traced(one)]
        assert sorted(found) == sorted(image for one in data.domains for image in traced(one.train))
        for client in parts.clients:
            assert len(client.train) > 0
            assert [bool(getattr(client, use)) for use in ("test", "validation", "tuning")] == [*map(bool, used[1:])]


@pytest.mark.parametrize("source", PREPARED)
def test_prepared_groups_are_those_of_the_source(load_source, source):
    """The groups of prepared images equal the groups that their pixels show, up to their numbers."""
    data, pairs = load_source(source), set()
    for domain in data.domains:
        for part in (domain.train, domain.test):
            pairs |= {*zip(part.groups.tolist(), true_groups(part, data), strict=True)}
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) > 150


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS[2:4], ids=lambda kind: kind["name"])
def test_a_pooled_group_reaches_one_client(load_source, source, kind):
    data = load_source(source)
    counts = Counter(
        group for client in divide(partition(kind), data).clients for group in {*true_groups(client.train, data)}
    )
    assert len(counts) > 100
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["name"])
def test_shares_are_met_on_average(load_source, source, kind):
    data = load_source(source)
    parts = divide(partition(kind | {"test_share": 0.2, "proxy_share": 0.1}), data)
    rest = sum(len(one.train) for one in parts.clients)
    tests, proxies = sum(len(one.test) for one in parts.clients), sum(map(len, parts.proxy.values()))
    assert tests / (tests + rest) == pytest.approx(0.2, abs=0.02)
    assert proxies / (proxies + tests + rest) == pytest.approx(0.1, abs=0.01)


def test_groups_without_copies_do_not_change_a_division():
    """Images that are all different are divided as before groups were known."""
    data = videos()
    (domain,) = data.domains
    rows = torch.from_numpy(np.unique(domain.train.groups.numpy(), return_index=True)[1])
    single = domain.train.select(rows)
    alike = ImageSet(single.images, single.labels, single.rows)
    for kind in KINDS:
        both = [
            divide(
                partition(kind | {"min_size": 2} if "min_size" in kind else kind).model_copy(
                    update=dict.fromkeys(SHARES, 0.2)
                ),
                FederatedData("x", data.class_names, (Domain("ucf", one, domain.test),), "digest"),
            )
            for one in (single, alike)
        ]
        for one, other in zip(*(parts.clients for parts in both), strict=True):
            for use in ("train", "validation", "test", "tuning"):
                assert traced(getattr(one, use)) == traced(getattr(other, use))


GROUPS = st.lists(st.integers(0, 12), min_size=2, max_size=30)


@given(st.lists(GROUPS, min_size=1, max_size=5), st.floats(0.01, 0.99), st.integers(0, 9))
def test_held_out_groups_leave_images_on_both_sides_of_every_set(sets, share, seed):
    named = {str(place): np.array(own) for place, own in enumerate(sets)}
    try:
        out = held_out(named, share, np.random.default_rng(seed))
    except TooFewGroupsError:
        return
    for own in named.values():
        assert 0 < np.isin(own, out).sum() < len(own)


def test_a_single_group_cannot_be_held_out():
    one = FederatedData(
        "x", ("a",), (Domain("photo", images(np.zeros(9, int), np.zeros(9, int)), images(*np.zeros((2, 1), int))),), "d"
    )
    with pytest.raises(UserError) as refused:
        divide(partition({"name": "feature_skew", "test_share": 0.2}), one)
    assert str(refused.value) == (
        "`partition.test_share` 0.2 holds out whole groups of images, such as the frames of a video, but photo has too "
        "few groups: 1."
    )


def test_sets_with_groups_of_several_images_are_linked():
    sets = {"a": [0, 1, 2], "b": [3, 3], "c": [4, 5], "d": [5], "e": []}
    assert linked({name: np.array(own, np.int64) for name, own in sets.items()}) == ["b", "c", "d"]
    assert linked({}) == []


def test_the_label_of_a_group_is_the_most_frequent_and_then_the_smallest():
    places, labels, sizes = labels_of_groups(np.array([7, 3, 7, 7, 3, 9]), np.array([1, 4, 2, 2, 0, 5]))
    assert (places.tolist(), labels.tolist(), sizes.tolist()) == ([1, 0, 1, 1, 0, 2], [0, 2, 5], [2, 3, 1])


def test_images_with_a_common_key_are_one_group():
    assert merged([["v1", "x"], ["v2"], ["v3", "x"], ["v1"], ["v2", "z"], ["v4", "z"], []]) == [0, 1, 0, 0, 1, 1, 2]
    assert [repeated([]), repeated([0, 1]), repeated([0, 1, 0])] == [False, False, True]


@pytest.mark.parametrize("seed", range(3))
def test_a_class_is_divided_at_the_borders_of_groups_nearest_to_the_drawn_shares(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(60), rng.integers(1, 8, 60))
    found = deal_by_dirichlet(images(groups, groups % 2), 4, 1.0, 1, np.random.default_rng(seed), "a test")
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.arange(label, 60, 2)) for label in (0, 1)]
    counts = [set(groups[part.numpy()].tolist()) for part in found]
    assert sum(map(len, counts)) == 60
    for _ in range(100):  # until every client has an image
        shares = rng.dirichlet(np.ones(4), size=2).cumsum(axis=1)
        borders = []
        for order, share in zip(orders, shares, strict=True):
            sums = np.concatenate([[0], np.bincount(groups)[order].cumsum()])
            borders.append([int(np.abs(sums - np.rint(one * sums[-1])).argmin()) for one in share[:-1]])
        parts = [np.split(order, border) for order, border in zip(orders, borders, strict=True)]
        expected = [set(np.concatenate(mine).tolist()) for mine in zip(*parts, strict=True)]
        if min(map(len, expected)):
            break
    assert counts == expected


def test_pooled_sets_have_groups_only_if_all_have():
    one = images(np.arange(3), np.zeros(3, int))
    assert pool([one, one]).groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert pool([one, ImageSet(one.images, one.labels)]).groups is None


@pytest.mark.parametrize(
    ("name", "count"), [("label_skew", "clients"), ("iid", "clients"), ("feature_label_skew", "clients_per_domain")]
)
def test_a_number_of_clients_that_no_data_set_has_is_rejected_at_once(name, count):
    with pytest.raises(ValueError, match=count):
        partition({"name": name, count: 1_000_000_000})
