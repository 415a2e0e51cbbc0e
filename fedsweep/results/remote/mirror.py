"""A local folder that mirrors remote objects.

Changes are detected by size and modification time. The contents of files are not compared. Modification times may
be rounded to seconds. This does no harm: only checkpoints are rewritten within a second, and each new checkpoint is
larger than the previous one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsweep.common.files import write_atomically
from fedsweep.common.paths import inside
from fedsweep.results.remote.objects import put, remove

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

STATE = ".mirror.json"
SCRATCH = "ray"  # folder of Ray's own files, which is not mirrored
LAST = ("checkpoint.safetensors", "gpus.json", "trial.json", "sweep.json", "outcome.json")
"""Files that are sent after all others, in this order. If one of them exists, all files before it are complete."""
AT_ONCE = 16  # objects that are downloaded in parallel
READS = 5  # attempts to read an object that changes during the download
Shorten = Mapping[str, Callable[[Any], bytes]]
"""Functions that read a part of a large file, keyed by its name. Files that were read in part are never sent."""


class Mark(NamedTuple):
    """The size in bytes, modification time in nanoseconds and inode of a file or an object.

    Together, these values identify a version of the file or object. The inode of an object is 0.
    """

    size: int
    time: int
    inode: int = 0


class Known(NamedTuple):
    """The versions that a local file and its remote object had when their contents were last equal.

    `remote` is None if the file was sent and the object has not been listed since then. `whole` is False if only part
    of the object was downloaded.
    """

    local: Mark
    remote: Mark | None
    whole: bool


class Mirror:
    """A local folder that mirrors the objects under a path in a pyarrow file system.

    Files and folders whose names begin with a dot are not mirrored.
    """

    def __init__(self, filesystem: FileSystem, base: str, folder: Path, shorten: Shorten | None = None) -> None:
        self.filesystem, self.base, self.folder = filesystem, base.rstrip("/"), folder
        self._shorten = shorten or {}
        self._known = _load(folder / STATE)

    def pull(self, prefix: str = "", whole: bool = False, discard: bool = False) -> None:
        """Download new and changed objects, and delete local files whose objects no longer exist.

        Args:
            prefix: The folder or file to update. If empty, everything is updated.
            whole: Whether to download large files completely. Otherwise, only a part of each large file may be
                downloaded, for example a checkpoint without its tensors.
            discard: Whether to overwrite local changes that were not sent. Otherwise, local changes are kept.

        Raises:
            OSError: The store does not answer, or a file cannot be written.
        """
        remote, local = self._objects(prefix), self._files(prefix)
        wanted = [name for name, mark in remote.items() if self._lacks(name, mark, local.get(name), whole, discard)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            fetched = pool.map(lambda one: self._fetch(one, remote[one], whole), wanted)
            self._known |= {name: known for name, known in zip(wanted, fetched, strict=True) if known is not None}
        for name in self._below(prefix, {*local, *self._known} - {*remote}):
            known = self._known.get(name)
            if discard or (known and known.local == local.get(name)):
                (self.folder / name).unlink(missing_ok=True)
            if discard or (known and local.get(name) in (known.local, None)):
                self._known.pop(name, None)

    def push(self, prefix: str = "") -> None:
        """Delete the objects of files that no longer exist, and then send new and changed files.

        The files named in `LAST` are sent after all others, in the order of `LAST`.

        Args:
            prefix: The folder or file to send. If empty, everything is sent.

        Raises:
            OSError: The store does not accept a file. The files that come before it have been sent.
        """
        local = self._files(prefix)
        gone = [name for name in self._below(prefix, self._known) if name not in local]
        for name in sorted(gone, key=lambda one: _turn(one, self._known[one].local), reverse=True):
            remove(self.filesystem, f"{self.base}/{name}")
            del self._known[name]
        changed = [name for name, mark in local.items() if self._changed(name, mark)]
        for name in sorted(changed, key=lambda one: _turn(one, local[one])):
            put(self.filesystem, f"{self.base}/{name}", (self.folder / name).read_bytes())
            self._known[name] = Known(local[name], None, True)

    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the objects under `prefix`, relative to the base path of the mirror."""
        return sorted(self._objects(prefix))

    def save(self) -> None:
        """Record which local files are identical to their remote objects.

        Later processes then do not download these files again.
        """
        write_atomically(self.folder / STATE, json.dumps(self._known).encode())

    def _objects(self, prefix: str) -> dict[str, Mark]:
        from pyarrow.fs import FileSelector

        below = FileSelector(f"{self.base}/{prefix}".rstrip("/"), recursive=True, allow_not_found=True)
        files = [info for info in self.filesystem.get_file_info(below) if info.is_file]
        found = {info.path.removeprefix(f"{self.base}/"): Mark(info.size, info.mtime_ns) for info in files}
        return {name: mark for name, mark in found.items() if _ours(name)}

    def _files(self, prefix: str) -> dict[str, Mark]:
        start, found = self.folder / prefix, {}
        for path in [start] if start.is_file() else _walked(start):
            if _ours(name := path.relative_to(self.folder).as_posix()):
                with contextlib.suppress(FileNotFoundError):  # the file was just deleted
                    found[name] = _mark(path)
        return found

    @staticmethod
    def _below(prefix: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if not prefix or name == prefix or name.startswith(f"{prefix}/")]

    def _lacks(self, name: str, remote: Mark, local: Mark | None, whole: bool, discard: bool) -> bool:
        known = self._known.get(name)
        if known is None or self._changed(name, local):
            return discard or (known is None and local is None)
        if known.remote is None and known.local.size == remote.size:  # the object was sent from this folder
            known = self._known[name] = known._replace(remote=remote)
        return known.remote != remote or (whole and not known.whole)

    def _changed(self, name: str, local: Mark | None) -> bool:
        """Return whether a local file is new, changed or deleted since the file and its object were last equal.

        A file that may have been downloaded only in part counts as unchanged as long as it exists.

        Args:
            name: The name of the file.
            local: The current version of the file, or None if the file does not exist.
        """
        known = self._known.get(name)
        return known is None or (known.local != local and not (local and Path(name).name in self._shorten))

    def _fetch(self, name: str, mark: Mark, whole: bool) -> Known | None:
        """Download an object to its local file.

        Args:
            name: The name of the file.
            mark: The version of the object when the store was listed.
            whole: Whether to download a large object completely.

        Returns:
            The new versions of the file and the object, or None if the object no longer exists.
        """
        short = None if whole else self._shorten.get(Path(name).name)
        place, path = inside(self.folder, name), f"{self.base}/{name}"
        for _ in range(READS):
            try:
                with self.filesystem.open_input_file(path) as file:
                    content = short(file) if short else file.readall()
            except FileNotFoundError:
                return None
            before = mark
            if short is None:
                info = self.filesystem.get_file_info(path)
                mark = Mark(info.size, info.mtime_ns)
            if mark == before:  # otherwise the content may mix two versions
                write_atomically(place, content)
                return Known(_mark(place), mark, short is None)
        raise OSError(f"{path} changes faster than it can be read")


def _walked(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".")]
        yield from (Path(path, file) for file in files)


def _ours(name: str) -> bool:
    """Return whether a file is mirrored.

    All files are mirrored except Ray's own files and hidden files (locks and incomplete files). Names with `..` are not
    mirrored either, because they could lead out of the folder.
    """
    parts = name.split("/")
    return parts[0] != SCRATCH and not any(part == "" or part.startswith(".") for part in parts)


def _turn(name: str, mark: Mark) -> tuple[int, int, str]:
    last = Path(name).name
    return (LAST.index(last) if last in LAST else -1, mark.time, name)


def _mark(path: Path) -> Mark:
    status = path.stat()
    return Mark(status.st_size, status.st_mtime_ns, status.st_ino)


def _load(path: Path) -> dict[str, Known]:
    """Read the file that an earlier process wrote with `Mirror.save`, and return the recorded versions by file name.

    The dict is empty if that file is missing or invalid.
    """
    known: dict[str, Known] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        for name, (local, remote, whole) in json.loads(path.read_text()).items():
            known[name] = Known(Mark(*local), Mark(*remote) if remote else None, whole)
        return known
    return {}
