"""Exact copies and groups of images in prepared data sets: they are found, listed and kept on one side of the split."""

import io
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.arrow_files import map_domain, stored_digest
from fedsweep.data.prepared.card import COPIES, read_card
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.preparation.layouts.base import Listing
from fedsweep.preparation.layouts.parquet import Parquet
from fedsweep.preparation.prepare import prepare
from tests.preparation.helpers import DOMAINS, Tree, Watched, plan_of

SAME = (
    ["photo/bus/0.png", "photo/bus/1.png", "photo/bus/2.png"],  # within a class
    ["photo/cat/0.png", "sketch/cat/5.png"],  # in two domains
    ["sketch/cat/1.png", "sketch/dog/1.png"],  # in two classes
)
COUNTS = {"groups", "both_splits", "other_classes"}


@pytest.fixture
def copied(tree: Path) -> Path:
    for first, *others in SAME:
        for other in others:
            shutil.copyfile(tree / first, tree / other)
    return tree


def places(folder: Path) -> dict[str, tuple[str, int | None, np.ndarray]]:
    """Return the split, the group and the pixels of each image, keyed by path."""
    found = {}
    for name in DOMAINS:
        for part, split in zip(map_domain(folder / f"{name}.arrow"), ("train", "test"), strict=True):
            for row, path in enumerate(part.paths.to_pylist()):
                assert path not in found
                group = None if part.groups is None else int(part.groups[row])
                found[path] = (split, group, part.images[row])
    return found


def test_copies_are_listed_and_stay_on_one_side_of_a_drawn_split(copied):
    made = prepare(plan_of(copied, test_fraction=0.4))
    assert made.card.copies.model_dump(include=COUNTS) == {"groups": 3, "both_splits": 0, "other_classes": 1}
    lines = (made.folder / COPIES).read_text().splitlines()
    assert sorted([one.split(":")[1] for one in line.split("\t")] for line in lines) == sorted(map(list, SAME))
    found = places(made.folder)
    assert len(found) == 60
    assert len({group for _, group, _ in found.values()}) == 60 - 4
    for same in SAME:
        assert len({found[path][:2] for path in same}) == 1
    for path, (_, _, pixels) in found.items():
        expected = np.asarray(Image.open(copied / path).convert("RGB"))[:, 2:18].transpose(2, 0, 1)
        assert np.array_equal(pixels, expected)


def test_the_split_of_classes_without_copies_does_not_change(tree, copied):
    plan = plan_of(copied, test_fraction=0.4)
    found = places(prepare(plan).folder)
    planned = {
        item.path: part for one in plan.domains for part, side in enumerate(one.parts(set())) for _, item in side
    }
    same = {
        path: ("train", "test")[part] for path, part in planned.items() if path.startswith(("photo/dog", "sketch/bus"))
    }
    assert len(same) == 20
    assert {path: found[path][0] for path in same} == same


def test_every_class_keeps_the_share_of_test_images(copied):
    found = places(prepare(plan_of(copied, test_fraction=0.4)).folder)
    tests = [
        sum(path.startswith(name) and one[0] == "test" for path, one in found.items())
        for name in ("photo/bus", "sketch/cat")
    ]
    assert all(3 <= count <= 5 for count in tests)


def test_a_data_set_without_copies_has_no_groups(tree):
    made = prepare(plan_of(tree))
    assert made.card.copies.model_dump(include=COUNTS) == {"groups": 0, "both_splits": 0, "other_classes": 0}
    assert not (made.folder / COPIES).exists()
    assert {group for _, group, _ in places(made.folder).values()} == {None}
    assert made.warnings == ()


def test_groups_are_loaded_and_part_of_the_digest(copied):
    made = prepare(plan_of(copied))
    assert read_card(made.folder) == made.card
    assert stored_digest(made.folder, made.card) == made.card.digest
    data = PreparedData(set="set", size=16, domains=DOMAINS).load()
    sides = (
        [{*one.train.groups.tolist()} for one in data.domains],
        [{*one.test.groups.tolist()} for one in data.domains],
    )
    assert not set.union(*sides[0]) & set.union(*sides[1])
    assert prepare(plan_of(copied)).already


