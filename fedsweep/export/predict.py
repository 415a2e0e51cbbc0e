"""What an export says of the pictures in a folder, decoded and cut as those that it was tuned on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.export.card import ImageCard
from fedsweep.export.load import Loaded
from fedsweep.preparation.decode import CorruptImageError, Geometry, decode
from fedsweep.preparation.layouts.disk_listing import BROKEN, IMAGE_SUFFIXES, join, scan

BATCH = 64
Progress = Callable[[int, int], None]
"""Told how many pictures are done, and of how many."""


@dataclass(frozen=True)
class Guess:
    """A class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Predictions:
    """Of every picture of a folder, by its path within it, the most probable classes; or why it cannot be read."""

    images: dict[str, tuple[Guess, ...]]
    broken: dict[str, str]
    accuracy: float | None
    """Share of right answers, where every picture lies in a folder that is called as a class."""


def pictures(folder: Path) -> list[str]:
    """Paths of all pictures in a folder and those below it, sorted.

    Raises:
        UserError: it is not there, is no folder, cannot be read, or has none.
    """
    if not folder.is_dir():
        raise UserError(f"IMAGES must be a folder, but {folder} {'is a file' if folder.exists() else 'is not there'}.")
    found = sorted(_below(folder, "", frozenset()))
    if not found:
        raise UserError(f"{folder} has no image: none of its files ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return found


def _below(root: Path, name: str, above: frozenset[Path]) -> Iterator[str]:
    """Links to folders are followed, but not to one that leads here."""
    here = (root / name).resolve()
    if here in above:
        return
    seen = scan(root / name)
    yield from (join(name, one) for one in (*seen.images, *seen.broken))
    for one in seen.folders:
        yield from _below(root, join(name, one), above | {here})


def predict(
    model: Loaded, folder: Path, names: Sequence[str], top: int = 1, progress: Progress = lambda done, total: None
) -> Predictions:
    """Classify the pictures of these names; `top` classes of each, at most all."""
    images: dict[str, tuple[Guess, ...]] = {}
    broken: dict[str, str] = {}
    for start in range(0, len(names), BATCH):
        progress(start, len(names))
        pixels = {}
        for name in names[start : start + BATCH]:
            try:
                pixels[name] = _read(folder / name, model.card.images)
            except CorruptImageError as error:
                broken[name] = str(error)
        if pixels:
            logits = model.logits(torch.from_numpy(np.stack(list(pixels.values()))))
            images |= zip(pixels, _guesses(logits, model.card.classes, top), strict=True)
    progress(len(names), len(names))
    return Predictions(images, broken, _accuracy(images, model.card.classes))


def _read(path: Path, card: ImageCard) -> np.ndarray:
    """uint8 (3, size, size), as the preparation of the run's data makes it.

    Raises:
        CorruptImageError: it cannot be read or decoded.
    """
    if not path.is_file():
        raise CorruptImageError(BROKEN)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptImageError(error.strerror or "cannot be read") from None
    return decode(data, Geometry(card.size, card.crop_pct, card.crop_mode, card.interpolation))


def _guesses(logits: Tensor, classes: Sequence[str], top: int) -> list[tuple[Guess, ...]]:
    best = logits.double().softmax(1).topk(min(top, len(classes)), dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(Guess(classes[one], value) for one, value in zip(*pair, strict=True)) for pair in pairs]


def _accuracy(images: dict[str, tuple[Guess, ...]], classes: Sequence[str]) -> float | None:
    folders = {name: name.split("/")[-2] if "/" in name else None for name in images}
    if not images or not all(folder in classes for folder in folders.values()):
        return None
    return sum(guesses[0].name == folders[name] for name, guesses in images.items()) / len(images)
