"""Prepared data sets in an experiment, with the order of domains, digests and error messages."""

import hashlib
import json

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.data.partition import FeatureSkew
from fedsweep.data.prepared.arrow_files import record_batch, write_domain
from fedsweep.data.prepared.card import CopiesCard, DomainCard, StoreCard, store_folder
from fedsweep.data.prepared.dataset import PreparedData, content_digest, read_domain

CLASSES = ("bus", "cat")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Write two domains of 6 training and 3 test images of 8 x 8 pixels, and return the card of the data set."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path))
    folder = store_folder("set", 8)
    folder.mkdir()
    cards = {}
    for number, name in enumerate(("photo", "sketch")):
        rng = np.random.default_rng(number)
        batches = [
            record_batch(
                rng.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8),
                [i % 2 for i in range(count)],
                [f"{name}/{i}" for i in range(count)],
            )
            for count in (6, 3)
        ]
        write_domain(folder / f"{name}.arrow", *batches)
        cards[name] = DomainCard(train=6, test=3, bytes=(folder / f"{name}.arrow").stat().st_size)
    digest = content_digest(CLASSES, [read_domain(folder / f"{name}.arrow", name) for name in cards])
    card = StoreCard(
        name="set", size=8, layout="domains", class_names=CLASSES, domains=cards, digest=digest, crop_pct=1.0
    )
    (folder / "card.json").write_text(card.model_dump_json())
    return card


def config(**changes) -> PreparedData:
    given = {"set": "set", "size": 8, "domains": ["photo", "sketch"]} | changes
    return PreparedData.of({"name": "prepared"} | given, "test")


def test_domains_have_the_configured_order(store):
    data = config(domains=["sketch", "photo"]).load()
    assert [domain.name for domain in data.domains] == ["sketch", "photo"]
    assert data.class_names == CLASSES
    assert [len(domain.train) for domain in data.domains] == [6, 6]
    assert data.domains[0].train.images.shape == (6, 3, 8, 8)
    assert data.domains[0].train.images.dtype == torch.uint8


def test_the_digest_covers_the_data_set_and_the_order_of_the_domains(store):
    digests = {
        tuple(names): config(domains=names).load().digest
        for names in (["photo", "sketch"], ["sketch", "photo"], ["photo"])
    }
    assert len(set(digests.values())) == 3
    assert digests["photo", "sketch"] == store.digest
    expected = hashlib.sha256("\0".join([store.digest, "sketch", "photo"]).encode()).hexdigest()
    assert digests["sketch", "photo"] == expected


def test_another_digest_is_an_error(store):
    assert config(digest=store.digest[:12]).load().digest == config(digest=store.digest).load().digest
    with pytest.raises(UserError, match=r"^`data\.digest` is 0123456789ab, but the digest of .* is [0-9a-f]{12};"):
        config(digest="0123456789ab").load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"size": 64},
            "`data.size`: set is prepared at 8 pixels, not at 64; run `fedsweep data prepare set --root DIR --s",
        ),
        ({"set": "sat"}, "`data.set`: there is no prepared data set `sat` in "),
        ({"set": "sat"}, "; did you mean `set`?"),
        ({"set": "birds"}, "`fedsweep data prepare birds --root DIR --size 8` to prepare it."),
        ({"domains": ["photo", "skech"]}, "`data.domains`: set has no domain `skech`; did you mean `sketch`?"),
        ({"domains": ["zzz"]}, "`data.domains`: set has no domain `zzz`; it has photo, sketch."),
    ],
)
def test_a_missing_data_set_or_domain_is_an_error(store, changes, words):
    with pytest.raises(UserError) as refusal:
        config(**changes).load()
    assert words in str(refusal.value)


def test_a_repeated_domain_is_an_error():
    with pytest.raises(UserError, match="must not repeat a domain"):
        config(domains=["photo", "photo"])


def test_a_truncated_file_is_an_error(store):
    path = store_folder("set", 8) / "sketch.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"sketch\.arrow must have \d+ bytes, but it has \d+; run `fedsweep data prepare set"
    ):
        config().load()


def test_a_card_with_other_counts_is_an_error(store):
    cards = {name: DomainCard(train=5, test=4, bytes=one.bytes) for name, one in store.domains.items()}
    (store_folder("set", 8) / "card.json").write_text(store.model_copy(update={"domains": cards}).model_dump_json())
    with pytest.raises(
        UserError, match=r"photo\.arrow contains 6 training and 3 test images, but its card lists 5 and 4"
    ):
        config().load()


def test_labels_outside_the_classes_are_an_error(store):
    card = store.model_copy(update={"class_names": store.class_names[:1]})
    (store_folder("set", 8) / "card.json").write_text(card.model_dump_json())
    with pytest.raises(UserError, match=r"photo\.arrow contains labels from 0 to \d, but its card lists 1 classes;"):
        config().load()


HELD_OUT = [
    ({}, {"proxy_share": 0.5}, "`partition.proxy_share`"),
    ({}, {"test_share": 0.5}, "`partition.test_share`"),
    ({}, {"validation_share": 0.5}, "`partition.validation_share`"),
    ({"held_out_domains": ["sketch"]}, {}, "`data.held_out_domains`"),
]


@pytest.mark.parametrize(("data", "shares", "setting"), HELD_OUT)
def test_images_of_unknown_groups_are_not_held_out(store, data, shares, setting):
    """A card without the entry `copies` was written by a version that did not know groups."""
    path = store_folder("set", 8) / "card.json"
    card = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in card.items() if name != "copies"}))
    partition = FeatureSkew.of({"name": "feature_skew"} | shares, "test")
    with pytest.raises(UserError) as refused:
        partition.split(config(**data).load(), {"photo": 1, "sketch": 1}, 0)
    assert str(refused.value) == (
        f"{setting} holds out whole groups of images, but set was prepared by an older version of fedsweep that "
        "recorded no groups; prepare it again with `fedsweep data prepare set ... --force`."
    )
    whole = FeatureSkew.of({"name": "feature_skew"}, "test").split(config().load(), {"photo": 1, "sketch": 1}, 0)
    assert [len(client.train) for client in whole.clients] == [6, 6]  # nothing is held out

    found = CopiesCard(groups=0, both_splits=0, other_classes=0)
    path.write_text(json.dumps({**card, "copies": found.model_dump(mode="json")}))
    split = partition.split(config(**data).load(), {"photo": 1, "sketch": 1}, 0)
    assert len(split.clients) == (1 if data else 2)