def test_a_held_out_domain_is_not_tested_on_copies_of_training_images(copied):
    prepare(plan_of(copied))
    data = PreparedData(set="set", size=16, domains=DOMAINS, held_out_domains=("sketch",)).load()
    (photo,), (sketch,) = data.domains, data.held_out
    assert len(sketch.test) in (29, 30)  # the copy of a cat is in the training or in the test images of photo
    assert not {*photo.train.groups.tolist()} & {*sketch.test.groups.tolist()}


class Listed(Tree):
    """The layout `Tree`, with the images 0 to 4 of each class as training images and the others as test images."""

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        found = super().list(root, num_classes)
        items = [replace(one, split="train" if int(one.path[-5]) < 5 else "test") for one in found.items]
        return replace(found, items=tuple(items))


def test_the_split_of_the_data_set_is_kept_and_a_warning_printed(copied):
    made = prepare(plan_of(copied, Listed()))
    assert made.card.copies.model_dump(include=COUNTS) == {"groups": 3, "both_splits": 1, "other_classes": 1}
    found = places(made.folder)
    assert {path: split for path, (split, _, _) in found.items()} == {
        path: "train" if int(path[-5]) < 5 else "test" for path in found
    }
    expected = (
        "3 groups of images have identical pixels, 1 of them in different classes, e.g. photo:photo/bus/0.png = "
        "photo:photo/bus/1.png = photo:photo/bus/2.png; each group is kept together, and `copies.txt` in the folder "
        "of the data set lists all groups",
        "1 group of copies or related images has both training and test images, because the split of the data set is "
        "kept or all images of a domain are copies; the accuracy on such test images is too high",
    )
    assert made.warnings == prepare(plan_of(copied, Listed())).warnings == expected


def test_strict_rejects_copies_and_decodes_nothing_again(copied):
    with pytest.raises(UserError, match=r"`--strict` allows no warnings, but 3 groups of images have identical pixels"):
        prepare(plan_of(copied), strict=True)
    source = Watched()
    prepare(plan_of(copied, source))
    assert source.seen == []


def test_a_domain_of_copies_keeps_its_split_with_a_warning(tmp_path):
    for domain in DOMAINS:
        (tmp_path / "x" / domain / "cat").mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (16, 16), (9, 99, 199)).save(tmp_path / "x" / domain / "cat" / f"{number}.png")
    made = prepare(plan_of(tmp_path / "x"))
    assert [(one.train, one.test) for one in made.card.domains.values()] == [(2, 1), (2, 1)]
    assert made.card.copies.both_splits == 1
    assert "1 group of copies or related images has both training and test images" in made.warnings[-1]


