"""The file of a trial with the test images whose class the global model predicts correctly after the last round.

The file is JSON with base64. It contains one bit per test image and the group of each image, because a report is made
without the data set. The file has about 1 kB for 2,154 images in six styles, and about 30 kB for 176,000 images. Each
trial has its own copy of the groups: compressed, they are usually shorter than the bits, and a trial that is copied to
another sweep, or whose sweep is resumed on another machine, needs no second file.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np
from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.results.records import StoredRecord


class TestedDomain(StoredRecord):
    """A domain whose test images were predicted."""

    __test__ = False  # no test class, although its name begins like one

    name: str
    images: int = Field(ge=0, description="number of test images")
    held_out: bool = Field(description="whether no client has images of the domain")


class RightImages(StoredRecord):
    """The test images whose class a trial predicts correctly after its last round.

    The images are those of all domains, one domain after another, in the order of the data set.
    """

    data: str = Field(description="digest of the data set")
    domains: tuple[TestedDomain, ...]
    right: str = Field(description="one bit per image, 1 if its class is predicted correctly, in base64")
    groups: str = Field(
        description="groups of the images, numbered from 0 in the order of their first images: differences between "
        "successive images, int32, compressed by zlib, in base64"
    )

    @classmethod
    def of_domains(
        cls,
        data: str,
        right: Mapping[str, np.ndarray],
        held_out: Collection[str],
        groups: Sequence[np.ndarray | None],
    ) -> RightImages:
        """Return the record of a trial.

        Args:
            data: The digest of the data set.
            right: For each domain, whether the class of each test image is predicted correctly, bool (n,).
            held_out: The names of the held-out domains.
            groups: For each domain, the group of each image, int64 (n,), or None if each image is its own group.
        """
        domains = [TestedDomain(name=name, images=len(one), held_out=name in held_out) for name, one in right.items()]
        bits = np.packbits(np.concatenate([np.array([], bool), *right.values()]))
        steps = np.diff(numbered(groups, [len(one) for one in right.values()]), prepend=0).astype("<i4")
        return cls(
            data=data,
            domains=tuple(domains),
            right=_base64(bits.tobytes()),
            groups=_base64(zlib.compress(steps.tobytes(), 9)),
        )

    def content(self) -> bytes:
        """Return the content of the file."""
        return self.model_dump_json(indent=2).encode()

    @property
    def starts(self) -> np.ndarray:
        """The position of the first image of each domain, then the number of all images, int64 (domains + 1,)."""
        return np.cumsum([0, *(one.images for one in self.domains)])

    def of_domain(self, place: int) -> np.ndarray:
        """Return for each image of the domain at `place` whether its class is predicted correctly, bool (n,)."""
        bits = np.unpackbits(np.frombuffer(base64.b64decode(self.right), np.uint8))
        return bits[self.starts[place] : self.starts[place + 1]].view(bool)

    @property
    def group_numbers(self) -> np.ndarray:
        """The group of each image, from 0, int64 (n,). Trials that store the same groups share one array."""
        return _decoded(self.groups)

    def check(self, where: str) -> None:
        """Raise UserError if the bits or the groups are damaged. The error message begins with `where`."""
        try:
            bits, groups, images = base64.b64decode(self.right), self.group_numbers, int(self.starts[-1])
        except (binascii.Error, zlib.error, ValueError):
            bits, groups, images = b"", np.array([]), -1
        if len(bits) != -(-images // 8) or len(groups) != images or (images and groups.min() < 0):
            raise UserError(f"{where} is damaged: its bits and groups do not fit its numbers of images.")


def numbered(groups: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """Return the groups of all images, numbered from 0 in the order of their first images.

    Args:
        groups: For each domain, the group of each image, or None if each image is its own group.
        sizes: The number of images of each domain.

    Returns:
        The number of the group of each image, int64 (n,).
    """
    free = 1 + max((int(one.max(initial=0)) for one in groups if one is not None), default=0)
    parts = []
    for own, size in zip(groups, sizes, strict=True):
        parts.append(np.arange(free, free + size) if own is None else own)
        free += size
    whole = np.concatenate([np.array([], np.int64), *parts])
    _, first, place = np.unique(whole, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[place]


@lru_cache(maxsize=8)
def _decoded(groups: str) -> np.ndarray:
    steps = np.frombuffer(zlib.decompress(base64.b64decode(groups)), "<i4")
    found = np.cumsum(steps, dtype=np.int64)
    found.flags.writeable = False
    return found


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
