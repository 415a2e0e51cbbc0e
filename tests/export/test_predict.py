"""Predictions for image files, which equal the predictions for the same images in evaluation."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import load as load_data
from fedsweep.export.card import ImageCard
from fedsweep.export.predict import Loaded, _read, load, pictures, predict
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.decode import CorruptImageError
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare


@pytest.fixture(scope="module")
def model(exported: Path) -> Loaded:
    return load(exported)


@pytest.fixture
def photos(small: RunConfig, tmp_path: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Write a domain's test images to a folder per class; return the root, and the images and labels in file order."""
    test = load_data(small.data).domains[1].test
    images, labels = test.take(torch.arange(len(test)))
    order = sorted(range(len(test)), key=lambda one: (int(labels[one]), one))
    for place in order:
        path = tmp_path / "photos" / str(int(labels[place])) / f"{place:03d}.{'png' if place % 2 else 'bmp'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[place].permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "photos", images[order], labels[order]


def test_image_files_are_classified_like_the_test_images(model: Loaded, photos):
    folder, images, labels = photos
    names, told = pictures(folder), []
    found = predict(model, folder, names, top=3, progress=lambda *so_far: told.append(so_far))
    expected = model.logits(images).double().softmax(1)
    assert list(found.images) == names
    assert len(names) == len(images) > 64  # more than one batch
    assert told == [(0, len(names)), (64, len(names)), (len(names), len(names))]
    assert [int(guesses[0].name) for guesses in found.images.values()] == expected.argmax(1).tolist()
    for guesses, row in zip(found.images.values(), expected, strict=True):
        assert [one.probability for one in guesses] == pytest.approx(row.sort(descending=True).values[:3].tolist())
        assert [row[int(one.name)].item() for one in guesses] == pytest.approx([one.probability for one in guesses])
    assert found.accuracy == pytest.approx((expected.argmax(1) == labels).double().mean().item())


def test_accuracy_requires_that_all_folders_are_classes(model: Loaded, photos):
    folder, *_ = photos
    (folder / "3").rename(folder / "three")
    assert predict(model, folder, pictures(folder)).accuracy is None
    (folder / "three").rename(folder / "3")
    next((folder / "3").iterdir()).rename(folder / "above.png")
    names = pictures(folder)
    assert names[-1] == "above.png"  # all paths are sorted together
    assert predict(model, folder, names).accuracy is None


def test_a_broken_image_is_named_and_the_others_are_classified(model: Loaded, photos):
    folder, images, _ = photos
    (folder / "3" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "4" / "empty.jpg").write_bytes(b"")
    (folder / "4" / "notes.txt").write_text("no image")
    found = predict(model, folder, pictures(folder))
    assert set(found.broken) == {"3/torn.png", "4/empty.jpg"}
    assert found.broken["4/empty.jpg"] == "empty"
    assert len(found.images) == len(images)
    assert found.accuracy is not None


def test_a_top_above_the_number_of_classes_gives_all_classes(model: Loaded, photos):
    folder, *_ = photos
    guesses = next(iter(predict(model, folder, pictures(folder)[:1], top=99).images.values()))
    assert sorted(one.name for one in guesses) == sorted("0123456789")
    assert sum(one.probability for one in guesses) == pytest.approx(1)


def test_a_picture_is_cropped_as_in_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pictures of several shapes and colour modes get the same pixels as in the preparation of a data set."""
    rng = np.random.default_rng(0)
    for number, (width, height, mode) in enumerate([(40, 30, "RGB"), (17, 90, "L"), (33, 33, "RGBA"), (20, 16, "P")]):
        path = tmp_path / "root" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8)).convert(mode).save(path)
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    made = prepare(make_plan(Options("pets", 16, None, "vit_base_patch16_224.augreg_in21k"), tmp_path / "root"), 1)
    card = made.card
    cut = ImageCard(
        size=16, mean=(0.5,), std=(0.5,), crop_pct=card.crop_pct, crop_mode="center", interpolation="bicubic"
    )
    assert card.crop_pct == 0.9
    from fedsweep.data.prepared.arrow_files import map_domain

    (domain,) = card.domains
    seen = 0
    for part in map_domain(made.folder / f"{domain}.arrow"):
        for pixels, name in zip(part.images, part.paths.to_pylist(), strict=True):
            assert np.array_equal(_read(tmp_path / "root" / name, cut), pixels)
            seen += 1
    assert seen == 4


def test_a_picture_that_cannot_be_opened_is_broken(tmp_path: Path):
    with pytest.raises(CorruptImageError, match="is a broken link or not a regular file"):
        _read(tmp_path / "gone.png", ImageCard(size=16, mean=(0.5,), std=(0.5,)))


def test_broken_links_and_special_files_are_broken_pictures(model: Loaded, photos):
    folder, images, _ = photos
    (folder / "3" / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    os.mkfifo(folder / "4" / "pipe.png")  # reading a named pipe would block for ever
    found = predict(model, folder, pictures(folder))
    assert found.broken == dict.fromkeys(["3/gone.jpg", "4/pipe.png"], "is a broken link or not a regular file")
    assert len(found.images) == len(images)


def test_a_link_to_a_parent_folder_is_not_followed_again(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert pictures(tmp_path) == ["a/x.png"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "IMAGES must be a folder, but {path} does not exist."),
        ("file.png", "IMAGES must be a folder, but {path} is a file."),
        ("empty", "{path} contains no image: no file name ends in .bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, "
         ".tiff, .webp."),
    ],
)  # fmt: skip
def test_a_folder_without_pictures_is_rejected(tmp_path: Path, name: str, sentence: str):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    (tmp_path / "empty" / "below" / "notes.txt").write_text("")
    (tmp_path / "file.png").write_bytes(b"")
    with pytest.raises(UserError) as refusal:
        pictures(tmp_path / name)
    assert str(refusal.value) == sentence.format(path=tmp_path / name)
