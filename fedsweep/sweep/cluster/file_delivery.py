"""Delivery of prepared data and weights that a node of a cluster lacks, in pieces from the driver's files.

A node gets them once, whatever the number of its workers: the first takes a lock, and others find the files there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock

from fedsweep.common.errors import UserError
from fedsweep.common.paths import data_folder, resolve
from fedsweep.data.data_config import PreparedData, load
from fedsweep.data.prepared.arrow_files import PIECE, stored_digest
from fedsweep.data.prepared.card import CARD, is_store, read_card, store_folder
from fedsweep.data.synthetic import Diffusers, Folder
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import checkpoint_folder, weights_file

AHEAD = 2
"""Pieces that are on their way while one is written."""


@dataclass(frozen=True)
class Item:
    """A prepared data set, or a file of weights: one place below the data folder, filled as a whole or not at all."""

    place: str
    files: tuple[tuple[str, int], ...]
    """Path below the data folder, and size in bytes, of each file."""
    source: str
    """The driver's folder to which the paths are relative."""
    sha256: str
    """Of a prepared set's content, as its card has it; of a file."""
    is_set: bool

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self.files)

    def is_there(self) -> bool:
        """Return whether this machine has something in its place; the digests of a run check its content."""
        return is_store(data_folder() / self.place) if self.is_set else resolve(self.place).exists()

    def check(self, root: Path) -> None:
        """Raise UserError if the content that arrived below `root` is not what was sent."""
        path = root / self.place
        found = stored_digest(path, read_card(path)) if self.is_set else weights_file.digest(path)
        if found != self.sha256:
            sent = f"it has the digest {found[:12]}, but was sent as {self.sha256[:12]}"
            raise UserError(f"{self.place} arrived damaged: {sent}.")


def items_of(config: RunConfig) -> Iterator[Item]:
    """Yield the files of a run that can be sent: prepared sets, and weights under a relative name.

    Files in the hub's cache, and files named by an absolute path, are not sent; each machine must have them itself.
    """
    if isinstance(config.data, PreparedData):
        yield _set(config.data.set, config.data.size)
        if config.trains_on_synthetic and isinstance(config.synthetic, Folder):
            yield _set(config.synthetic.set, config.data.size)
        if config.trains_on_synthetic and isinstance(config.synthetic, Diffusers):
            yield _set(config.synthetic.set_name(load(config.data)), config.data.size)
    for text in dict.fromkeys(_strings(config.model_dump(mode="json"))):
        name = str(Path(text))
        if not name.startswith(("/", "~")) and ".." not in Path(name).parts:
            with contextlib.suppress(OSError):  # too long for a name
                yield from _weights(name, resolve(name))


def _set(name: str, size: int) -> Item:
    folder = store_folder(name, size)
    card = read_card(folder)
    names = [CARD, *(f"{domain}.arrow" for domain in card.domains)]
    files = tuple((f"{folder.name}/{one}", (folder / one).stat().st_size) for one in names)
    return Item(folder.name, files, str(folder.parent), card.digest, is_set=True)


def _weights(name: str, path: Path) -> Iterator[Item]:
    """Yield a weights file and its card, or the files of a folder that are read."""
    source = str(path).removesuffix(name)
    if path.is_file() and path.suffix in weights_file.SUFFIXES:
        wanted = [(name, path), (str(Path(name).with_suffix(".json")), path.with_suffix(".json"))]
    elif path.is_dir() and any((path / one).is_file() for one in checkpoint_folder.WEIGHTS):
        parts = (checkpoint_folder.CONFIG, checkpoint_folder.PREPROCESSOR, *checkpoint_folder.TOKENS)
        wanted = [(f"{name}/{one}", path / one) for one in (*parts, *checkpoint_folder.WEIGHTS, "model.json")]
    else:
        return
    for place, one in wanted:
        if one.is_file():
            yield Item(place, ((place, one.stat().st_size),), source, weights_file.digest(one), is_set=False)


def _strings(node: Any) -> Iterator[str]:
    match node:
        case str():
            yield node
        case dict():
            yield from _strings([*node.values()])
        case list():
            for value in node:
                yield from _strings(value)


class Library:
    """The driver's files, as an actor on its node that hands out pieces of those it was made for."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._paths = {place: Path(item.source) / place for item in items for place, _ in item.files}
        self._sent, self._counting = 0, Lock()

    def piece(self, place: str, offset: int) -> bytes:
        """At most PIECE bytes of a file from an offset on."""
        with self._paths[place].open("rb") as file:
            file.seek(offset)
            content = file.read(PIECE)
        with self._counting:
            self._sent += len(content)
        return content

    def sent(self) -> int:
        """Bytes handed out so far."""
        return self._sent


def fetch(items: Iterable[Item], library: Any) -> None:
    """Put the items that this machine lacks into its data folder; one process at a time, each item whole or not at all.

    Raises:
        UserError: An item arrived damaged.
        OSError: The folder cannot be written, or the disk is full.
    """
    root = data_folder()
    arriving = root / ".arriving"
    arriving.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".arriving.lock"):
        for item in items:
            if item.is_there():  # another worker of this node was first
                continue
            for place, size in item.files:
                _receive(arriving / place, place, size, library)
            item.check(arriving)
            target = root / item.place
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(arriving / item.place, target)
        shutil.rmtree(arriving, ignore_errors=True)


def _receive(path: Path, place: str, size: int, library: Any) -> None:
    """Write a file piece by piece, while the next pieces are on their way."""
    import ray

    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = iter(range(0, size, PIECE))
    coming = deque(library.piece.remote(place, offset) for offset in islice(offsets, AHEAD))
    with path.open("wb") as file:
        while coming:
            file.write(ray.get(coming.popleft()))
            if (offset := next(offsets, None)) is not None:
                coming.append(library.piece.remote(place, offset))
        file.flush()
        os.fsync(file.fileno())
