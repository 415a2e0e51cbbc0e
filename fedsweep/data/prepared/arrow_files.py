"""Functions that write, memory-map and check the Arrow files of prepared data sets.

This module does not import torch, so commands that do not train start quickly.
"""

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
from fedsweep.data.prepared.card import StoreCard, read_card

PIECE = 32 * 1024 * 1024  # bytes read or written at once, to limit the memory of a process


@dataclass(frozen=True)
class Part:
    """The training or the test images of a domain, memory-mapped from the domain's file.

    `images` is a uint8 array (n, 3, size, size), and `labels` is an int16 array (n,). `paths` are the paths of the
    source images within the original data set. `pages` is the memory map that contains the images. `groups` is the
    group of each image, int64 (n,), or None if every image is a group of its own. `validation` is true for each image
    that the data set lists for validation, bool (n,); it is None if no image of the domain is listed for validation.
    """

    images: np.ndarray
    labels: np.ndarray
    paths: pa.StringArray
    pages: mmap.mmap
    groups: np.ndarray | None = None
    validation: np.ndarray | None = None


def schema(size: int, grouped: bool = False, validated: bool = False) -> pa.Schema:
    """Return the schema of a domain's Arrow file, for images of `size` x `size` pixels.

    If `grouped` is true, there is a column with the group of each image. If `validated` is true, the last column is
    true for images that the data set lists for validation.
    """
    image = pa.fixed_shape_tensor(pa.uint8(), [3, size, size])
    group = [("group", pa.int64())] if grouped else []
    listed = [("validation", pa.bool_())] if validated else []
    return pa.schema([("image", image), ("label", pa.int16()), ("path", pa.string()), *group, *listed])


def record_batch(
    images: np.ndarray,
    labels: Sequence[int] | np.ndarray,
    paths: Sequence[str],
    groups: Sequence[int] | None = None,
    validation: Sequence[bool] | None = None,
) -> pa.RecordBatch:
    """Return a record batch of images with their labels, paths and groups, without copying the pixels.

    `images` is a uint8 array (n, 3, size, size). `validation` is true for images that the data set lists for
    validation.
    """
    size = images.shape[-1]
    pixels = pa.Array.from_buffers(pa.uint8(), images.size, [None, pa.py_buffer(np.ascontiguousarray(images))])
    storage = pa.FixedSizeListArray.from_arrays(pixels, 3 * size * size)
    columns = [pa.ExtensionArray.from_storage(schema(size).field("image").type, storage)]
    columns += [pa.array(labels, pa.int16()), pa.array(paths, pa.string())]
    columns += [] if groups is None else [pa.array(groups, pa.int64())]
    columns += [] if validation is None else [pa.array(validation, pa.bool_())]
    return pa.record_batch(columns, schema=schema(size, groups is not None, validation is not None))


def write_domain(path: Path, train: pa.RecordBatch, test: pa.RecordBatch, pages: mmap.mmap | None = None) -> None:
    """Write the training and test images of a domain to the file `path`, and flush the file to disk.

    `pages` is the memory map that contains the images, or None if they are not memory-mapped. The memory of `pages` is
    released while the file is written.
    """
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
    """A file writer that writes data in pieces and frees the memory of the memory map `pages` after each piece."""

    pages: mmap.mmap | None = None

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        for start in range(0, len(view), PIECE):
            super().write(view[start : start + PIECE])
            if self.pages is not None:
                self.pages.madvise(mmap.MADV_DONTNEED)
        return len(view)


def map_file(path: Path) -> mmap.mmap:
    """Return a read-only memory map of a file, which must not be empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_domain(path: Path) -> tuple[Part, Part]:
    """Return the training and the test images of a domain, memory-mapped from its file.

    Raises:
        UserError: The file is missing or damaged, or is not a file of prepared images.
    """
    try:
        pages = map_file(path)
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(pages)))
        size = reader.schema.field("image").type.shape[-1]
        expected = schema(size, *(name in reader.schema.names for name in ("group", "validation")))
        if reader.num_record_batches != 2 or not reader.schema.equals(expected):
            raise ValueError("other columns or batches")
        train, test = (_part(reader.get_batch(number), size, pages) for number in range(2))
    except (pa.ArrowException, OSError, ValueError, KeyError, AttributeError):  # ValueError: mmap of an empty file
        raise UserError(
            f"{path} is not a file of prepared images, or it is damaged; prepare the data set again."
        ) from None
    return train, test


def _part(batch: pa.RecordBatch, size: int, pages: mmap.mmap) -> Part:
    pixels = batch.column("image").storage.flatten().to_numpy(zero_copy_only=True)
    groups = batch.column("group").to_numpy() if "group" in batch.schema.names else None
    names, labels = batch.schema.names, batch.column("label").to_numpy()
    listed = batch.column("validation").to_numpy(zero_copy_only=False).astype(bool) if "validation" in names else None
    return Part(pixels.reshape(-1, 3, size, size), labels, batch.column("path"), pages, groups, listed)


def check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    """Raise UserError unless all `labels` in the file `path` are between 0 and `classes` - 1."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"{path} contains labels from {labels.min()} to {labels.max()}, but its card lists {classes} classes; "
            "prepare the data set again."
        )


def stored_digest(folder: Path, card: StoreCard) -> str:
    """Return the digest of a prepared data set, computed from its files piece by piece to save memory.

    It is the `content_digest` of the data set. If the images have groups, the groups of each part (int64,
    little-endian) are hashed after its labels. If the domain has listed validation images, the word `validation` and
    one byte for each image (1 for validation images) are hashed at the end of each part.
    """
    digest = hashlib.sha256("".join(f"{name}\0" for name in card.class_names).encode())
    for name in card.domains:
        for part in map_domain(folder / f"{name}.arrow"):
            digest.update(name.encode())
            pixels = part.images.reshape(-1)
            for start in range(0, len(pixels), PIECE):
                digest.update(pixels[start : start + PIECE].data)
                part.pages.madvise(mmap.MADV_DONTNEED)
            digest.update(part.labels.astype("<i8").tobytes())
            digest.update(b"" if part.groups is None else part.groups.astype("<i8").tobytes())
            digest.update(b"" if part.validation is None else b"validation" + part.validation.tobytes())
    return digest.hexdigest()


def verify(folder: Path) -> None:
    """Read all pixels of a prepared data set; raise UserError unless its digest is the one that its card records."""
    card = read_card(folder)
    if (found := stored_digest(folder, card)) != card.digest:
        raise UserError(
            f"{folder} has changed since it was prepared: its digest is {found[:12]}, but its card records "
            f"{card.digest[:12]}; run `fedsweep data prepare {card.name} --root DIR --size {card.size} --force` to "
            "prepare it again."
        )
