"""The detection of the layout of a root folder."""

import re
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts import find
from tests.preparation.layouts import trees


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Office-Home", "office_home"),
        ("OfficeHome", "office_home"),
        ("NICO++", "nico"),
        ("nicopp", "nico"),
        ("ImageCLEF-DA", "imageclef"),
        ("Food-101", "food101"),
        ("DomainNet", "domainnet"),
        ("UCF-101", "ucf101"),
    ],
)
def test_other_spellings_of_a_name_select_the_same_layout(name: str, layout: str, tmp_path: Path) -> None:
    assert find(name, tmp_path).name == layout


def test_parquet_files_take_precedence_over_the_name(tmp_path: Path) -> None:
    trees.parquet(tmp_path)
    assert find("pacs", tmp_path).name == "parquet"


def test_parquet_files_without_images_do_not_take_precedence(tmp_path: Path) -> None:
    trees.domains(tmp_path)
    trees.write_parquet(tmp_path / "statistics.parquet", {"mean": [0.5]})
    assert find("my set", tmp_path).name == "domains"


@pytest.mark.parametrize("layout", ["domains", "classes"])
def test_the_depth_of_the_tree_decides_for_an_unknown_name(layout: str, tmp_path: Path) -> None:
    trees.MAKERS[layout](tmp_path)
    assert find("my set", tmp_path).name == layout


def test_folders_named_after_splits_are_no_domains(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["train/cod/1.jpg", "val/cod/2.jpg"])
    assert find("my set", tmp_path).name == "classes"


@pytest.mark.parametrize(
    "files",
    [
        ["train/north/cod/1.jpg", "test/north/cod/2.jpg", "test/south/cod/3.jpg"],
        ["north/train/cod/1.jpg", "north/test/cod/2.jpg", "south/Train/eel/3.jpg"],
    ],
)
def test_splits_may_be_above_or_within_domains(files: list[str], tmp_path: Path) -> None:
    trees.grow(tmp_path, files)
    assert find("my set", tmp_path).name == "domains"


def test_a_folder_next_to_splits_is_an_error(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["train/cod/1.jpg", "test/cod/2.jpg", "unlabeled/x/3.jpg"])
    expected = (
        f"{tmp_path}: the folders `test`, `train` are named after splits, but `unlabeled` is not; move the "
        "other folders away to read the splits, or set `--layout domains` to read each folder as a domain."
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        find("my set", tmp_path)
    assert find("my set", tmp_path, layout="domains").list(tmp_path).domains == ("test", "train", "unlabeled")


def test_parquet_files_with_another_image_column_are_an_error(tmp_path: Path) -> None:
    trees.write_parquet(tmp_path / "x.parquet", {"img": [trees.picture()] * 2, "label": [0, 1]})
    with pytest.raises(UserError, match=re.escape("must have a column `image`, but it has `img`, `label`")):
        find("my set", tmp_path).list(tmp_path)


def test_an_unknown_layout_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("there is no layout `domain`; did you mean `domains`")):
        find("x", tmp_path, layout="domain")
    with pytest.raises(UserError, match=re.escape("there is no layout `zzz`; the layouts are domainnet, nico,")):
        find("x", tmp_path, layout="zzz")


def test_a_root_without_a_fitting_layout_is_an_error(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["a/b/c/d.jpg"])
    expected = (
        f"the root {tmp_path} does not have the layout `domains` or `classes`: looked for `<domain>/<class>/<image>`, "
        "`<class>/<image>` or `*.parquet` (`pcas` is not the name of a layout), but found folders `a`; "
        f"the data set may be one folder below, so try `--root {tmp_path / 'a'}`."
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        find("pcas", tmp_path)
    with pytest.raises(UserError, match=r"none cannot be read: No such file or directory\."):
        find("pacs", tmp_path / "none")


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("layout", ["classes", "domains"])
def test_the_data_folder_in_the_root_is_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, link: bool
) -> None:
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "set" / "data"))
    trees.MAKERS[layout](tmp_path / "set")
    before = find("set", tmp_path / "set").list(tmp_path / "set")
    store = tmp_path / ("elsewhere" if link else "set/data")
    trees.grow(store, ["set-16.png", "set-16/card.png", "other-16/deeper/1.png"])
    if link:
        (tmp_path / "set" / "data").symlink_to(store)
    assert find("set", tmp_path / "set").list(tmp_path / "set") == before


def test_a_class_may_have_the_name_of_a_data_folder_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for elsewhere in ("not there", "there"):
        (tmp_path / "there" / "data").mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / elsewhere / "data"))
        trees.grow(tmp_path / "set", ["data/1.png", "cat/1.png"])
        assert find("set", tmp_path / "set").list(tmp_path / "set").class_names == ("cat", "data")
