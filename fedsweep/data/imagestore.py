"""The store of decoded images on disk: one folder per data set and size, one Arrow file per domain, one card.

    data/pacs-64/
      card.json              what, size, classes, counts, digest
      art_painting.arrow     columns image (tensor of uint8, 3 x size x size), label, path; two record batches

The first record batch of a domain's file holds its training images, the second its test images, each in one piece, so
that a memory map of the file *is* the tensor: nothing is decoded or copied, and all processes of a machine share pages.
"""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from fedsweep.config import Config, read_json
from fedsweep.errors import UserError
from fedsweep.paths import data_folder
from fedsweep.types import Domain, ImageSet

CARD = "card.json"
SPLITS = ("train", "test")


class DomainCard(Config):
    """What a domain's file holds."""

    train: int = Field(description="training images")
    test: int = Field(description="test images")
    bytes: int = Field(description="size of the Arrow file")


class StoreCard(Config):
    """What a prepared data set is. Written last: a folder without its card is not a store."""

    what_a_name_is = "an entry of a prepared data set's card"

    format: Literal[1] = 1
    name: str
    size: int = Field(description="height and width of the images, pixels")
    layout: str = Field(description="the layout that it was read from")
    class_names: tuple[str, ...]
    domains: dict[str, DomainCard]
    digest: str = Field(description="SHA-256 of classes, domains, split, labels and pixels; see `content_digest`")
    crop_pct: float = Field(description="share of the short side that the centre crop keeps")
    interpolation: str = "bicubic"
    test_fraction: float | None = Field(None, description="share of each class drawn for the test split; null: listed")
    skipped: tuple[str, ...] = Field((), description="images that could not be decoded")


def store_folder(name: str, size: int) -> Path:
    """Where a prepared data set lies."""
    return data_folder() / f"{name}-{size}"


def schema(size: int) -> pa.Schema:
    """Columns of a domain's file."""
    image = pa.fixed_shape_tensor(pa.uint8(), [3, size, size])
    return pa.schema([("image", image), ("label", pa.int16()), ("path", pa.string())])


def record_batch(images: np.ndarray, labels: Sequence[int], paths: Sequence[str]) -> pa.RecordBatch:
    """One split as one record batch around the pixels, uint8 (n, 3, size, size), which are not copied."""
    size = images.shape[-1]
    pixels = pa.Array.from_buffers(pa.uint8(), images.size, [None, pa.py_buffer(np.ascontiguousarray(images))])
    storage = pa.FixedSizeListArray.from_arrays(pixels, 3 * size * size)
    columns = [pa.ExtensionArray.from_storage(schema(size).field("image").type, storage)]
    columns += [pa.array(labels, pa.int16()), pa.array(paths, pa.string())]
    return pa.record_batch(columns, schema=schema(size))


def write_domain(path: Path, train: pa.RecordBatch, test: pa.RecordBatch) -> None:
    """Write a domain's file. `path` must not be taken for whole before this returns."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, train.schema) as writer:
        writer.write_batch(train)
        writer.write_batch(test)


def read_domain(path: Path, name: str) -> Domain:
    """Map a domain's file into memory. Writing to its images would end the process: the pages are read-only."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        train, test = (_image_set(reader.get_batch(number)) for number in range(2))
    return Domain(name, train, test)


def _image_set(batch: pa.RecordBatch) -> ImageSet:
    size = batch.schema.field("image").type.shape[-1]
    pixels = batch.column("image").storage.flatten().to_numpy(zero_copy_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # that is the point
        images = torch.from_numpy(pixels.reshape(-1, 3, size, size))
    return ImageSet(images, torch.from_numpy(batch.column("label").to_numpy().astype(np.int64)))


def read_card(folder: Path) -> StoreCard:
    """The card of a store whose files are all there in full.

    Raises:
        UserError: a file is missing or has another length than it had when it was written.
    """
    card = StoreCard.of(read_json(folder / CARD), str(folder / CARD))
    for name, domain in card.domains.items():
        path = folder / f"{name}.arrow"
        found = path.stat().st_size if path.exists() else 0
        if found != domain.bytes:
            raise UserError(f"{path} must have {domain.bytes} bytes, but it has {found}; prepare `{card.name}` again.")
    return card


def content_digest(class_names: Sequence[str], domains: Iterable[Domain]) -> str:
    """SHA-256, in hex, over what training can see, in the order of the store.

    The class names (each followed by a zero byte), then for each domain its train and test part: the domain's name,
    the pixels (uint8, n x 3 x height x width) and the labels (int64, little-endian).
    """
    digest = hashlib.sha256("".join(f"{name}\0" for name in class_names).encode())
    for domain in domains:
        for part in (domain.train, domain.test):
            digest.update(domain.name.encode())
            for images, _ in part.batches(4096):
                digest.update(images.numpy())
            digest.update(part.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
