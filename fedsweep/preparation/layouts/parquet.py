"""The layout of Parquet files with a column of encoded images, which is common on the Hugging Face Hub."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsweep.common.errors import UserError, near, one_line, summarise_list
from fedsweep.preparation.layouts.base import Item, Layout, ListedSplit, Listing, side
from fedsweep.preparation.layouts.disk_listing import Folder, list_folder, unexpected
from fedsweep.preparation.layouts.folders import SPLITS, domain_of

_BATCH = 64  # images read from Parquet at a time, because a row group may contain all images


def open_parquet(path: Path) -> pq.ParquetFile:
    """Map a Parquet file into memory, or raise UserError if it is damaged or cannot be read."""
    try:
        return pq.ParquetFile(path, memory_map=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or one_line(error)}.") from None
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a complete Parquet file: {one_line(error)}.") from None


def _read_rows(path: Path, rows: Iterable[int]) -> Iterator[bytes]:
    """Yield the encoded images of a Parquet file, one for each row number in `rows`.

    Reading is fastest if the row numbers are in ascending order. Otherwise, row groups may be read several times.
    """
    file = open_parquet(path)
    starts = [0, *accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))]
    group, first, images = -1, 0, pa.array([], pa.binary())  # `first`: row of the first of the images in memory
    for row in rows:
        if not 0 <= row < starts[-1]:
            raise UserError(f"{path} has no row {row}, because it has {starts[-1]} rows.")
        wanted = bisect_right(starts, row) - 1
        if wanted != group or row < first:
            group, first, images = wanted, starts[wanted], images[:0]
            batches = file.iter_batches(_BATCH, row_groups=[group], columns=["image"])
        while row >= first + len(images):
            first += len(images)
            try:
                images = _encoded(next(batches)["image"])
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"{path} is damaged: its images from row {first} on cannot be read: {one_line(error)}."
                ) from None
        yield images[row - first].as_py()


def _encoded(images: pa.Array) -> pa.Array:
    """Return a column of encoded images as an array of bytes.

    In Hugging Face's files, the column contains structs with the encoded image in the field `bytes`.
    """
    return pc.struct_field(images, "bytes") if pa.types.is_struct(images.type) else images


_SHARD = re.compile(r"[-_.]\d+(-of-\d+)?$")


class Parquet(Layout):
    """The layout of Parquet files with one image per row."""

    name = "parquet"
    looks_like = "*.parquet with the columns image, label[, label_name, domain, split, group]"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        names = parquet_files(list_folder(root))
        if not names:
            raise unexpected(root, self.name, "`*.parquet`")
        tables = [_Table.read(root / name) for name in names]
        places, after_splits = _places(root, [table.path.stem for table in tables])
        class_names = _class_names(root, tables)
        items = [item for table in tables for item in table.items(*places[table.path.stem], len(class_names))]
        with_rows = {item.domain for item in items}
        for table in tables:
            domain, _ = places[table.path.stem]
            if "domain" not in table.columns and domain not in with_rows:
                raise UserError(f"{table.path}: a domain must have images, but the file of `{domain}` has no rows.")
        nameless = after_splits and not any("domain" in table.columns for table in tables)
        return Listing(class_names, (), tuple(items), nameless=nameless)

    def _order(self, path: str) -> tuple[str, int]:
        return row_of(path)  # row 10 comes after row 9, so that a file is read once

    def files(self, items: Iterable[Item]) -> Sequence[str]:
        """Return the names of the Parquet files that contain the images `items`."""
        return [*dict.fromkeys(row_of(item.path)[0] for item in items)]

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        """Yield the encoded bytes of each image in `items`, in order.

        Reading is fastest if the rows of each file are in ascending order.
        """
        rows = map(row_of, (item.path for item in items))
        for file, of_file in groupby(rows, key=itemgetter(0)):
            yield from _read_rows(root / file, (row for _, row in of_file))


def row_of(path: str) -> tuple[str, int]:
    """Return the file name and the row number in the path of an image.

    >>> row_of("art_painting.parquet:17")
    ('art_painting.parquet', 17)
    """
    name, _, row = path.rpartition(":")
    return name, int(row)


def parquet_files(folder: Folder) -> list[str]:
    """Return the names of the Parquet files in a folder."""
    return [name for name in folder.files if name.lower().endswith(".parquet")]


@dataclass(frozen=True)
class _Table:
    path: Path
    columns: Mapping[str, list[Any]]
    metadata: Mapping[bytes, bytes]

    @classmethod
    def read(cls, path: Path) -> Self:
        file = open_parquet(path)
        schema = file.schema_arrow
        for needed in ("image", "label"):
            if needed not in schema.names:
                hint = near(needed, schema.names) or "."
                has = ", ".join(f"`{name}`" for name in schema.names)
                raise UserError(f"{path} must have a column `{needed}`, but it has {has}{hint}")
        image = schema.field("image").type
        if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
            image = image.field("bytes").type
        if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
            raise UserError(
                f"{path}: the column `image` must contain bytes or structs with bytes, but it contains {image}."
            )
        if not pa.types.is_integer(schema.field("label").type):
            raise UserError(
                f"{path}: the column `label` must contain integers, but it contains {schema.field('label').type}."
            )
        wanted = [name for name in ("label", "label_name", "domain", "split", "group") if name in schema.names]
        table = file.read(columns=wanted)
        for name in wanted:
            if table[name].null_count:
                row = table[name].is_null().index(True).as_py()
                raise UserError(f"{path}: the column `{name}` must have no nulls, but row {row} is null.")
        _refuse_null_images(path, file)
        columns = {name: table[name].to_pylist() for name in wanted}
        if "label_name" in columns:  # names may be stored as numbers, such as 7
            columns["label_name"] = [str(name) for name in columns["label_name"]]
        return cls(path, columns, schema.metadata or {})

    def items(self, domain: str, split: ListedSplit | None, classes: int) -> Iterator[Item]:
        labels = self.columns["label"]
        domains = self.columns.get("domain", [domain] * len(labels))
        splits, groups = self.columns.get("split"), self.columns.get("group")
        for row, label in enumerate(labels):
            if not 0 <= label < classes:
                raise UserError(
                    f"{self.path}, row {row}: a label must be between 0 and {classes - 1}, but it is {label}."
                )
            if splits:
                split = SPLITS.get(str(splits[row]).lower())
                if split is None:
                    raise UserError(
                        f"{self.path}: a split must be one of {', '.join(SPLITS)}, but it is `{splits[row]}`."
                    )
            group, validation = str(groups[row]) if groups else None, split == "validation"
            yield Item(f"{self.path.name}:{row}", label, str(domains[row]), side(split), group, validation)


def _refuse_null_images(path: Path, file: pq.ParquetFile) -> None:
    """Raise UserError if an image in a Parquet file is null.

    To save time, images are not read if the file's statistics rule out nulls.
    """
    before = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group)
        columns = map(rows.column, range(rows.num_columns))
        image = next(column for column in columns if column.path_in_schema in ("image", "image.bytes"))
        counted = image.is_stats_set and image.statistics.has_null_count
        if not counted or image.statistics.null_count:
            values = _encoded(file.read_row_group(group, columns=["image"])["image"].combine_chunks())
            if values.null_count:
                row = before + values.is_null().index(True).as_py()
                raise UserError(f"{path}: the column `image` must have no nulls, but row {row} is null.")
        before += rows.num_rows


def _places(root: Path, stems: Sequence[str]) -> tuple[dict[str, tuple[str, ListedSplit | None]], bool]:
    """Return the domain and the split of each Parquet file, and whether all files are named after splits.

    `stems` are the file names without the suffix `.parquet`, and are the keys of the returned dict. If all files are
    named after splits, such as `train`, the only domain is named after the root folder. Otherwise, each file is named
    after its domain, and the splits are None. A domain or a split can be divided into numbered files.
    """
    bases = {stem: _SHARD.sub("", stem) for stem in stems}
    if all(base.lower() in SPLITS for base in bases.values()):
        return {stem: (domain_of(root), SPLITS[base.lower()]) for stem, base in bases.items()}, True
    # `set-2.parquet` alone is a data set; with `set-1.parquet` it is a shard.
    shared = Counter(bases.values())
    return {stem: (base if shared[base] > 1 else stem, None) for stem, base in bases.items()}, False


def _class_names(root: Path, tables: Sequence[_Table]) -> tuple[str, ...]:
    """Return the class names in the order of labels.

    Raise UserError if two files or two rows have different names for the same label, or if there are no labels.
    """
    listed: list[str] | None = None
    for table in tables:
        names = _names_in_metadata(table)
        if listed is None:
            listed, first = names, table.path
        elif names is not None and names != listed:
            one, other = (summarise_list(sorted(set(a) - set(b)) or a) for a, b in ((names, listed), (listed, names)))
            raise UserError(
                f"{table.path} must have the same class names as {first.name}, but it has {one} instead of {other}."
            )
    found: dict[int, str] = dict(enumerate(listed or ()))
    for table in tables:
        pairs = zip(table.columns["label"], table.columns.get("label_name", ()), strict=False)
        for label, name in sorted(set(pairs)):
            if label >= 0 and found.setdefault(label, name) != name:
                raise UserError(f"{table.path}: label {label} is `{name}` here, but `{found[label]}` in another row.")
    if listed is not None:
        return tuple(listed)
    top = max((max(table.columns["label"], default=-1) for table in tables), default=-1)
    if top < 0:
        raise UserError(f"{root}: the Parquet files have no row with a label of 0 or more.")
    return tuple(found.get(label, "") if found else str(label) for label in range(top + 1))


def _names_in_metadata(table: _Table) -> list[str] | None:
    try:
        ours = json.loads(table.metadata.get(b"fedsweep", b"{}"))
        theirs = json.loads(table.metadata.get(b"huggingface", b"{}"))
        names = ours.get("labels") or theirs.get("info", {}).get("features", {}).get("label", {}).get("names")
    except (ValueError, AttributeError):
        raise UserError(f"{table.path}: the metadata `fedsweep` and `huggingface` must be JSON objects.") from None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{table.path}: `labels` in the metadata must be a list of names, but it is {names!r}.")
    return names
