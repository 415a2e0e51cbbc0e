"""The layout `parquet`, with its columns, names, domains and splits, which is read in bounded memory."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts import find
from fedsweep.preparation.layouts.base import Item
from fedsweep.preparation.layouts.parquet import Parquet, row_of
from tests.preparation.layouts.trees import parquet, picture, write_parquet

SOURCE = Parquet()


def columns(count: int = 3, **changes: object) -> dict[str, object]:
    made = {"image": [picture(number) for number in range(count)], "label": [number % 2 for number in range(count)]}
    return {name: values for name, values in (made | changes).items() if values is not None}


def refused(root: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        SOURCE.list(root)
    assert "\n" not in str(caught.value)
    assert str(caught.value)[-1] in ".?"


def test_the_path_of_an_image_contains_file_and_row(tmp_path: Path) -> None:
    parquet(tmp_path)
    items = SOURCE.list(tmp_path).items
    assert [row_of(item.path) for item in items] == [
        (f"{name}.parquet", row) for name in ("photo", "sketch") for row in range(12)
    ]
    table = pq.read_table(tmp_path / "sketch.parquet").to_pylist()
    for item, image in zip(items[12:], SOURCE.read(tmp_path, items[12:]), strict=True):
        row = table[row_of(item.path)[1]]
        assert (row["image"], row["label"], row["domain"]) == (image, item.label, item.domain)


def test_shards_of_a_set_without_domains_are_one_domain(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    for name in ("train-0", "train-1", "val"):
        write_parquet(root / f"{name}.parquet", columns(split=["val" if name == "val" else "train"] * 3))
    got = SOURCE.list(root)
    assert got.domains == ("tiny",)
    assert [(item.path, item.split) for item in got.items] == [
        *((f"train-{shard}.parquet:{row}", "train") for shard in (0, 1) for row in range(3)),
        *((f"val.parquet:{row}", "test") for row in range(3)),
    ]
    assert got.class_names == ("0", "1")


def test_files_of_hugging_face_data_sets_are_read(tmp_path: Path) -> None:
    images = [{"bytes": picture(number), "path": None} for number in range(3)]
    label = {"names": ["cod", "eel"], "_type": "ClassLabel"}
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        metadata = {"huggingface": {"info": {"features": {"label": label}}}}
        write_parquet(tmp_path / f"{name}.parquet", columns(image=images), metadata)
    got = find("fish", tmp_path).list(tmp_path)
    assert (got.class_names, got.domains) == (("cod", "eel"), (tmp_path.name,))
    assert [item.split for item in got.items] == ["test"] * 3 + ["train"] * 6
    assert list(SOURCE.read(tmp_path, got.items)) == [image["bytes"] for image in images] * 3


def test_the_domain_is_the_name_of_the_file_without_its_shard(tmp_path: Path) -> None:
    for name in ("photo-0", "photo-1", "digits-28"):
        write_parquet(tmp_path / f"{name}.parquet", columns())
    got = SOURCE.list(tmp_path)
    assert got.domains == ("digits-28", "photo")
    assert {item.split for item in got.items} == {None}


def test_one_file_may_contain_several_domains(tmp_path: Path) -> None:
    write_parquet(tmp_path / "all.parquet", columns(12, domain=["b", "a"] * 6))
    assert [item.path for item in SOURCE.list(tmp_path).items] == [
        f"all.parquet:{row}" for row in (*range(1, 12, 2), *range(0, 12, 2))
    ]


def test_class_names_are_read_from_the_column_label_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns(label_name=["cod", "eel", "cod"]))
    write_parquet(tmp_path / "b.parquet", columns(label=[2, 1, 1], label_name=["pike", "eel", "eel"]))
    assert SOURCE.list(tmp_path).class_names == ("cod", "eel", "pike")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"image": None}, "must have a column `image`, but it has `label`, `lable`."),
        ({"label": None}, "must have a column `label`, but it has `image`, `lable`; did you mean `lable`?"),
        (
            {"image": ["a", "b", "c"]},
            "the column `image` must contain bytes or structs with bytes, but it contains string.",
        ),
        ({"image": [b"a", None, b"c"]}, "the column `image` must have no nulls, but row 1 is null."),
        ({"image": [b"a", b"b", None]}, "the column `image` must have no nulls, but row 2 is null."),
        ({"image": [{"bytes": b"a"}, {"bytes": b"b"}, {"bytes": None}]}, "must have no nulls, but row 2 is null."),
        ({"image": [{"bytes": b"a"}, None, {"bytes": b"c"}]}, "must have no nulls, but row 1 is null."),
        ({"label": [0, None, 1]}, "the column `label` must have no nulls, but row 1 is null."),
        ({"label": [0.0, 1.0, 1.0]}, "the column `label` must contain integers, but it contains double."),
        ({"label": [0, 1, -1]}, "row 2: a label must be between 0 and 1, but it is -1."),
        ({"label": [-1, -1, -1]}, "the Parquet files have no row with a label of 0 or more."),
        ({"label": [0, 2, 2]}, "a class must have images, but `1` has none in any domain."),
        ({"domain": ["a", None, "a"]}, "the column `domain` must have no nulls, but row 1 is null."),
        ({"domain": ["a", "b/c", "a"]}, "contain no `/` or `\\` and not begin with a dot, but it is 'b/c'."),
        ({"domain": ["a", "", "a"]}, "not begin with a dot, but it is ''."),
        ({"split": ["train", "trian", "test"]}, "a split must be one of train, val, valid, validation, test, but it"),
        ({"label_name": ["a", "b", "c"]}, "label 0 is `c` here, but `a` in another row."),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_invalid_columns_are_rejected(
    changes: dict[str, object], sentence: str, statistics: bool, tmp_path: Path
) -> None:
    table = pa.table(columns(**changes, lable=["x"] * 3))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, write_statistics=statistics)
    refused(tmp_path, sentence)


def test_files_with_different_class_names_are_rejected(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns(), {"fedsweep": {"labels": ["cod", "eel"]}})
    write_parquet(tmp_path / "b.parquet", columns(), {"fedsweep": {"labels": ["cod", "pike"]}})
    refused(tmp_path, "b.parquet must have the same class names as a.parquet, but it has `pike` instead of `eel`.")
    write_parquet(tmp_path / "b.parquet", columns(), {"fedsweep": {"labels": ["eel", "cod"]}})
    refused(
        tmp_path,
        "b.parquet must have the same class names as a.parquet, but it has `eel`, `cod` instead of `cod`, `eel`.",
    )
    write_parquet(tmp_path / "b.parquet", columns(label_name=["cod", "pike", "cod"]))
    refused(tmp_path, "b.parquet: label 1 is `pike` here, but `eel` in another row.")
    write_parquet(tmp_path / "b.parquet", columns(label=[0, 1, 2]))
    refused(tmp_path, "b.parquet, row 2: a label must be between 0 and 1, but it is 2.")


@pytest.mark.parametrize("metadata", [[1], {"labels": "cod"}, {"labels": [1, 2]}])
def test_invalid_metadata_is_rejected(metadata: object, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns(), {"fedsweep": metadata})
    refused(tmp_path, "metadata")


def test_incomplete_files_are_rejected(tmp_path: Path) -> None:
    parquet(tmp_path)
    whole = (tmp_path / "photo.parquet").read_bytes()
    (tmp_path / "photo.parquet").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, f"{tmp_path / 'photo.parquet'} is not a complete Parquet file: ")
    (tmp_path / "photo.parquet").write_bytes(b"")
    refused(tmp_path, f"{tmp_path / 'photo.parquet'} is not a complete Parquet file: ")


def test_a_file_without_rows_is_an_empty_domain(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", columns())
    write_parquet(tmp_path / "y.parquet", {"image": pa.array([], pa.binary()), "label": pa.array([], pa.int16())})
    refused(tmp_path, f"{tmp_path / 'y.parquet'}: a domain must have images, but the file of `y` has no rows.")
    (tmp_path / "y.parquet").rename(tmp_path / "x-1.parquet")
    (tmp_path / "x.parquet").rename(tmp_path / "x-0.parquet")
    assert SOURCE.list(tmp_path).domains == ("x",)  # a shard may be empty


def test_damaged_pages_are_an_error_in_one_sentence(tmp_path: Path) -> None:
    write_parquet(path := tmp_path / "x.parquet", columns(40), rows=40)
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(SOURCE.read(tmp_path, [Item(f"x.parquet:{row}", 0, "x", None) for row in range(40)]))
    assert str(caught.value).startswith(f"{path} is damaged: its images from row 0 on cannot be read: ")
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith("..")


def test_only_files_named_after_splits_have_no_domain(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", columns())
    assert SOURCE.list(tmp_path).nameless
    write_parquet(tmp_path / "train.parquet", columns(domain=["a", "b", "b"]))
    assert not SOURCE.list(tmp_path).nameless
    (tmp_path / "train.parquet").rename(tmp_path / "photo.parquet")
    assert not SOURCE.list(tmp_path).nameless


def test_rows_are_read_in_any_order_and_a_missing_row_is_an_error(tmp_path: Path) -> None:
    parquet(tmp_path)
    items = SOURCE.list(tmp_path).items
    images = dict(zip(items, SOURCE.read(tmp_path, items), strict=True))
    mixed = [items[number] for number in (20, 3, 3, 11, 0, 23, 12)]
    assert list(SOURCE.read(tmp_path, mixed)) == [images[item] for item in mixed]
    with pytest.raises(UserError, match=re.escape("photo.parquet has no row 12, because it has 12 rows.")):
        next(SOURCE.read(tmp_path, [Item("photo.parquet:12", 0, "photo", None)]))


def test_memory_stays_bounded_in_one_large_row_group(tmp_path: Path) -> None:
    size, count = 4_000, 8_000  # 32 MB; a page of Parquet has at most 1,024 rows, and the reader holds two copies of it
    images = [number.to_bytes(4, "little") * (size // 4) for number in range(count)]
    write_parquet(tmp_path / "a.parquet", columns(count, image=images), rows=count)
    items = [Item(f"a.parquet:{row}", 0, "a", None) for row in range(count)]
    before = peak = pa.total_allocated_bytes()
    for number, image in enumerate(SOURCE.read(tmp_path, items)):
        assert image == images[number]
        peak = max(peak, pa.total_allocated_bytes())
    assert peak - before < size * count / 2


def test_names_of_classes_may_be_numbers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "photo.parquet", columns(label_name=[70, 80, 70]))
    assert SOURCE.list(tmp_path).class_names == ("70", "80")


def test_for_the_root_of_a_hugging_face_repository_the_error_names_the_folder_below(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    (root / "data").mkdir(parents=True)
    write_parquet(root / "data" / "train-00000-of-00001.parquet", columns())
    sentence = re.escape(f"; there are Parquet files one folder below, so try `--root {root / 'data'}`.")
    for action in (lambda: SOURCE.list(root), lambda: find("birds", root)):
        with pytest.raises(UserError, match=f"{sentence}$"):
            action()
