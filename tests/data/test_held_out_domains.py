"""Held-out domains, which no client has, in every kind of data set."""

from typing import Any

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import DigitsData, PreparedData
from fedsweep.preparation.prepare import prepare
from tests.preparation.helpers import plan_of, write_tree


def digits(**changes: Any) -> DigitsData:
    return DigitsData.of({"name": "digits", "domains": ["plain", "noisy", "inverted"], **changes}, "test")


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> PreparedData:
    """Prepare 2 domains with 3 classes of 10 images each, and hold out `sketch`."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    prepare(plan_of(write_tree(tmp_path / "tree")))
    given = {"set": "set", "size": 16, "domains": ["sketch", "photo"], "held_out_domains": ["sketch"]}
    return PreparedData.of({"name": "prepared", **given}, "test")


def test_no_domain_is_held_out_by_default():
    data = digits()
    assert (data.held_out_domains, data.training_domains) == ((), ("plain", "noisy", "inverted"))
    assert data.load().held_out == ()


def test_training_domains_keep_their_order():
    data = digits(held_out_domains=["noisy"])
    assert data.training_domains == ("plain", "inverted")
    loaded = data.load()
    assert [one.name for one in loaded.domains] == ["plain", "inverted"]
    assert [one.name for one in loaded.held_out] == ["noisy"]


def test_held_out_digits_are_tested_only_on_their_test_split():
    """The remaining scans are training images of the other domains, in other styles."""
    loaded, usual = digits(held_out_domains=["noisy"]).load(), digits().load()
    (held_out,), old = loaded.held_out, usual.domains[1]
    assert torch.equal(held_out.test.images, old.test.images)
    assert torch.equal(held_out.test.labels, loaded.domains[0].test.labels)
    assert loaded.digest == usual.digest


def test_all_prepared_images_of_a_held_out_domain_are_test_images(prepared):
    loaded = prepared.load()
    assert prepared.training_domains == ("photo",)
    (held_out,), (photo,) = loaded.held_out, loaded.domains
    assert (len(held_out.train), len(held_out.test)) == (0, 30)
    assert (len(photo.train), len(photo.test)) == (24, 6)
    (sketch, _) = prepared.model_copy(update={"held_out_domains": ()}).load().domains
    pixels, labels = held_out.test.take(torch.arange(30))
    expected = [part.take(torch.arange(len(part))) for part in (sketch.train, sketch.test)]
    assert torch.equal(pixels, torch.cat([images for images, _ in expected]))
    assert torch.equal(labels, torch.cat([own for _, own in expected]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"held_out_domains": ["thick"]},
            "`data.held_out_domains` must be among `data.domains` (plain, noisy, inverted), but one is `thick`.",
        ),
        (
            {"held_out_domains": ["noisy", "noisy"]},
            "`data.held_out_domains` must not repeat a domain, but it is ['noisy', 'noisy'].",
        ),
        (
            {"held_out_domains": ["inverted", "plain", "noisy"]},
            "`data.held_out_domains` must leave a domain to train on, but it names all 3.",
        ),
        ({"domains": ["plain", "plain"]}, "`data.domains` must not repeat a domain, but it is ['plain', 'plain']."),
        ({"held_out_domains": "noisy"}, "`held_out_domains` must be a list"),
    ],
)
def test_invalid_held_out_domains_are_an_error(changes, sentence):
    with pytest.raises(UserError) as refusal:
        digits(**changes)
    assert sentence in str(refusal.value)
