"""Prepared images as tensors around mapped pages; `fedsweep.images` has the files themselves."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from fedsweep.images.card import CARD, SPLITS, DomainCard, StoreCard, is_store, read_card, store_folder
from fedsweep.images.files import Part, map_domain, record_batch, schema, write_domain
from fedsweep.types import Domain, ImageSet

__all__ = [
    "CARD",
    "SPLITS",
    "DomainCard",
    "StoreCard",
    "content_digest",
    "is_store",
    "read_card",
    "read_domain",
    "record_batch",
    "schema",
    "store_folder",
    "write_domain",
]


def read_domain(path: Path, name: str) -> Domain:
    """Map a domain's file into memory. Writing to its images would end the process: the pages are read-only.

    Raises:
        UserError: it is not such a file.
    """
    train, test = (_image_set(part) for part in map_domain(path))
    return Domain(name, train, test)


def _image_set(part: Part) -> ImageSet:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # that is the point
        images = torch.from_numpy(part.images)
    return ImageSet(images, torch.from_numpy(part.labels.astype(np.int64)))


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
                digest.update(images.numpy().data)
            digest.update(part.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
