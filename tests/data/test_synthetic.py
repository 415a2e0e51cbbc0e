"""The server's synthetic images by source, and the error messages for invalid sources."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import SyntheticConfig
from fedsweep.data.prepared.card import read_card, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.data.synthetic import surrogate
from fedsweep.data.synthetic.generated import Folder, NoSynthetic
from fedsweep.data.synthetic.surrogate import Surrogate
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.results.records import STAND_INS
from fedsweep.types import Domain, FederatedData, ImageSet

SIZE = 8
CLASSES = ("cat", "dog", "bus")  # in contrast to a prepared data set, not in alphabetical order


def noise(labels: Sequence[int], seed: int = 0, low: int = 0, high: int = 256) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(low, high, (len(labels), 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.tensor(labels, dtype=torch.int64))


def data(images: int = 60, names: Sequence[str] = ("photo", "sketch")) -> FederatedData:
    part = noise([place % 3 for place in range(images)])
    domains = tuple(Domain(name, part, part.select(torch.arange(3))) for name in names)
    return FederatedData("animals", CLASSES, domains, "digest")


def same(first: dict[str, ImageSet], second: dict[str, ImageSet]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(one, other)
        for name in first
        for one, other in zip(whole(first[name]), whole(second[name]), strict=True)
    )


def whole(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    return images.take(torch.arange(len(images)))


def test_the_source_none_has_no_images():
    assert NoSynthetic().make(data(), {}, 0) == {}
    assert NoSynthetic().fingerprint(data()) == ""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that prepares images of a single colour each, as in `made({"photo": {"cat": 5}})`."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))

    def write(counts: dict[str, dict[str, int]], size: int = SIZE, name: str = "made") -> Path:
        root = tmp_path / name
        for domain, classes in counts.items():
            for label, count in classes.items():
                (root / domain / label).mkdir(parents=True, exist_ok=True)
                for number in range(count):
                    colour = (10 * "bcd".index(label[0]) + 10, number, 100 * "ps".index(domain[0]))
                    Image.new("RGB", (size, size), colour).save(root / domain / label / f"{number:03d}.png")
        return prepare(make_plan(Options(name, size, "domains"), root)).folder

    return write


FULL = {name: {"bus": 9, "cat": 9, "dog": 9} for name in ("photo", "sketch")}


@pytest.mark.parametrize(("share", "counts"), [(0.1, [2, 2, 2]), (0.25, [5, 5, 5]), (0.01, [1, 0, 0])])
def test_a_folder_yields_the_configured_share_in_equal_numbers_per_class(made, share, counts):
    made(FULL)
    found = Folder(set="made", share=share).make(data(), {}, seed=0)
    assert list(found) == ["photo", "sketch"]
    for domain, images in found.items():
        pixels, labels = whole(images)
        assert labels.bincount(minlength=3).tolist() == counts
        assert (pixels[:, 2] == (0 if domain == "photo" else 100)).all()


def test_a_folders_classes_are_matched_by_name_in_any_order(made):
    made(FULL)
    pixels, labels = whole(Folder(set="made", share=0.45).make(data(), {}, seed=0)["sketch"])
    assert len(labels) == 27
    assert pixels[:, 0, 0, 0].tolist() == [{0: 20, 1: 30, 2: 10}[label] for label in labels.tolist()]
    assert len({tuple(one) for one in pixels[:, :, 0, 0].tolist()}) == 27


def test_the_images_drawn_from_a_folder_depend_only_on_the_seed(made):
    made(FULL)
    first, again, other = (Folder(set="made").make(data(), {}, seed) for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


def test_a_domain_of_a_folder_does_not_depend_on_the_others(made):
    made(FULL)
    both, one = (Folder(set="made").make(data(names=names), {}, 0) for names in (["photo", "sketch"], ["sketch"]))
    assert same({"sketch": both["sketch"]}, one)


def test_a_folders_fingerprint_is_that_of_the_image_size_in_use(made):
    made({**FULL, "painting": {"cat": 3}})
    digest = Folder(set="made").fingerprint(data())
    card = read_card(store_folder("made", SIZE))
    assert digest == Folder(set="made").fingerprint(data())
    assert digest != Folder(set="made").fingerprint(data(names=["photo"]))
    made({**FULL, "painting": {"cat": 3}}, size=16)
    assert Folder(set="made").fingerprint(data()) == digest
    assert card.digest


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({"photo": FULL["photo"]}, "`synthetic.set`: made has no domain `sketch`; it has photo."),
        (
            {**FULL, "sketch": {"bus": 9, "cat": 9}},
            "`synthetic.set` made must have 2 images of `dog` in sketch for a `synthetic.share` of 0.1, but it has 0.",
        ),
        (
            {**FULL, "photo": {"bus": 1, "cat": 9, "dog": 9}},
            "`synthetic.set` made must have 2 images of `bus` in photo for a `synthetic.share` of 0.1, but it has 1.",
        ),
        (
            {**FULL, "photo": {**FULL["photo"], "doge": 2}},
            "`synthetic.set` made must have only classes of animals, but it has `doge`; did you mean `dog`?",
        ),
    ],
)
def test_a_folder_that_lacks_images_or_has_other_classes_is_an_error(made, counts, sentence):
    made(counts)
    with pytest.raises(UserError) as refusal:
        Folder(set="made").make(data(), {}, seed=0)
    assert str(refusal.value) == sentence


def test_the_clients_data_set_cannot_be_the_synthetic_images():
    """Otherwise, the server would train on test images."""
    clients = PreparedData(set="made", size=SIZE, domains=("photo", "sketch"))
    Folder(set="other").check(clients)
    with pytest.raises(
        ValueError, match=r"^`synthetic\.set` must be .* generated images, but made is also `data\.set`"
    ):
        Folder(set="made").check(clients)


def test_a_folder_that_is_not_prepared_at_the_image_size_is_an_error(made):
    made(FULL, size=16)
    for ask in (Folder(set="made").fingerprint, lambda one: Folder(set="made").make(one, {}, 0)):
        with pytest.raises(
            UserError, match=r"^`synthetic\.size`: made is prepared at 16 pixels, not at 8; run `fedsweep"
        ):
            ask(data())
    with pytest.raises(UserError, match=r"^`synthetic\.set`: there is no prepared data set `make` in .* `made`\?$"):
        Folder(set="make").fingerprint(data())


def held_images(labels: Sequence[int] = (0, 0, 0, 1, 1, 1, 2, 2, 2), seed: int = 0) -> ImageSet:
    """Return synthetic images in medium grey, so that images drawn around them are not clipped at 0 or 255."""
    return noise(labels, seed, 110, 146)


def moments(images: ImageSet, label: int) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = whole(images)
    chosen = pixels[labels == label].flatten(1).numpy().astype(np.float64)
    return chosen.mean(0), np.cov(chosen, rowvar=False)


def test_a_surrogate_has_the_mean_and_covariance_of_each_class():
    proxy = {"photo": held_images(seed=1), "sketch": held_images(seed=2)}
    found = Surrogate(share=10).make(data(900, ["sketch"]), proxy, seed=0)
    assert {name: len(images) for name, images in found.items()} == {"sketch": 9000}
    for label in range(3):
        mean, covariance = moments(found["sketch"], label)
        expected_mean, expected = moments(proxy["sketch"], label)
        assert np.abs(mean - expected_mean).max() < 1.5  # 4 standard errors of 3000 draws with standard deviation 20
        assert np.abs(covariance - expected).max() < 0.15 * np.diag(expected).max()
        assert np.linalg.norm(covariance - expected) < 0.09 * np.linalg.norm(expected)


def test_surrogates_are_labelled_images_for_each_domain():
    found = Surrogate(share=0.25).make(data(), {"photo": held_images(), "sketch": held_images(seed=3)}, seed=0)
    for images in found.values():
        pixels, labels = whole(images)
        assert (pixels.shape, pixels.dtype) == ((15, 3, SIZE, SIZE), torch.uint8)
        assert labels.bincount().tolist() == [5, 5, 5]


def test_surrogates_depend_only_on_the_seed_and_their_own_domain():
    proxy = {"photo": held_images(), "sketch": held_images(seed=3)}
    first, again, other = (Surrogate().make(data(), proxy, seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    only = Surrogate().make(data(names=["sketch"]), {"sketch": proxy["sketch"]}, seed=1)
    assert same(only, {"sketch": first["sketch"]})


def flat(values: Sequence[int], labels: Sequence[int]) -> ImageSet:
    images = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIZE, SIZE).contiguous()
    return ImageSet(images, torch.tensor(labels))


def test_the_mean_of_a_missing_class_is_the_domains_mean_plus_the_offset_of_the_class_in_other_domains():
    # photo has the mean 60, and class 2 is 20 above it; sketch has the mean 150 without class 2, so its class 2 is 170
    proxy = {"photo": flat([40, 60, 80], [0, 1, 2]), "sketch": flat([140, 160], [0, 1])}
    found = Surrogate().make(data(), proxy, seed=0)
    for name, values in (("photo", [40, 60, 80]), ("sketch", [140, 160, 170])):
        pixels, labels = whole(found[name])
        assert pixels[:, 0, 0, 0].tolist() == [values[label] for label in labels.tolist()]


def test_a_class_of_one_image_has_the_covariance_of_its_domain():
    labels = [0, 0, 0, 0, 1, 1, 1, 1, 2]
    proxy = {name: held_images(labels, seed) for seed, name in enumerate(("photo", "sketch"))}
    found = Surrogate(share=10).make(data(900, ["photo"]), proxy, seed=0)["photo"]
    pixels, truth = whole(proxy["photo"])
    rest = torch.cat([pixels[truth == label].double() - pixels[truth == label].double().mean(0) for label in (0, 1)])
    mean, covariance = moments(found, 2)
    assert np.abs(mean - pixels[8].flatten().numpy()).max() < 1.5
    scatter = rest.flatten(1).numpy()
    pooled = scatter.T @ scatter / (8 - 2)  # minus 2, because two means are estimated
    assert np.linalg.norm(covariance - pooled) < 0.09 * np.linalg.norm(pooled)


def test_the_covariance_of_a_domain_is_computed_once(monkeypatch):
    passes, deviations = [], surrogate._deviations
    monkeypatch.setattr(
        surrogate, "_deviations", lambda own, labels: passes.append(len([*labels])) or deviations(own, labels)
    )
    proxy = {name: held_images([0, 1, 2, 2], seed) for seed, name in enumerate(("photo", "sketch"))}
    Surrogate(share=1).make(data(90, ["photo"]), proxy, seed=0)
    assert sorted(passes) == [1, 1, 1, 3]  # each class once, and the whole domain once


def test_images_are_repeated_if_every_class_has_only_one():
    proxy = {"photo": flat([1, 2, 3], [0, 1, 2]), "sketch": flat([4, 5, 6], [0, 1, 2])}
    pixels, labels = whole(Surrogate().make(data(), proxy, seed=0)["sketch"])
    assert pixels[:, 1, 2, 3].tolist() == [4 + label for label in labels.tolist()]


def test_a_class_that_no_domain_has_is_an_error():
    with pytest.raises(UserError) as refusal:
        Surrogate().make(data(), {"photo": held_images([0, 0, 2]), "sketch": held_images([2, 0])}, seed=0)
    assert str(refusal.value) == (
        "`synthetic` surrogate needs server images of every class, but there are none of `dog` in any domain; "
        "increase `partition.proxy_share`."
    )


def test_pixels_are_clipped_to_black_and_white():
    values = flat([0, 255, 0, 255, 128, 128], [0, 0, 1, 1, 2, 2])
    pixels, labels = whole(Surrogate(share=2).make(data(), {"photo": values, "sketch": values}, seed=0)["photo"])
    assert {int(pixels[labels == 0].min()), int(pixels[labels == 0].max())} == {0, 255}


def test_every_source_of_replacement_images_has_a_description():
    sources = get_args(get_args(SyntheticConfig)[0])
    assert len(sources) >= 3
    assert {one.model_fields["name"].default for one in sources if one.stands_in} == {*STAND_INS}
