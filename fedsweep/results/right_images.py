"""The file of a trial with the test images whose class the global model predicts correctly after the last round.

The file is JSON with base64. It contains one bit per test image and the group of each image, because a report is made
without the data set. The file has about 1 kB for 2,154 images in six styles, and about 30 kB for 176,000 images. Each
trial has its own copy of the groups: compressed, they are usually shorter than the bits, and a trial that is copied to
another sweep, or whose sweep is resumed on another machine, needs no second file.

If the metric accuracy/last_rounds averages the accuracy over several rounds, the file also contains the bits of the
earlier ones of these rounds. They are stored as changes from round to round, which are rare and compress well. If these
rounds tested only a sample of the images, the file says which ones.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

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
    earlier: tuple[str, ...] | None = Field(
        None,
        description="the bits of the earlier rounds that accuracy/last_rounds averages, oldest first: for each round, "
        "the bits that differ from those of the next averaged round, compressed by zlib, in base64; None if the run "
        "has no such metric",
    )
    sample: str | None = Field(
        None,
        description="one bit per image, 1 if the earlier rounds tested it, compressed by zlib, in base64; the other "
        "images have the bits of the last round in `earlier`; None if the earlier rounds tested all images",
    )

    @classmethod
    def of_domains(
        cls,
        data: str,
        right: Mapping[str, np.ndarray],
        held_out: Collection[str],
        groups: Sequence[np.ndarray | None],
        earlier: Sequence[np.ndarray] | None = None,
        in_sample: Sequence[np.ndarray] | None = None,
    ) -> RightImages:
        """Return the record of a trial.

        Args:
            data: The digest of the data set.
            right: For each domain, whether the class of each test image is predicted correctly, bool (n,).
            held_out: The names of the held-out domains.
            groups: For each domain, the group of each image, int64 (n,), or None if each image is its own group.
            earlier: For each earlier round that accuracy/last_rounds averages, oldest first, the `packed_bits` of its
                tested images, or None if they are not known.
            in_sample: For each domain, which images the earlier rounds tested, bool (n,), or None if they tested all.
        """
        domains = [TestedDomain(name=name, images=len(one), held_out=name in held_out) for name, one in right.items()]
        bits = packed_bits(right.values())
        steps = np.diff(numbered(groups, [len(one) for one in right.values()]), prepend=0).astype("<i4")
        tested = None if in_sample is None or not earlier else np.concatenate(in_sample)
        if earlier is not None and tested is not None:
            earlier = [_filled_up(one, tested, bits) for one in earlier]
        return cls(
            data=data,
            domains=tuple(domains),
            right=_base64(bits.tobytes()),
            groups=_compressed(steps),
            earlier=None if earlier is None else _changes([*earlier, bits]),
            sample=None if tested is None else _compressed(np.packbits(tested)),
        )

    def content(self) -> bytes:
        """Return the content of the file. It does not contain `earlier` and `sample` if they are None."""
        return self.model_dump_json(indent=2, exclude_none=True).encode()

    @property
    def starts(self) -> np.ndarray:
        """The position of the first image of each domain, then the number of all images, int64 (domains + 1,)."""
        return np.cumsum([0, *(one.images for one in self.domains)])

    def of_domain(self, place: int) -> np.ndarray:
        """Return for each image of the domain at `place` whether its class is predicted correctly, bool (n,)."""
        bits = np.unpackbits(self._last)
        return bits[self.starts[place] : self.starts[place + 1]].view(bool)

    def values_of_rounds(self) -> np.ndarray:
        """Return for each image a value whose mean over a domain is the accuracy, averaged over several rounds.

        The rounds are the last round and the rounds in `earlier`. If they tested all images, the value is the share of
        these rounds in which the class of the image is predicted correctly.

        If a round tested n of the N images of a domain, with the accuracy a, an image that it did not test counts as a
        in this round. A tested image counts as a + (1 - a) N / n or, if the prediction is wrong, as a - a N / n. The
        mean of these values over all N images is a, and their spread over images gives the variance of a.

        Returns:
            The values of the images of all domains, float64 (n,).
        """
        packed, images, changes, tested = self._last, int(self.starts[-1]), self.earlier or (), self.in_sample
        values = np.unpackbits(packed, count=images).astype(np.float64)
        for change in reversed(changes):
            packed = packed ^ _decompressed(change)
            right = np.unpackbits(packed, count=images)
            values += right if tested is None else self._of_all_images(right, tested)
        return values / (len(changes) + 1)

    def _of_all_images(self, right: np.ndarray, tested: np.ndarray) -> np.ndarray:
        """Return the values of all images in a round that tested only some of them (`tested`)."""
        values = np.empty(len(right))
        for start, end in pairwise(self.starts):
            if start < end:
                chosen = tested[start:end]
                mean = right[start:end][chosen].mean()
                scale = (end - start) / chosen.sum()
                values[start:end] = mean + np.where(chosen, scale * (right[start:end] - mean), 0.0)
        return values

    @property
    def _last(self) -> np.ndarray:
        """The packed bits of the last round, uint8 (bytes,)."""
        return np.frombuffer(base64.b64decode(self.right), np.uint8)

    @property
    def in_sample(self) -> np.ndarray | None:
        """A mask of the images that the earlier averaged rounds tested, bool (n,); None if they tested all images."""
        images = int(self.starts[-1])
        return None if self.sample is None else np.unpackbits(_decompressed(self.sample), count=images).view(bool)

    @property
    def group_numbers(self) -> np.ndarray:
        """The group of each image, from 0, int64 (n,). Trials that store the same groups share one array."""
        return _decoded(self.groups)

    def check(self, where: str) -> None:
        """Raise UserError if the bits or the groups are damaged. The error message begins with `where`."""
        try:
            rounds = [self._last, *map(_decompressed, self.earlier or ())]
            sample = [] if self.sample is None else [_decompressed(self.sample)]
            groups, images = self.group_numbers, int(self.starts[-1])
        except (binascii.Error, zlib.error, ValueError):
            rounds, sample, groups, images = [], [], np.array([]), -1
        sizes = {len(bits) for bits in (*rounds, *sample)}
        wrong = sizes != {-(-images // 8)} or len(groups) != images or (images and groups.min() < 0)
        if wrong or not self._sample_fits():
            raise UserError(f"{where} is damaged: its bits and groups do not fit its numbers of images.")

    def _sample_fits(self) -> bool:
        tested = self.in_sample
        if tested is None or not self.earlier:
            return tested is None
        return all(part.any() for part in np.split(tested, self.starts[1:-1]) if len(part))


def _filled_up(packed: np.ndarray, tested: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return packed bits of all images: those of the tested ones in `packed`, and the bits of `last` for the others."""
    bits = np.unpackbits(last, count=len(tested))
    bits[tested] = np.unpackbits(packed, count=int(tested.sum()))
    return np.packbits(bits)


def packed_bits(right: Iterable[np.ndarray]) -> np.ndarray:
    """Return the bits of all images, eight in a byte, uint8 (bytes,).

    Args:
        right: For each domain, whether the class of each test image is predicted correctly, bool (n,).
    """
    return np.packbits(np.concatenate([np.array([], bool), *right]))


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
    found = np.cumsum(_decompressed(groups).view("<i4"), dtype=np.int64)
    found.flags.writeable = False
    return found


def _changes(rounds: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Return the compressed differences between the packed bits of successive rounds."""
    return tuple(_compressed(one ^ after) for one, after in pairwise(rounds))


def _compressed(numbers: np.ndarray) -> str:
    return _base64(zlib.compress(numbers.tobytes(), 9))


def _decompressed(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
