"""Warnings about images and folders that can be prepared, but probably not as intended."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.arrow_files import map_domain
from fedsweep.preparation.layouts.folders import Classes
from fedsweep.preparation.prepare import prepare
from tests.preparation.helpers import plan_of


def write(tree: Path, path: str, pixels: np.ndarray | None = None) -> None:
    noise = np.random.default_rng([*path.encode()]).integers(0, 256, (16, 16), dtype=np.uint8)
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise if pixels is None else pixels).save(tree / path)


def ramp(bits: int) -> np.ndarray:
    return np.linspace(0, 2**bits - 1, 256).reshape(16, 16).astype(np.uint16)


def nearly_black(tree: Path) -> None:
    write(tree, "photo/cat/dark.png", ramp(12))
    write(tree, "photo/cat/one.png", np.full((16, 16), 200, np.uint8))
    write(tree, "photo/cat/fine.png", ramp(16))


def other_case(tree: Path) -> None:
    write(tree, "photo/Cat/0.png")
    write(tree, "photo/Cat/1.png")


def single(tree: Path) -> None:
    write(tree, "sketch/owl/0.png")


def empty(tree: Path) -> None:
    (tree / "photo" / "cat").rename(tree / "away")
    (tree / "photo" / "cat").mkdir()
    (tree / "away").rename(tree / "photo" / "owl")


def other_format(tree: Path) -> None:
    (tree / "photo" / "cat" / "a.heic").write_bytes(b"no")
    (tree / "photo" / "cat" / "notes.txt").write_text("mine")


CASES = {
    nearly_black: "2 images are nearly black or of one colour: `photo/cat/dark.png`, `photo/cat/one.png`; 16-bit "
    "values are divided by 256, so images that use fewer bits must be rescaled first",
    other_case: "`Cat` and `cat` are different classes, although their names are alike",
    single: "1 class has no test image: `owl` of `sketch` (1 in training)",
    empty: "1 class folder is empty: `photo/cat`; a class without any image is left out",
    other_format: "1 file is left out, because the format cannot be read: `photo/cat/a.heic`",
}


def test_a_usual_data_set_has_no_warnings(tree):
    assert prepare(plan_of(tree), strict=True).warnings == ()


@pytest.mark.parametrize(("change", "warning"), CASES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_unusual_input_is_a_warning_and_with_strict_an_error(tree, change, warning):
    change(tree)
    with pytest.raises(UserError) as error:
        prepare(plan_of(tree), strict=True)
    assert str(error.value) == f"{tree}: `--strict` allows no warnings, but {warning}."
    made = prepare(plan_of(tree))
    assert (made.already, made.warnings) == (False, (warning,))
    again = prepare(plan_of(tree))
    assert (again.already, again.warnings) == (True, (warning,))
    with pytest.raises(UserError, match="`--strict` allows no warnings"):
        prepare(plan_of(tree), strict=True)


def test_a_class_that_is_tested_but_not_trained_is_a_warning(tmp_path):
    for path in ("train/cat/0.png", "train/dog/0.png", "test/cat/0.png", "test/owl/0.png"):
        write(tmp_path / "root", path)
    assert prepare(plan_of(tmp_path / "root", Classes(), name="own")).warnings == (
        "1 class has no test image: `dog` of `own` (1 in training)",
        "1 class has no training image: `owl` of `own` (1 in test)",
    )


def test_sixteen_bits_become_the_upper_eight(tmp_path):
    write(tmp_path / "root", "deep/0.png", ramp(16))
    write(tmp_path / "root", "deep/1.png", ramp(16)[::-1])
    made = prepare(plan_of(tmp_path / "root", Classes()))
    (train, _) = map_domain(made.folder / "set.arrow")
    assert train.images[0, 0].tolist() in [(one >> 8).tolist() for one in (ramp(16), ramp(16)[::-1])]
    assert made.warnings == ()


def test_a_class_whose_test_images_are_all_corrupt_is_a_warning(tree):
    (domain, _) = plan_of(tree).domains
    tests = [item.path for _, item in domain.parts(frozenset())[1] if "/cat/" in item.path]
    for path in tests:
        (tree / path).write_bytes(b"no")
    warning = "1 class has no test image that can be decoded: `cat` of `photo` (8 in training)"
    with pytest.raises(UserError, match=re.escape(f"`--strict` allows no warnings, but {warning}.")):
        prepare(plan_of(tree), skip_corrupt=True, strict=True)
    made, again = (prepare(plan_of(tree), skip_corrupt=True) for _ in range(2))
    assert made.card.skipped == tuple(sorted(tests))
    assert made.warnings == again.warnings == (warning,)
