"""What frozen functions make of images, computed once: mapped files that all trials of a node share.

A block below the lowest one that is trained gives the same tokens for an image in every step, round and trial, as
long as nothing before it changes. Rows are kept for single images, as they are asked for, under a key of everything
that decides them. They lie in files and are read through memory maps: what is used stays in the system's page cache,
takes no memory from the process, and is given up first when memory is short.

The bits do not depend on whether a row was kept. On a CPU a kernel's row does not depend on the other rows, nor on its
place among them, as long as it is not in a remainder that a kernel treats apart: so batches are padded to multiples of
`GROUP`, kept or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsweep.paths import activation_bytes, activation_folder
from fedsweep.types import AdapterState, ImageSet

GROUP = 16
"""A frozen function is given multiples of so many images."""
PAGE, SUFFIX = 4096, ".rows"
LOOKS = 64
"""A process looks at the folder again after it has written this part of the limit."""


@dataclass(frozen=True)
class FrozenFunction:
    """A function of uint8 images (n, 3, h, w) to rows (n, ...), and the content that decides it."""

    key: str
    compute: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Its rows, without a gradient; images are padded with copies of the first."""
        lacking = -len(images) % GROUP
        with torch.no_grad():
            if not lacking:
                return self.compute(images)
            padding = images[:1].expand(lacking, *images.shape[1:])
            return self.compute(torch.cat([images, padding]))[: len(images)]


