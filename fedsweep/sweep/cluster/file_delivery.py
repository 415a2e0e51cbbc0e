"""Delivery of prepared data sets and weights to the nodes of a cluster. Each node receives each file once."""

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
from fedsweep.data.prepared.arrow_files import PIECE, stored_digest
from fedsweep.data.prepared.card import CARD, is_store, read_card
from fedsweep.federation.build_and_run import prepared_folders
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import checkpoint_folder, weights_file

AHEAD = 2
"""Number of pieces that are requested in advance."""


@dataclass(frozen=True)
class Item:
    """A prepared data set or a weights file, which a node receives completely or not at all."""

    place: str
    """The item's path under the data folder."""
    files: tuple[tuple[str, int], ...]
    """The path (under the data folder) and the size in bytes of each file."""
    source: str
    """The driver's folder to which the paths are relative."""
    sha256: str
    """The digest of a weights file, or the digest of a data set's contents from its card."""
    is_set: bool

    @property
    def bytes(self) -> int:
        """The total size of the item's files in bytes."""
        return sum(size for _, size in self.files)

    def is_there(self) -> bool:
        """Return whether the item's path exists on this machine.

        The contents are not checked by this method, but later, by a comparison of digests.
        """
        return is_store(data_folder() / self.place) if self.is_set else resolve(self.place).exists()

    def check(self, root: Path) -> None:
        """Raise UserError unless the copy of the item under the folder `root` has the item's SHA-256 digest."""
        path = root / self.place
        found = stored_digest(path, read_card(path)) if self.is_set else weights_file.digest(path)
        if found != self.sha256:
            sent = f"its digest is {found[:12]}, but the driver sent {self.sha256[:12]}"
            raise UserError(f"{self.place} arrived damaged: {sent}.")


def items_of(config: RunConfig) -> Iterator[Item]:
    """Yield the files of a run that can be sent to nodes: prepared data sets, and weights with a relative path."""
    yield from map(_set, prepared_folders(config))
    for text in dict.fromkeys(_strings(config.model_dump(mode="json"))):
        name = str(Path(text))
        if not name.startswith(("/", "~")) and ".." not in Path(name).parts:
            with contextlib.suppress(OSError):  # the text is too long for a file name
                yield from _weights(name, resolve(name))


def _set(folder: Path) -> Item:
    card = read_card(folder)
    names = [CARD, *(f"{domain}.arrow" for domain in card.domains)]
    files = tuple((f"{folder.name}/{one}", (folder / one).stat().st_size) for one in names)
    return Item(folder.name, files, str(folder.parent), card.digest, is_set=True)


def _weights(name: str, path: Path) -> Iterator[Item]:
    """Yield the items at a path: a weights file and its JSON file, or the files of a checkpoint folder.

    If `path` is a checkpoint folder, only the files that a run reads are yielded. If `path` is neither a weights file
    nor a checkpoint folder, nothing is yielded.
    """
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
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _strings(inner)


class Library:
    """The Ray actor that sends files to the nodes in pieces.

    It runs on the node of the driver, which is the process that runs the sweep.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._paths = {place: Path(item.source) / place for item in items for place, _ in item.files}
        self._sent, self._counting = 0, Lock()

    def piece(self, place: str, offset: int) -> bytes:
        """Return at most `PIECE` bytes (32 MiB) of a file, starting at position `offset`.

        `place` is the path of the file under the data folder.
        """
        with self._paths[place].open("rb") as file:
            file.seek(offset)
            content = file.read(PIECE)
        with self._counting:
            self._sent += len(content)
        return content

    def sent(self) -> int:
        """Return the number of bytes sent so far."""
        return self._sent


def fetch(items: Iterable[Item], library: Any) -> None:
    """Download from the actor `library` the items that are missing on this machine.

    Only one process per machine downloads at a time. The other processes wait for it.

    Raises:
        UserError: An item arrived damaged.
    """
    root = data_folder()
    arriving = root / ".arriving"
    arriving.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".arriving.lock"):
        for item in items:
            if item.is_there():  # another worker of this node has downloaded it
                continue
            for place, size in item.files:
                _receive(arriving / place, place, size, library)
            item.check(arriving)
            target = root / item.place
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(arriving / item.place, target)
        shutil.rmtree(arriving, ignore_errors=True)


def _receive(path: Path, place: str, size: int, library: Any) -> None:
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
