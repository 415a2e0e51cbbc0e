"""Images out of Parquet files, in bounded memory."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsweep.common.errors import UserError, one_line

_BATCH = 64  # images decoded from Parquet at a time; a row group may hold them all


def open_parquet(path: Path) -> pq.ParquetFile:
    """The file, mapped into memory.

    Raises:
        UserError: it is no Parquet file, or cannot be read.
    """
    try:
        return pq.ParquetFile(path, memory_map=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or one_line(error)}.") from None
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file: {one_line(error)}.") from None


def read_images(root: Path, rows: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    """The image of each (file, row). Going back in a file starts its row group anew."""
    name, cursor = "", None
    for file, row in rows:
        if cursor is None or file != name:
            name, cursor = file, _Cursor(root / file)
        yield cursor.image(row)


class _Cursor:
    """A place in a file's column of images."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_parquet(path)
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.metadata.num_row_groups)]
        self._starts = [sum(sizes[:group]) for group in range(len(sizes) + 1)]
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._images: pa.Array = pa.array([], pa.binary())
        self._start = 0  # row of the first image held
        self._group = -1

    def image(self, row: int) -> bytes:
        if not 0 <= row < self._starts[-1]:
            raise UserError(f"{self._path} has {self._starts[-1]} rows, but row {row} is asked for.")
        group = bisect_right(self._starts, row) - 1
        if group != self._group or row < self._start:
            self._group, self._start, self._images = group, self._starts[group], self._images[:0]
            self._batches = self._file.iter_batches(_BATCH, row_groups=[group], columns=["image"])
        while row >= self._start + len(self._images):
            self._start += len(self._images)
            try:
                images = next(self._batches)["image"]
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"{self._path} is damaged: its images from row {self._start} on cannot be read: {one_line(error)}."
                ) from None
            self._images = pc.struct_field(images, "bytes") if pa.types.is_struct(images.type) else images
        image: bytes = self._images[row - self._start].as_py()
        return image
