"""Partitions of domains among clients, with the properties that all rules share and those of each rule."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.dealing import deal_by_dirichlet
from fedsweep.data.partition import (
    POOL,
    AnyPartition,
    FeatureLabelSkew,
    LabelSkew,
    PartitionConfig,
    Split,
    numbered,
)
from fedsweep.types import Domain, FederatedData, ImageSet
from tests.references.dirichlet import cut

KINDS: list[dict[str, Any]] = [
    {"name": "feature_skew"},
    {"name": "feature_label_skew", "clients_per_domain": 3, "alpha": 0.5, "min_size": 5},
    {"name": "label_skew", "clients": 4, "alpha": 0.5, "min_size": 5},
    {"name": "iid", "clients": 12},
    {"name": "centralized"},
    {"name": "centralized_synthetic"},
]
partition = TypeAdapter(PartitionConfig).validate_python


def numbered_data(sizes: tuple[int, ...] = (60, 90), classes: int = 4) -> FederatedData:
    """Return domains whose images have one pixel that encodes their number, so that each image can be traced."""
    domains, first = [], 0
    for place, size in enumerate(sizes):
        numbers = torch.arange(first, first + size)
        images = torch.stack([numbers // 256, numbers % 256, torch.full((size,), place)], 1).to(torch.uint8)
        labels = torch.from_numpy(np.random.default_rng(place).integers(classes, size=size))
        part = ImageSet(images.view(-1, 3, 1, 1), labels)
        domains.append(Domain("ab"[place], part, part))
        first += size
    return FederatedData("numbered", tuple("wxyz"[:classes]), tuple(domains), "digest")


def numbers(images: ImageSet) -> list[int]:
    pixels, labels = images.take(torch.arange(len(images)))
    assert torch.equal(labels, images.labels)
    return (pixels[:, 0, 0, 0].int() * 256 + pixels[:, 1, 0, 0].int()).tolist()


def divide(kind: AnyPartition, data: FederatedData, seed: int = 0) -> Split:
    return kind.split(data, dict.fromkeys(kind.clients_of([one.name for one in data.domains]), 3), seed)


def plain(labels: torch.Tensor) -> ImageSet:
    """Return empty images with `labels` and without groups."""
    return ImageSet(torch.zeros(len(labels), 3, 0, 0, dtype=torch.uint8), labels)


@pytest.fixture(params=KINDS, ids=lambda kind: kind["name"])
def kind(request: pytest.FixtureRequest) -> Callable[..., AnyPartition]:
    return lambda **more: partition({**request.param, **more})


def test_all_partitions_are_tested():
    kinds = {one.model_fields["name"].default for one in AnyPartition.__args__}
    assert kinds == {one["name"] for one in KINDS}
    assert len(kinds) == 6


@pytest.mark.parametrize(
    "shares", [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 0.2, 0.0), (0.1, 0.2, 0.0), (0.1, 0.2, 0.1)]
)
def test_every_image_is_assigned_exactly_once(kind, shares):
    proxies, validated, tuned = shares
    whole = kind(proxy_share=proxies, validation_share=validated, tuning_share=tuned)
    parts = divide(whole, numbered_data())
    held = [number for client in parts.clients for number in numbers(client.train)]
    back, tuning = (
        [number for client in parts.clients if getattr(client, use) for number in numbers(getattr(client, use))]
        for use in ("validation", "tuning")
    )
    proxy = [number for images in parts.proxy.values() for number in numbers(images)]
    assert sorted(held + back + tuning + proxy) == list(range(150))
    assert [bool(proxy), bool(back), bool(tuning)] == [share > 0 for share in shares]


def test_tuning_images_are_taken_from_the_images_that_are_left_after_the_test_images(kind):
    without, ours = (divide(kind(test_share=0.2, tuning_share=share), numbered_data()).clients for share in (0.0, 0.3))
    for one, other in zip(without, ours, strict=True):
        assert numbers(one.test) == numbers(other.test)
        assert sorted(numbers(other.train) + numbers(other.tuning)) == sorted(numbers(one.train))
        assert one.tuning is None
    tuned = sum(len(one.tuning) for one in ours)
    assert tuned / (tuned + sum(len(one.train) for one in ours)) == pytest.approx(0.3, abs=0.05)


def test_images_keep_their_labels(kind):
    data = numbered_data()
    truth = dict(zip(range(150), torch.cat([one.train.labels for one in data.domains]).tolist(), strict=True))
    for client in divide(kind(proxy_share=0.1, validation_share=0.1), data).clients:
        assert client.train.labels.tolist() == [truth[number] for number in numbers(client.train)]


def test_clients_of_lists_the_clients_of_the_partition(kind):
    data = numbered_data()
    announced = kind().clients_of(["a", "b"])
    clients = divide(kind(), data).clients
    assert {client.id: client.domain for client in clients} == announced
    assert list(announced) == [client.id for client in clients] == sorted(announced)
    for client in clients:
        pixels, _ = client.train.take(torch.arange(len(client.train)))
        places = {"ab"[place] for place in pixels[:, 2, 0, 0].tolist()}
        assert places == ({"a", "b"} if client.domain == POOL else {client.domain})


def test_a_division_depends_only_on_the_seed(kind):
    def held(seed: int) -> list[list[int]]:
        return [numbers(one.train) for one in divide(kind(validation_share=0.2), numbered_data(), seed).clients]

    assert held(3) == held(3)
    assert held(3) != held(4)


def test_no_pixels_are_copied(kind):
    data = numbered_data()
    whole = {one.train.images.data_ptr() for one in data.domains}
    for client in divide(kind(proxy_share=0.1), data).clients:
        images = client.train.images
        assert {part.data_ptr() for part in getattr(images, "parts", (images,))} <= whole


def test_the_division_of_a_domain_does_not_depend_on_the_others():
    kind, data = partition(KINDS[1] | {"proxy_share": 0.1, "validation_share": 0.1}), numbered_data()
    alone = FederatedData("numbered", data.class_names, data.domains[1:], "digest")
    both = {client.id: numbers(client.train) for client in divide(kind, data).clients}
    assert {client.id: numbers(client.train) for client in divide(kind, alone).clients}.items() <= both.items()


def test_held_out_shares_have_the_configured_size():
    parts = divide(partition({"name": "feature_skew", "proxy_share": 0.1, "validation_share": 0.2}), numbered_data())
    assert {domain: len(images) for domain, images in parts.proxy.items()} == {"a": 6, "b": 9}
    assert [len(client.validation) for client in parts.clients] == [11, 16]
    tiny = divide(partition({"name": "feature_skew", "validation_share": 0.01}), numbered_data((2, 40)))
    assert [(len(client.train), len(client.validation)) for client in tiny.clients] == [(1, 1), (39, 1)]


def test_feature_skew_does_not_change_a_domain():
    data = numbered_data()
    clients = divide(partition(KINDS[0]), data).clients
    assert [client.id for client in clients] == ["a", "b"]
    assert all(client.train is domain.train for client, domain in zip(clients, data.domains, strict=True))


def test_centralized_is_one_client_with_all_images():
    data = numbered_data()
    (client,) = divide(partition({"name": "centralized"}), data).clients
    assert (client.id, client.domain, numbers(client.train)) == ("central", POOL, list(range(150)))
    alone = FederatedData("numbered", data.class_names, data.domains[:1], "digest")
    (client,) = divide(partition({"name": "centralized"}), alone).clients
    assert (client.id, client.domain, len(client.train)) == ("central", "a", 60)


@pytest.mark.parametrize("with_synthetic", [False, True])
def test_centralized_trains_on_synthetic_images_if_configured(with_synthetic):
    data = numbered_data()
    made = {
        one.name: ImageSet(torch.full((5, 3, 1, 1), 200, dtype=torch.uint8), torch.arange(5) % 4)
        for one in data.domains
    }
    kind = partition({"name": "centralized", "with_synthetic": with_synthetic, "proxy_share": 0.1})
    assert kind.takes_synthetic is with_synthetic
    before = divide(kind, data)
    parts = kind.joined(before, made)
    (client,), (old,) = parts.clients, before.clients
    assert parts.synthetic == made
    assert parts.proxy is before.proxy
    assert numbers(client.train) == numbers(old.train) + [200 * 256 + 200] * (10 * with_synthetic)
    assert client.train.labels[len(old.train) :].tolist() == [0, 1, 2, 3, 0] * (2 * with_synthetic)


def test_centralized_synthetic_trains_on_no_real_image():
    data = numbered_data()
    made = {
        one.name: ImageSet(torch.full((5, 3, 1, 1), 200, dtype=torch.uint8), torch.arange(5) % 4)
        for one in data.domains
    }
    kind = partition({"name": "centralized_synthetic", "proxy_share": 0.1})
    assert kind.takes_synthetic is True
    before = divide(kind, data)
    parts = kind.joined(before, made)
    (client,) = parts.clients
    assert (client.id, client.domain, numbers(client.train)) == ("central", POOL, [200 * 256 + 200] * 10)
    assert client.train.labels.tolist() == [0, 1, 2, 3, 0] * 2
    assert (parts.synthetic, parts.proxy) == (made, before.proxy)


def test_other_partitions_give_synthetic_images_only_to_the_server():
    data = numbered_data()
    made = {"a": data.domains[0].train}
    others = [one for one in map(partition, KINDS) if one.name != "centralized_synthetic"]
    assert len(others) == 5
    for one in others:
        assert one.takes_synthetic is False
        before = divide(one, data)
        assert one.joined(before, made).clients == before.clients
        assert one.joined(before, made).synthetic == made


def test_iid_shares_differ_by_at_most_one_image():
    sizes = [len(client.train) for client in divide(partition({"name": "iid", "clients": 7}), numbered_data()).clients]
    assert (max(sizes) - min(sizes), sum(sizes), len(sizes)) == (1, 150, 7)


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 20),
    clients=st.integers(1, 5),
    alpha=st.floats(0.3, 1e6),
    seed=st.integers(0, 99),
)
def test_dirichlet_shares_are_disjoint_and_reach_the_minimum(counts, clients, alpha, seed):
    labels = torch.tensor([label for label, count in enumerate(counts) for _ in range(count)])
    parts = deal_by_dirichlet(plain(labels), clients, alpha, 2, np.random.default_rng(seed), "a test")
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    assert len(parts) == clients
    assert min(map(len, parts)) >= 2


def test_dirichlet_equals_the_reference():
    labels = torch.tensor([0] * 50 + [2] * 31 + [5] * 7)
    rng = stream(1, "test")
    order = [rng.permutation(np.flatnonzero(labels.numpy() == label)).tolist() for label in (0, 2, 5)]
    shares = rng.dirichlet([0.7] * 3, size=3).tolist()  # the first draw satisfies the minimum of 1 image
    by_class = [cut(positions, share) for positions, share in zip(order, shares, strict=True)]
    expected = [sorted(itertools.chain(*mine)) for mine in zip(*by_class, strict=True)]
    assert min(map(len, expected)) >= 1
    found = deal_by_dirichlet(plain(labels), 3, 0.7, 1, stream(1, "test"), "a test")
    assert [part.tolist() for part in found] == expected


def spread(labels: list[torch.Tensor], classes: int) -> float:
    """Return the mean total variation distance between the label distributions of single clients and of all clients."""
    counts = torch.stack([torch.bincount(one, minlength=classes).double() for one in labels])
    whole = counts.sum(0) / counts.sum()
    return float((counts / counts.sum(1, keepdim=True) - whole).abs().sum(1).mean() / 2)


@pytest.mark.parametrize("make", [lambda alpha: FeatureLabelSkew(alpha=alpha), lambda alpha: LabelSkew(alpha=alpha)])
def test_a_larger_alpha_is_less_skewed(make):
    data = numbered_data((500, 500))

    def skew(alpha: float) -> float:
        drawn = [divide(make(alpha), data, seed).clients for seed in range(5)]
        return float(np.mean([spread([one.train.labels for one in clients], 4) for clients in drawn]))

    skews = [skew(alpha) for alpha in (0.2, 1.0, 10.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 3 * skews[-1]


def test_numbers_in_the_ids_of_clients_have_the_digits_of_the_largest_number():
    assert numbered("art/", 10) == [f"art/{number}" for number in range(10)]
    ids = numbered("art/", 11)
    assert ids == sorted(ids)
    assert ids[:2] == ["art/00", "art/01"]


def test_too_few_images_for_the_minimum_are_an_error_before_any_draw():
    with pytest.raises(UserError) as refused:
        divide(FeatureLabelSkew(clients_per_domain=7), numbered_data())
    assert str(refused.value) == ("`partition.min_size` 10 for each of 7 clients needs 70 images, but domain a has 60.")


def test_a_minimum_that_no_draw_reaches_is_an_error():
    with pytest.raises(UserError) as refused:
        divide(LabelSkew(clients=5, alpha=1e-3, min_size=29), numbered_data())
    sentence = str(refused.value)
    assert sentence.startswith("`partition.alpha` 0.001 leaves one of the 5 clients of the pool of all domains with ")
    assert "`partition.min_size` 29 in each of 1000 draws (at best 16 of 150)" in sentence
    with pytest.raises(UserError, match=r"in each of 1000 draws \(at best 0 of 150\)"):
        divide(LabelSkew(clients=20, alpha=1e-3, min_size=1), numbered_data())


def test_more_iid_clients_than_images_are_an_error():
    with pytest.raises(
        UserError, match=r"`partition.clients` must be at most 150, the number of images, but it is 151"
    ):
        divide(partition({"name": "iid", "clients": 151}), numbered_data())


def test_a_held_out_share_of_one_image_is_an_error():
    with pytest.raises(UserError, match=r"`partition.validation_share` 0.5 needs at least 2 images, but a has 1\."):
        divide(partition({"name": "feature_skew", "validation_share": 0.5}), numbered_data((1, 9)))


@pytest.mark.parametrize("alpha", [0, -1.0, 1e7])
def test_an_alpha_outside_its_bounds_is_rejected(alpha):
    with pytest.raises(ValueError, match="alpha"):
        partition({"name": "label_skew", "alpha": alpha})