@dataclass
class FrozenRows:
    """Rows of frozen functions, kept by image. `sources` names the content of each tensor of images, by its address."""

    sources: Mapping[int, str] = field(default_factory=dict)
    folder: Path | None = None
    limit: int = 0
    _files: dict[str, _Rows] = field(default_factory=dict)
    _room: int = 0

    @classmethod
    def of(cls, sources: Mapping[int, str]) -> FrozenRows:
        """As the environment says where, and how much; without a folder that can be written, nothing is kept."""
        folder, limit = activation_folder(), activation_bytes()
        try:
            if limit:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            limit = 0
        return cls(sources, folder if limit else None, limit)

    def rows(self, function: FrozenFunction, images: ImageSet, index: Tensor) -> Tensor:
        """The function's rows for the examples at `index` (k,): (k, ...), on the CPU where rows are kept."""
        places = images.places(index)
        if self.folder is None or any(part.data_ptr() not in self.sources for part, _, _ in places):
            return function(images.take(index)[0])
        keys = [self._key(function, part) for part, _, _ in places]
        known = [self._known(key, part, own) for key, (part, _, own) in zip(keys, places, strict=True)]
        missing = [part.index_select(0, own[~there]) for there, (part, _, own) in zip(known, places, strict=True)]
        found = function(torch.cat(missing)).cpu() if sum(map(len, missing)) else None
        pieces = torch.split(found, list(map(len, missing))) if found is not None else [None] * len(places)
        out: Tensor | None = None
        for key, there, (part, here, own), fresh in zip(keys, known, places, pieces, strict=True):
            if fresh is not None and len(fresh):
                self._keep(key, len(part), own[~there], fresh)
                out = fresh.new_empty((len(index), *fresh.shape[1:])) if out is None else out
                out[here[~there]] = fresh
            if there.any():
                read = self._files[key].read(own[there])
                out = read.new_empty((len(index), *read.shape[1:])) if out is None else out
                out[here[there]] = read
        if out is None:
            raise ValueError("rows of no images were asked for")
        return out

    def all(self, function: FrozenFunction, images: ImageSet, size: int) -> Tensor:
        """The rows of all examples, computed `size` at a time."""
        return torch.cat(
            [self.rows(function, images, index).cpu() for index in torch.split(torch.arange(len(images)), size)]
        )

    def _key(self, function: FrozenFunction, part: Tensor) -> str:
        content = f"{function.key}\0{self.sources[part.data_ptr()]}\0{_boot()}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _known(self, key: str, part: Tensor, rows: Tensor) -> Tensor:
        """Which of these rows are there."""
        if key not in self._files:
            with contextlib.suppress(OSError):
                if (found := _Rows.find(self._place() / key, len(part))) is not None:
                    self._files[key] = found
        if key not in self._files:
            return torch.zeros(len(rows), dtype=torch.bool)
        return torch.from_numpy(self._files[key].filled[rows.numpy()] == 1)

    def _keep(self, key: str, count: int, rows: Tensor, values: Tensor) -> None:
        """Keep rows, if there is room; a folder that cannot be written keeps none."""
        with contextlib.suppress(OSError):
            if not self._may_grow(values.nbytes):
                return
            if key not in self._files:
                self._files[key] = _Rows.like(self._place() / key, count, values)
            self._files[key].write(rows, values)

    def _place(self) -> Path:
        if self.folder is None:
            raise RuntimeError("nothing is kept without a folder")
        return self.folder

    def _may_grow(self, size: int) -> bool:
        """Whether so many bytes more fit; rows that this process does not use make room, the longest unused first.

        Other processes write there too: after every `LOOKS`-th of the limit the folder is looked at again.
        """
        if size > self._room:
            left = self.limit - self._swept(size)
            if size > left:
                return False
            self._room = max(size, min(left, self.limit // LOOKS))
        self._room -= size
        return True

    def _swept(self, size: int) -> int:
        """Bytes in the folder, after files have gone that stood in the way."""
        own = {rows.path for rows in self._files.values()}
        found = [(path, status) for path in self._place().glob(f"*{SUFFIX}") if (status := _status(path))]
        used = sum(status.st_blocks * 512 for _, status in found)
        for path, status in sorted(found, key=lambda one: one[1].st_mtime):
            if used + size <= self.limit:
                break
            if path not in own:
                used -= status.st_blocks * 512
                path.unlink(missing_ok=True)
        return used


def _status(path: Path) -> os.stat_result | None:
    """What is known of a file, unless another process has just removed it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


class _Rows:
    """One function's rows for one tensor of images: a sparse file of flags, one for each row that is there, and rows.

    Both are mapped from the file as it was when it was opened; where it was removed since, they go with this process.
    """

    def __init__(self, path: Path, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self.width = path, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.start = -(-count // PAGE) * PAGE
        with path.open("ab") as file:
            file.truncate(self.start + count * self.width)  # it is so long already where another process was first
        os.utime(path)
        with path.open("rb") as file:
            self.filled = np.memmap(file, np.uint8, "r", shape=(count,))
            self.rows = np.memmap(file, dtype, "r", offset=self.start, shape=(count, *shape))

    @classmethod
    def like(cls, path: Path, count: int, values: Tensor) -> _Rows:
        """A file for rows such as these, whose shape stands in its name."""
        dtype, shape = values.numpy().dtype, tuple(values.shape[1:])
        return cls(path.with_name(f"{path.name}.{dtype.name}.{'x'.join(map(str, shape))}{SUFFIX}"), count, dtype, shape)

    @classmethod
    def find(cls, path: Path, count: int) -> _Rows | None:
        """The file that another process, or an earlier run, has left."""
        for found in path.parent.glob(f"{path.name}.*{SUFFIX}"):
            _, dtype, shape, _ = found.name.split(".")
            return cls(found, count, np.dtype(dtype), tuple(map(int, shape.split("x"))))
        return None

    def read(self, rows: Tensor) -> Tensor:
        """A copy of these rows."""
        return torch.from_numpy(np.asarray(self.rows[rows.numpy()]))

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Keep these rows; where the disk is full, fewer."""
        content = values.contiguous().numpy()
        with contextlib.suppress(OSError), self.path.open("r+b", 0) as file:
            for place, row in enumerate(rows.tolist()):
                os.pwrite(file.fileno(), content[place].tobytes(), self.start + row * self.width)
                os.pwrite(file.fileno(), b"\1", row)


@cache
def _boot() -> str:
    """This start of the machine: after a crash of it, a row may be said to be there that was never written."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def digest_of(identity: str, state: AdapterState, device: torch.device) -> str:
    """A key of the frozen part of a model: what it was built from, the tensors that a run has trained of it, and what
    decides the last bits of arithmetic."""
    found = hashlib.sha256(f"{identity}\0{device.type}\0{torch.__version__}\0{torch.get_num_threads()}".encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()
