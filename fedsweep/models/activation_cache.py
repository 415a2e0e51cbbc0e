"""What frozen functions make of images, computed once: in files that all trials of a node share.

A block below the lowest one that is trained gives the same tokens for an image in every step, round and trial, as
long as nothing before it changes. Rows are kept for single images, as they are asked for, under a key of everything
that decides them. They lie in files, of which the rows that are asked for are read: what is used stays in the system's
page cache, takes no memory from the process, and is given up first when memory is short.

The bits do not depend on whether a row was kept. On a CPU a kernel's row does not depend on the other rows, nor on its
place among them, as long as it is not in a remainder that a kernel treats apart: so batches are padded to multiples of
`GROUP`, kept or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.paths import activation_bytes, activation_folder
from fedsweep.types import AdapterState, ImageSet

GROUP = 16
"""A frozen function is given multiples of so many images."""
PAGE, SUFFIX = 4096, ".rows"
PACKAGES = ("torch", "timm", "transformers", "peft", "numpy")
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
    _used: dict[str, int] = field(default_factory=dict)
    _round: int = 0
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
        known = [self._known(key, len(part), own) for key, (part, _, own) in zip(keys, places, strict=True)]
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
                read = self._read(key, function, part, own[there])
                out = read.new_empty((len(index), *read.shape[1:])) if out is None else out
                out[here[there]] = read
        if out is None:
            raise ValueError("rows of no images were asked for")
        return out

    def next_round(self) -> None:
        """Rows that are not asked for in a whole round may make room for others."""
        self._round += 1
        for key in [key for key, last in self._used.items() if last < self._round - 1]:
            del self._used[key]
            self._files.pop(key, None)

    def all(self, function: FrozenFunction, images: ImageSet, size: int) -> Tensor:
        """The rows of all examples, computed `size` at a time."""
        return torch.cat(
            [self.rows(function, images, index).cpu() for index in torch.split(torch.arange(len(images)), size)]
        )

    def _key(self, function: FrozenFunction, part: Tensor) -> str:
        content = f"{function.key}\0{self.sources[part.data_ptr()]}\0{tuple(part.shape)}\0{_boot()}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _known(self, key: str, count: int, rows: Tensor) -> Tensor:
        """Which of these rows are there."""
        self._used[key] = self._round
        with contextlib.suppress(OSError):
            if key not in self._files and (found := _Rows.find(self._place() / key, count)) is not None:
                self._files[key] = found
            if key in self._files:
                return self._files[key].there(rows)
        return torch.zeros(len(rows), dtype=torch.bool)

    def _read(self, key: str, function: FrozenFunction, part: Tensor, rows: Tensor) -> Tensor:
        try:
            return self._files[key].read(rows)
        except OSError:
            return function(part.index_select(0, rows)).cpu()

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

    It is read and written through one descriptor: where the file was removed since, it goes with this process.
    """

    def __init__(self, path: Path, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self.count, self.dtype, self.shape = path, count, dtype, shape
        self.width = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.start = -(-count // PAGE) * PAGE
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.start + count * self.width)  # it is so long already where another was first
        os.utime(path)

    @classmethod
    def like(cls, path: Path, count: int, values: Tensor) -> _Rows:
        """A file for rows such as these, whose shape stands in its name."""
        dtype, shape = values.numpy().dtype, tuple(values.shape[1:])
        sizes = "x".join(map(str, shape)) or "scalar"
        return cls(path.with_name(f"{path.name}.{dtype.name}.{sizes}{SUFFIX}"), count, dtype, shape)

    @classmethod
    def find(cls, path: Path, count: int) -> _Rows | None:
        """The file that another process, or an earlier run, has left."""
        for found in path.parent.glob(f"{path.name}.*{SUFFIX}"):
            _, dtype, sizes, _ = found.name.split(".")
            shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
            return cls(found, count, np.dtype(dtype), shape)
        return None

    def there(self, rows: Tensor) -> Tensor:
        """Which of these rows are there."""
        flags = np.frombuffer(os.pread(self.file, self.count, 0), np.uint8)
        if len(flags) < self.count:  # it was cut short
            return torch.zeros(len(rows), dtype=torch.bool)
        return torch.from_numpy(flags[rows.numpy()] == 1)

    def read(self, rows: Tensor) -> Tensor:
        """A copy of these rows.

        Raises:
            OSError: one cannot be read.
        """
        found = np.empty((len(rows), *self.shape), self.dtype)
        for place, row in enumerate(rows.tolist()):
            content = os.pread(self.file, self.width, self.start + row * self.width)
            if len(content) < self.width:
                raise OSError(f"{self.path} is cut short")
            found[place] = np.frombuffer(content, self.dtype).reshape(self.shape)
        return torch.from_numpy(found)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Keep these rows; where the disk is full, fewer.

        Raises:
            OSError: one cannot be written.
        """
        content = values.contiguous().numpy()
        for place, row in enumerate(rows.tolist()):
            if os.pwrite(self.file, content[place].tobytes(), self.start + row * self.width) < self.width:
                return
            os.pwrite(self.file, b"\1", row)


@cache
def _boot() -> str:
    """This start of the machine: after a crash of it, a row may be said to be there that was never written."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


@cache
def _code() -> str:
    """The versions of the packages, and the source, that decide what a model computes."""
    here = Path(__file__).parent
    found = hashlib.sha256(" ".join(version(name) for name in PACKAGES).encode())
    for path in sorted(here.rglob("*.py")):
        found.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def digest_of(identity: str, state: AdapterState, device: torch.device) -> str:
    """A key of the frozen part of a model: what it was built from, the tensors that a run has trained of it, and what
    decides the last bits of arithmetic."""
    found = hashlib.sha256(f"{identity}\0{device.type}\0{torch.get_num_threads()}\0{_code()}".encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def walk_key(identity: str, steps: tuple[object, ...], whole: bool, state: AdapterState, device: torch.device) -> str:
    """The key of what leaves these steps of a model's walk; of a `whole` walk, what follows it too."""
    return digest_of(f"{identity}\0{steps}\0{whole}", state, device)
