"""Arrow files of prepared images: written in pieces, mapped whole. No torch."""

import hashlib
import io
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.card import StoreCard

PIECE = 32 * 1024 * 1024  # bytes that are read or written at once, which limits the memory of a process


@dataclass(frozen=True)
class Part:
    """One split of a domain: uint8 images (n, 3, size, size) in mapped pages, int16 labels (n,), source paths."""

    images: np.ndarray
    labels: np.ndarray
    paths: pa.StringArray
    pages: mmap.mmap


def schema(size: int) -> pa.Schema:
    """Return the Arrow schema of a domain's file."""
    image = pa.fixed_shape_tensor(pa.uint8(), [3, size, size])
    return pa.schema([("image", image), ("label", pa.int16()), ("path", pa.string())])


def record_batch(images: np.ndarray, labels: Sequence[int] | np.ndarray, paths: Sequence[str]) -> pa.RecordBatch:
    """Return one split as a record batch, without copying its pixels, uint8 (n, 3, size, size)."""
    size = images.shape[-1]
    pixels = pa.Array.from_buffers(pa.uint8(), images.size, [None, pa.py_buffer(np.ascontiguousarray(images))])
    storage = pa.FixedSizeListArray.from_arrays(pixels, 3 * size * size)
    columns = [pa.ExtensionArray.from_storage(schema(size).field("image").type, storage)]
    columns += [pa.array(labels, pa.int16()), pa.array(paths, pa.string())]
    return pa.record_batch(columns, schema=schema(size))


def write_domain(path: Path, train: pa.RecordBatch, test: pa.RecordBatch, pages: mmap.mmap | None = None) -> None:
    """Write a domain's file and flush it to disk; if the images lie in a memory map `pages`, release written pages."""
    # A domain of 14,267 images at 224 px has more than 2^31 pixel values.
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with _InPieces(io.FileIO(path, "w")) as file:
        file.pages = pages
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), train.schema, options=options) as writer:
            writer.write_batch(train)
            writer.write_batch(test)
        file.flush()
        os.fsync(file.fileno())


class _InPieces(io.BufferedWriter):
    """A file that is written in pieces and releases the pages of the memory map that the pieces come from."""

    pages: mmap.mmap | None = None

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        for start in range(0, len(view), PIECE):
            super().write(view[start : start + PIECE])
            if self.pages is not None:
                self.pages.madvise(mmap.MADV_DONTNEED)
        return len(view)


def map_file(path: Path) -> mmap.mmap:
    """Return a read-only memory map of a file that is not empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_domain(path: Path) -> tuple[Part, Part]:
    """Map the training and the test part of a domain's file into memory, or raise UserError for another file."""
    try:
        pages = map_file(path)
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(pages)))
        size = reader.schema.field("image").type.shape[-1]
        if reader.num_record_batches != 2 or not reader.schema.equals(schema(size)):
            raise ValueError("other columns or batches")
        train, test = (_part(reader.get_batch(number), size, pages) for number in range(2))
    except (pa.ArrowException, OSError, ValueError, KeyError, AttributeError):  # ValueError: mmap's, of an empty file
        raise UserError(f"{path} is not a file of prepared images, or it is damaged; prepare it again.") from None
    return train, test


def _part(batch: pa.RecordBatch, size: int, pages: mmap.mmap) -> Part:
    pixels = batch.column("image").storage.flatten().to_numpy(zero_copy_only=True)
    return Part(pixels.reshape(-1, 3, size, size), batch.column("label").to_numpy(), batch.column("path"), pages)


def check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    """Raise UserError unless all labels of a domain's file are within 0..classes-1."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"{path} holds labels from {labels.min()} to {labels.max()}, but its card names {classes} classes; "
            "prepare it again."
        )


def stored_digest(folder: Path, card: StoreCard) -> str:
    """Return the `content_digest` of the files on the disk, read piece by piece."""
    digest = hashlib.sha256("".join(f"{name}\0" for name in card.class_names).encode())
    for name in card.domains:
        for part in map_domain(folder / f"{name}.arrow"):
            digest.update(name.encode())
            pixels = part.images.reshape(-1)
            for start in range(0, len(pixels), PIECE):
                digest.update(pixels[start : start + PIECE].data)
                part.pages.madvise(mmap.MADV_DONTNEED)
            digest.update(part.labels.astype("<i8").tobytes())
    return digest.hexdigest()
