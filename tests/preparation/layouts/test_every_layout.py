"""The properties that all layouts of image folders share."""

import io
import os
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts import ALL, find
from fedsweep.preparation.layouts.base import Layout, Listing
from tests.preparation.layouts.trees import MAKERS

every_layout = pytest.mark.parametrize("layout", [layout() for layout in ALL], ids=lambda layout: layout.name)


def counts(listing: Listing) -> Counter[tuple[str, str, str | None]]:
    return Counter((item.domain, listing.class_names[item.label], item.split) for item in listing.items)


def test_every_layout_has_a_tree() -> None:
    assert len(ALL) == 11
    assert {layout.name for layout in ALL} == MAKERS.keys()
    assert all(layout.looks_like for layout in ALL)


@every_layout
def test_the_listing_contains_every_image_of_the_tree(layout: Layout, tmp_path: Path) -> None:
    expected = MAKERS[layout.name](tmp_path / "set")
    listing = layout.list(tmp_path / "set")
    assert counts(listing) == expected
    assert set(listing.class_names) == {name for _, name, _ in expected}
    assert set(listing.domains) == {domain for domain, _, _ in expected}
    assert len({item.path for item in listing.items}) == len(listing.items)
    assert pickle.loads(pickle.dumps(listing)) == listing  # noqa: S301  # items go to worker processes


@every_layout
def test_the_order_does_not_depend_on_the_file_system(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKERS[layout.name](tmp_path / "a" / "set")
    MAKERS[layout.name](tmp_path / "b" / "set", backwards=True)
    listing = layout.list(tmp_path / "a" / "set")
    assert layout.list(tmp_path / "b" / "set") == listing

    class Backwards:
        def __init__(self, path: str) -> None:
            self._entries = list(scandir(path))

        def __enter__(self) -> "list[os.DirEntry[str]]":
            return sorted(self._entries, key=lambda entry: entry.name, reverse=True)

        def __exit__(self, *_: object) -> None:
            pass

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", Backwards)
    assert layout.list(tmp_path / "a" / "set") == listing


@every_layout
def test_images_are_read_in_the_requested_order(layout: Layout, tmp_path: Path) -> None:
    MAKERS[layout.name](tmp_path)
    items = layout.list(tmp_path).items
    images = list(layout.read(tmp_path, items))
    assert len(images) == len(items) > 0
    assert all(Image.open(io.BytesIO(image)).size == (4, 4) for image in images)
    assert list(layout.read(tmp_path, items[::-1])) == images[::-1]
    assert list(layout.read(tmp_path, [])) == []


@every_layout
def test_links_are_followed(layout: Layout, tmp_path: Path) -> None:
    MAKERS[layout.name](tmp_path / "set")
    (tmp_path / "elsewhere").mkdir()
    for number, inside in enumerate(sorted((tmp_path / "set").iterdir())):
        there = tmp_path / "elsewhere" / str(number)
        inside.rename(there)
        inside.symlink_to(there)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "set").symlink_to(tmp_path / "set")
    assert layout.list(tmp_path / "links" / "set") == layout.list(tmp_path / "set")


@every_layout
def test_only_the_first_classes_are_listed_on_request(layout: Layout, tmp_path: Path) -> None:
    expected = MAKERS[layout.name](tmp_path / "set")
    whole = layout.list(tmp_path / "set")
    first = layout.list(tmp_path / "set", num_classes=2)
    assert first.class_names == whole.class_names[:2]
    assert first.items == tuple(item for item in whole.items if item.label < 2)
    assert counts(first) == Counter({key: n for key, n in expected.items() if key[1] in first.class_names})
    there = len(whole.class_names)
    for wrong in (0, -1, there + 1):
        rule = f"`--classes` must be between 1 and {there}, the number of classes in {tmp_path}/set, but it is {wrong}."
        with pytest.raises(UserError, match=re.escape(rule)):
            layout.list(tmp_path / "set", num_classes=wrong)


@every_layout
def test_the_root_must_be_a_folder(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'none'} cannot be read: No such file or directory.")):
        layout.list(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'file'} cannot be read: Not a directory.")):
        layout.list(tmp_path / "file")


@every_layout
def test_another_layout_is_an_error_that_lists_the_content(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"does not have the layout `{layout.name}`: looked for .*, but found nothing\."
    ):
        layout.list(tmp_path)
    for number in range(7):
        (tmp_path / f"f{number}.txt").touch()
    with pytest.raises(UserError, match=r"but found files `f0.txt`, `f1.txt`, `f2.txt`, `f3.txt`, `f4.txt` and 2 more"):
        layout.list(tmp_path)


@every_layout
def test_a_layout_is_found_by_the_name_of_the_data_set_or_of_the_layout(layout: Layout, tmp_path: Path) -> None:
    MAKERS[layout.name](tmp_path)
    assert type(find(layout.name, tmp_path)) is type(layout)
    assert type(find("whatever", tmp_path, layout=layout.name)) is type(layout)
