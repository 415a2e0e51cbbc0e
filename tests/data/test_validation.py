"""Validation images, which a data set holds out of its training images for choosing between runs."""

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import DigitsData, load, with_validation
from fedsweep.federation.build_and_run import split
from fedsweep.types import Domain, FederatedData
from tests.data.grouped_sources import copies, images, videos


def digits(fraction: float, **changes: object) -> FederatedData:
    domains = ["plain", "noisy", "inverted"]
    return load(
        DigitsData.of({"name": "digits", "domains": domains, "validation_fraction": fraction, **changes}, "test")
    )


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("source", [videos, copies])
def test_validation_images_are_whole_groups_and_the_rest_stays_with_the_clients(source, fraction):
    whole = source()
    divided = with_validation(whole, fraction)
    assert len(divided.domains) == len(whole.domains)
    held, kept = set[int](), set[int]()
    for before, after in zip(whole.domains, divided.domains, strict=True):
        assert after.validation is not None
        both = torch.cat([after.train.groups, after.validation.groups])
        assert torch.equal(both.sort().values, before.train.groups.sort().values)
        assert len(after.train) + len(after.validation) == len(before.train)
        assert abs(len(after.validation) - fraction * len(before.train)) <= 0.05 * len(before.train) + 9
        assert after.test is before.test
        held |= {*after.validation.groups.tolist()}
        kept |= {*after.train.groups.tolist()}
    assert held
    assert held.isdisjoint(kept)


def test_all_styles_of_digits_validate_the_same_scans_and_nothing_else_changes():
    plain, divided = digits(0), digits(0.25)
    first, *others = divided.domains
    assert first.validation is not None
    for one in others:
        assert torch.equal(one.validation.groups, first.validation.groups)
        assert torch.equal(one.validation.labels, first.validation.labels)
    for before, after in zip(plain.domains, divided.domains, strict=True):
        assert torch.equal(after.test.labels, before.test.labels)
        assert torch.isin(after.train.groups, before.train.groups).all()
    assert divided.digest == plain.digest
    assert all(one.validation is None for one in plain.domains)


def test_validation_images_do_not_depend_on_the_seed_of_the_run_and_no_client_has_them(tiny):
    config = tiny.override({"data.validation_fraction": 0.3}, "test")
    scans = set[int]()
    for seed in (0, 1, 2):
        data, parts = split(config.override({"seed": seed}, "test"))
        held = {scan for one in data.domains for scan in one.validation.groups.tolist()}
        scans = scans or held
        assert held == scans
        for client in parts.clients:
            assert held.isdisjoint(client.train.groups.tolist())


def test_domains_that_no_client_has_are_not_validated():
    data = digits(0.2, held_out_domains=["noisy"])
    assert [one.validation is None for one in data.held_out] == [True]
    assert [len(one.validation) > 0 for one in data.domains] == [True, True]


def test_a_domain_with_too_few_groups_is_an_error():
    one_video = images(np.zeros(5, np.int64), np.zeros(5, np.int64))
    data = FederatedData("videos", ("a",), (Domain("ucf", one_video, one_video),), "digest")
    with pytest.raises(UserError, match=r"^`data.validation_fraction` 0.2 holds out .* but ucf has too few groups"):
        with_validation(data, 0.2)
    unknown = FederatedData("old", ("a",), (Domain("ucf", one_video, one_video),), "digest", groups_known=False)
    with pytest.raises(UserError, match=r"^`data.validation_fraction` holds out whole groups of images, but old was"):
        with_validation(unknown, 0.2)
    assert with_validation(unknown, 0) is unknown
