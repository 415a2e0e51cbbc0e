"""Properties that every data source must have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from fedsweep.common.yaml_values import Json
from fedsweep.data.data_config import DataConfig, load
from fedsweep.data.prepared.dataset import Data
from fedsweep.testing.cases import own_changes
from fedsweep.testing.compare import identical
from fedsweep.types import Domain, FederatedData, ImageSet

Read = Any


@pytest.fixture
def read(data_name: str, pytestconfig: pytest.Config) -> Read:
    """Return a function that validates the configuration of the data source with some changes."""
    adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)
    own = own_changes(pytestconfig).items()
    given = {name.removeprefix("data."): value for name, value in own if name.startswith("data.")}

    def make(**changes: Json) -> Data:
        source: Data = type(adapter.validate_python({"name": data_name, **given})).of(
            {"name": data_name, **given, **changes}, "test"
        )
        return source

    return make


def parts(data: FederatedData) -> Iterator[tuple[Domain, ImageSet]]:
    """Yield the training and the test images of each domain, including held-out domains."""
    for domain in (*data.domains, *data.held_out):
        yield from ((domain, one) for one in (domain.train, domain.test))


def test_images_and_labels_have_the_documented_form(read: Read) -> None:
    source = read()
    data = load(source)
    assert [one.name for one in data.domains] == list(source.domains)
    assert len(data.class_names) >= 2
    assert all(len(domain.train) and len(domain.test) for domain in data.domains)
    for _, images in parts(data):
        pixels, labels = images.take(torch.arange(len(images)))
        assert pixels.dtype == torch.uint8
        assert pixels.shape == (len(images), 3, source.size, source.size)
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) <= set(range(len(data.class_names)))
        assert images.groups is None or (images.groups.dtype, len(images.groups)) == (torch.int64, len(images))


def test_images_of_one_group_are_not_both_training_and_test_images(read: Read) -> None:
    for domain in load(read()).domains:
        if domain.train.groups is not None and domain.test.groups is not None:
            assert not set(domain.train.groups.tolist()) & set(domain.test.groups.tolist())


def test_equal_options_give_the_same_images_and_the_same_digest(read: Read) -> None:
    """The digest identifies the images, so that a finished trial on other images is never reused."""
    before = torch.get_rng_state()
    first, second = (read().load() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before), "the global random generator was used"
    assert first.digest == second.digest != ""
    for (_, one), (_, other) in zip(parts(first), parts(second), strict=True):
        assert identical(one.take(torch.arange(len(one))), other.take(torch.arange(len(other))))


def test_other_domains_give_another_digest(read: Read) -> None:
    source = read()
    if len(source.domains) > 1:
        some = read(domains=list(source.domains[:-1]))
        assert load(some).digest != load(source).digest
        assert [one.name for one in load(some).domains] == list(source.domains[:-1])


def test_a_held_out_domain_is_only_tested(read: Read) -> None:
    source = read()
    if len(source.domains) > 1:
        *others, last = source.domains
        data = load(read(held_out_domains=[last]))
        assert [one.name for one in data.domains] == others
        assert [one.name for one in data.held_out] == [last]
        assert len(data.held_out[0].test)


def test_validation_images_are_held_out_from_training(read: Read) -> None:
    for whole, rest in zip(load(read()).domains, load(read(validation_fraction=0.5)).domains, strict=True):
        assert rest.validation is not None
        assert len(rest.validation)
        assert len(rest.train) + len(rest.validation) == len(whole.train)
        assert len(rest.test) == len(whole.test)
