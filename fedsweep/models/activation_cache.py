"""The activation cache: outputs of frozen blocks, computed once per image and shared by all trials on a node.

The blocks below the lowest trained block return the same output for an image in every step, round and trial. The output
for one image is called a row. Rows are stored in files whose names are hashes of everything that determines the rows. A
process reads only the rows of the current batch and does not keep them in memory. The operating system keeps recently
read rows in its page cache as long as memory is available.
"""

import contextlib
import hashlib
import math
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.paths import activation_bytes, activation_folder
from fedsweep.types import AdapterState, ImageSet

GROUP = 16
"""The number of images in a group: frozen functions are called with whole groups only.

Rows are therefore bit-identical, no matter which of them are cached. A CPU kernel computes each row independently of
the others, except in the remainder of a batch, which it processes differently.
"""
PAGE, SUFFIX = 4096, ".rows"
PACKAGES = ("torch", "timm", "transformers", "peft", "numpy")
LOOKS = 64
"""After every `limit` / LOOKS bytes that a process writes, it measures the size of the folder again, because other
processes write to the folder too."""


@dataclass(frozen=True)
class FrozenFunction:
    """A frozen part of a model, which maps n uint8 images (n, 3, h, w) to n outputs (n, ...).

    `key` identifies the function in the activation cache. Functions with the same key return the same outputs.
    """

    key: str
    compute: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Return the outputs (n, ...) for n images, without gradients.

        The batch is padded with copies of its first image to a multiple of `GROUP` images, so that the rounding of an
        output does not depend on the size of the batch.
        """
        padding = images[:1].expand(-len(images) % GROUP, *images.shape[1:])
        with torch.no_grad():
            outputs = self.compute(torch.cat([images, padding]) if len(padding) else images)[: len(images)]
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs  # NumPy has no bfloat16


@dataclass
class FrozenRows:
    """The activation cache of one process, in a folder that several processes share.

    The cache stores outputs of frozen blocks; the output for one image is called a row.

    Attributes:
        sources: A dict from the memory address of an image tensor to an identifier of the tensor's content. Outputs for
            images in other tensors are not cached.
        folder: The folder of the cache; if None, nothing is cached.
        limit: The maximum size of the folder in bytes.
    """

    sources: Mapping[int, str] = field(default_factory=dict)
    folder: Path | None = None
    limit: int = 0
    _files: dict[Path, "_Rows"] = field(default_factory=dict)
    _round: int = 0
    _room: int = 0

    @classmethod
    def of(cls, sources: Mapping[int, str]) -> Self:
        """Return a cache that is configured by environment variables.

        FEDSWEEP_CACHE sets the folder, and FEDSWEEP_CACHE_GB sets its maximum size in gigabytes. If the folder cannot
        be created or the size is 0, the returned cache stores nothing. `sources` maps the memory address of each image
        tensor to an identifier of the tensor's content.
        """
        folder, limit = activation_folder(), activation_bytes()
        with contextlib.suppress(OSError):
            if limit:
                folder.mkdir(parents=True, exist_ok=True)
                return cls(sources, folder, limit)
        return cls(sources)

    def rows(self, function: FrozenFunction, images: ImageSet, index: Tensor) -> Tensor:
        """Return the outputs (k, ...) of `function` for the k images at `index`, from the cache if possible.

        New outputs are added to the cache. The result is on the CPU if the cache can store outputs for `images`, and
        otherwise on the model's device.
        """
        places = images.places(index)
        if self.folder is None or any(part.data_ptr() not in self.sources for part, _, _ in places):
            return function(images.take(index)[0])
        if not len(index):
            raise ValueError("`index` must select at least one image, but it is empty")
        found: list[tuple[Tensor, Tensor]] = []  # positions in `index`, and their rows
        missing: list[tuple[Path, Tensor, Tensor, Tensor]] = []
        for part, here, own in places:
            place = self.folder / self._key(function, part)
            there, values = self._kept(place, len(part), own)
            found.append((here[there], values))
            missing.append((place, part, here[~there], own[~there]))
        counts = [len(own) for _, _, _, own in missing]
        if any(counts):
            fresh = function(torch.cat([part.index_select(0, own) for _, part, _, own in missing])).cpu()
            for (place, part, here, own), values in zip(missing, torch.split(fresh, counts), strict=True):
                self._keep(place, len(part), own, values)
                found.append((here, values))
        found = [(here, values) for here, values in found if len(here)]
        out = found[0][1].new_empty((len(index), *found[0][1].shape[1:]))
        for here, values in found:
            out[here] = values
        return out

    def next_round(self) -> None:
        """Start a new round, and close the cache files that the previous round did not use.

        Closed files may be removed when the cache is full.
        """
        self._round += 1
        self._files = {place: rows for place, rows in self._files.items() if rows.used >= self._round - 1}

    def all(self, function: FrozenFunction, images: ImageSet, size: int) -> Tensor:
        """Return the outputs (n, ...) of `function` for all n images, on the CPU.

        Outputs are read from the cache or computed in batches of `size` images.
        """
        indices = torch.split(torch.arange(len(images)), size)
        return torch.cat([self.rows(function, images, index).cpu() for index in indices])

    def _key(self, function: FrozenFunction, part: Tensor) -> str:
        content = f"{function.key}\0{self.sources[part.data_ptr()]}\0{tuple(part.shape)}\0{_boot()}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _kept(self, place: Path, count: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read the cached outputs for some images of an image tensor from a cache file.

        Args:
            place: The path of the cache file without its suffixes.
            count: The number of images in the image tensor.
            rows: The indices of the requested images in the image tensor.

        Returns:
            A boolean mask that is true for each requested image whose output is cached, and the cached outputs. If the
            file does not exist or cannot be read, the mask is false for all images.
        """
        with contextlib.suppress(OSError):
            if place not in self._files and (paths := list(place.parent.glob(f"{place.name}.*{SUFFIX}"))):
                self._files[place] = _Rows(paths[0], count)
            if place in self._files:
                self._files[place].used = self._round
                there = self._files[place].there(rows)
                return there, self._files[place].read(rows[there])
        return torch.zeros(len(rows), dtype=torch.bool), torch.empty(0)

    def _keep(self, place: Path, count: int, rows: Tensor, values: Tensor) -> None:
        """Write the outputs for some images of an image tensor to a cache file.

        Nothing is written if the cache would exceed its size limit. Errors of the operating system are ignored, because
        the cache only saves time.

        Args:
            place: The path of the cache file without its suffixes.
            count: The number of images in the image tensor.
            rows: The indices of the images in the image tensor.
            values: The outputs for these images, in the same order.
        """
        with contextlib.suppress(OSError):
            if not self._may_grow(place.parent, values.nbytes):
                return
            if place not in self._files:
                sizes = "x".join(map(str, values.shape[1:])) or "scalar"
                name = f"{place.name}.{values.numpy().dtype.name}.{sizes}{SUFFIX}"
                self._files[place] = _Rows(place.with_name(name), count)
                self._files[place].used = self._round
            self._files[place].write(rows, values)

    def _may_grow(self, folder: Path, size: int) -> bool:
        """Return whether the cache can grow by `size` bytes without exceeding its size limit.

        If necessary, first remove cache files that this process does not use, starting with the least recently modified
        file.
        """
        if size > self._room:
            left = self.limit - self._swept(folder, size)
            if size > left:
                return False
            self._room = max(size, min(left, self.limit // LOOKS))
        self._room -= size
        return True

    def _swept(self, folder: Path, size: int) -> int:
        own = {rows.path for rows in self._files.values()}
        found: list[tuple[float, int, Path]] = []
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may just have removed it
                status = path.stat()
                found.append((status.st_mtime, status.st_blocks * 512, path))
        used = sum(taken for _, taken, _ in found)
        for _, taken, path in sorted(found):
            if used + size <= self.limit:
                break
            if path not in own:
                used -= taken
                path.unlink(missing_ok=True)
        return used


class _Rows:
    """The cached outputs of one frozen function for one tensor of images, in a sparse file.

    The output for one image is called a row. The file starts with one byte for each image, which is 1 if the image's
    row is cached. The rows follow. The name of the file is `<key>.<dtype>.<shape of a row>.rows`. The file stays open,
    so that this process can still use it after another process has removed it.
    """

    used: int  # the last round in which a row was read or written

    def __init__(self, path: Path, count: int) -> None:
        _, dtype, sizes, _ = path.name.split(".")
        self.path, self.count, self.dtype = path, count, np.dtype(dtype)
        self.shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
        self.width = math.prod(self.shape) * self.dtype.itemsize
        self.start = -(-count // PAGE) * PAGE
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.start + count * self.width)  # no change if another process created the file
        os.utime(path)

    def there(self, rows: Tensor) -> Tensor:
        flags = np.frombuffer(os.pread(self.file, self.count, 0), np.uint8)
        if len(flags) < self.count:
            raise OSError(f"{self.path} is truncated")
        return torch.from_numpy(flags[rows.numpy()] == 1)

    def read(self, rows: Tensor) -> Tensor:
        found = np.empty((len(rows), *self.shape), self.dtype)
        for place, row in enumerate(rows.tolist()):
            content = os.pread(self.file, self.width, self.start + row * self.width)
            if len(content) < self.width:
                raise OSError(f"{self.path} is truncated")
            found[place] = np.frombuffer(content, self.dtype).reshape(self.shape)
        return torch.from_numpy(found)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Write the outputs `values` for the images at the indices `rows` of the image tensor.

        If the disk becomes full, the remaining outputs are not written.

        Raises:
            OSError: The file cannot be written.
        """
        content = values.contiguous().numpy()
        for place, row in enumerate(rows.tolist()):
            if os.pwrite(self.file, content[place].tobytes(), self.start + row * self.width) < self.width:
                return
            os.pwrite(self.file, b"\1", row)


@cache
def _boot() -> str:
    """Return the id of the machine's current boot, or an empty string on systems without such an id.

    The id is part of every cache key, because a machine crash can leave rows that are marked as cached although their
    values never reached the disk.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


@cache
def _code() -> str:
    """Return a digest of the package versions and the source code that determine a model's output."""
    here = Path(__file__).parent
    found = hashlib.sha256(" ".join(version(name) for name in PACKAGES).encode())
    for path in sorted(here.rglob("*.py")):
        found.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def digest_of(identity: str, state: AdapterState, device: torch.device) -> str:
    """Return a SHA-256 digest that identifies a frozen part of a model and serves as a cache key.

    Args:
        identity: A string that identifies the model and its pre-trained weights.
        state: Those tensors of the frozen part, such as adapters, whose values differ from the pre-trained weights.
            The tensors are keyed by name.
        device: The device of the model. The key also depends on the type of the device, the number of CPU threads and
            the source code, because they affect rounding.
    """
    found = hashlib.sha256(f"{identity}\0{device.type}\0{torch.get_num_threads()}\0{_code()}".encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def walk_key(identity: str, steps: tuple[object, ...], whole: bool, state: AdapterState, device: torch.device) -> str:
    """Return the key under which the cache stores the output of the first blocks of a forward pass.

    Args:
        identity: A string that identifies the model and its pre-trained weights.
        steps: The numbers of these first blocks in the model, in the order of the forward pass.
        whole: Whether `steps` contains all blocks of the forward pass. If so, a CLIP model also runs the layers after
            its last block.
        state: The trainable tensors on which the output depends, keyed by name.
        device: The device of the model, which affects rounding.
    """
    return digest_of(f"{identity}\0{steps}\0{whole}", state, device)