def test_the_groups_of_a_parquet_file_stay_together(tmp_path):
    rng, images = np.random.default_rng(0), []
    for _ in range(60):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
        images.append(stream.getvalue())
    group = [f"patient {row // 5}" for row in range(60)]
    (tmp_path / "scans").mkdir()
    table = pa.table({"image": images, "label": [row // 30 for row in range(60)], "group": group})
    pq.write_table(table, tmp_path / "scans" / "photo.parquet")
    made = prepare(plan_of(tmp_path / "scans", Parquet(), test_fraction=0.3))
    assert made.card.copies.model_dump(include=COUNTS) == {"groups": 0, "both_splits": 0, "other_classes": 0}
    train, test = map_domain(made.folder / "photo.arrow")
    sides = [
        {path: int(number) for path, number in zip(part.paths.to_pylist(), part.groups, strict=True)}
        for part in (train, test)
    ]
    assert not {*sides[0].values()} & {*sides[1].values()}
    assert len(sides[1]) == 20  # two groups of each class
    of_group = {(group[int(path.split(":")[1])], number) for side in sides for path, number in side.items()}
    assert len(of_group) == len({number for _, number in of_group}) == 12


LOST = "because each group of copies or related images is on one side of the split"


def lost(folder: Path) -> tuple[list[str], list[str]]:
    """Return the classes without test images and the classes without training images, as `domain/class`."""
    of_class: dict[str, set[str]] = defaultdict(set)
    for path, (split, _, _) in places(folder).items():
        of_class[path.rpartition("/")[0]].add(split)
    return tuple([one for one, splits in sorted(of_class.items()) if name not in splits] for name in ("test", "train"))


def test_a_class_that_loses_its_test_images_is_a_warning_and_with_strict_an_error(tree):
    for number in range(1, 10):
        shutil.copyfile(tree / "photo/cat/0.png", tree / f"photo/cat/{number}.png")
    warning = f"1 class has no test image, {LOST}: `cat` of `photo`"
    with pytest.raises(UserError, match=re.escape(f"; {warning}.")):
        prepare(plan_of(tree), strict=True)
    made = prepare(plan_of(tree))
    assert lost(made.folder) == (["photo/cat"], [])
    assert (made.card.copies.without_test, made.card.copies.without_training) == ({"photo": ("cat",)}, {})
    assert made.warnings[-1] == warning
    again = prepare(plan_of(tree))
    assert (again.already, again.warnings) == (True, made.warnings)


class PartlyListed(Listed):
    """The layout `Listed`, except that the data set comes with no split of dogs."""

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        found = super().list(root, num_classes)
        items = [replace(one, split=None) if "/dog/" in one.path else one for one in found.items]
        return replace(found, items=tuple(items))


def test_a_class_that_loses_its_training_images_is_a_warning(tree):
    for domain in DOMAINS:
        for number in range(10):
            shutil.copyfile(tree / f"{domain}/cat/{5 + number % 5}.png", tree / f"{domain}/dog/{number}.png")
    made = prepare(plan_of(tree, PartlyListed()))
    assert lost(made.folder) == ([], ["photo/dog", "sketch/dog"])
    assert made.warnings[-1] == f"2 classes have no training image, {LOST}: `dog` of `photo`, `dog` of `sketch`"


def test_classes_that_share_groups_can_lose_either_side(tree):
    of_class = {"photo/cat": "012", "photo/dog": "1", "sketch/bus": "012", "sketch/cat": "2", "sketch/dog": "012"}
    for name, buses in of_class.items():
        for number in range(10):
            shutil.copyfile(tree / f"photo/bus/{buses[number % len(buses)]}.png", tree / name / f"{number}.png")
    made = prepare(plan_of(tree))
    assert lost(made.folder) == (["sketch/cat"], ["photo/dog"])
    copies = made.card.copies
    assert (copies.without_test, copies.without_training) == ({"sketch": ("cat",)}, {"photo": ("dog",)})
    assert made.warnings[1:] == (
        f"1 class has no test image, {LOST}: `cat` of `sketch`",
        f"1 class has no training image, {LOST}: `dog` of `photo`",
    )


def test_the_comparison_of_images_reports_its_progress_also_if_nothing_is_decoded(tree, monkeypatch):
    monkeypatch.setattr("fedsweep.preparation.copies.RELEASE", 8)
    (tree / "photo" / "bus" / "3.png").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be decoded"):
        prepare(plan_of(tree))
    decoded, compared = [], []
    prepare(
        plan_of(tree),
        skip_corrupt=True,
        progress=lambda *numbers: decoded.append(numbers),
        compared=lambda *numbers: compared.append(numbers),
    )
    assert decoded == [(60, 60)]
    assert compared == [(done, 59) for done in (0, 8, 16, 24, 29, 37, 45, 53, 59)]


class Videos(Tree):
    """The layout `Tree`, in which two successive images of a class are one group."""

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        found = super().list(root, num_classes)
        items = [replace(one, group=f"{one.path[:-5]}{int(one.path[-5]) // 2}") for one in found.items]
        return replace(found, items=tuple(items))


def test_a_data_set_from_a_version_without_groups_is_rejected_with_this_reason(tree):
    older = prepare(plan_of(tree))
    with pytest.raises(UserError) as error:
        prepare(plan_of(tree, Videos()))
    assert str(error.value) == (
        f"{older.folder} was prepared by an older version of fedsweep that recorded no groups of images, such as the "
        "clips of one video, so a group can be on both sides of a split; use `--force` to prepare the images again."
    )
    with pytest.raises(UserError, match=r"other options \(test fraction 0\.5 instead of 0\.2\)"):
        prepare(plan_of(tree, Videos(), test_fraction=0.5))
    newer = prepare(plan_of(tree, Videos()), force=True)
    assert len({group for _, group, _ in places(newer.folder).values()}) == 30
    assert prepare(plan_of(tree, Videos())).already
