"""Decoding of images in chunks, in parallel, and the log of finished chunks."""

import json
import os
import signal
import threading
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

from fedsweep.common.errors import UserError, one_line
from fedsweep.preparation.decode import CorruptImageError, Geometry, decode
from fedsweep.preparation.layouts.base import Item, Layout


@dataclass(frozen=True)
class Chunk:
    """Some images of a domain, and the slots of their pixels in the file `pixels`."""

    key: str
    layout: Layout
    root: Path
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    geometry: Geometry
    pixels: Path


class Corrupt(NamedTuple):
    """An image that cannot be decoded: its slot in the domain, its path within the root, and the reason."""

    slot: int
    path: str
    reason: str


@dataclass(frozen=True)
class Done:
    """A finished chunk. `crc` is the checksum of the pixels of its images in order, without the corrupt ones."""

    key: str
    crc: int
    corrupt: tuple[Corrupt, ...]


def decode_chunk(chunk: Chunk) -> Done:
    """Read, decode and write the images of a chunk, or raise UserError if a file cannot be read."""
    crc, corrupt = 0, []
    stream = chunk.layout.read(chunk.root, chunk.items)
    length = chunk.geometry.image_bytes
    with chunk.pixels.open("r+b", buffering=0) as file:
        for item, slot in zip(chunk.items, chunk.slots, strict=True):
            try:
                data = next(stream)
            except OSError as error:
                reason = error.strerror or one_line(error)
                raise UserError(f"{chunk.root / item.path} cannot be read: {reason}.") from None
            try:
                pixels = decode(data, chunk.geometry).tobytes()
            except CorruptImageError as error:
                corrupt.append(Corrupt(slot, item.path, str(error)))
                continue
            _write_at(file.fileno(), pixels, slot * length)
            crc = zlib.crc32(pixels, crc)
    return Done(chunk.key, crc, tuple(corrupt))


def _write_at(file: int, data: bytes, offset: int) -> None:
    while data:  # no memory map: writing to one ends the process if the disk is full
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def decode_chunks(chunks: Sequence[Chunk], workers: int) -> Generator[Done]:
    """Yield the decoded chunks as they end; raise UserError as `decode_chunk`, or if a worker was killed.

    They are decoded in this process or, with several workers, in others; close the iterator to end these.
    """
    if min(workers, len(chunks)) <= 1:
        yield from map(decode_chunk, chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)  # not forked: there may be threads
    try:
        for future in as_completed([pool.submit(decode_chunk, chunk) for chunk in chunks]):
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed while decoding, perhaps for memory; the same command goes on from "
            "there, and a smaller `--workers` needs less."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end with it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class Scratch:
    """The folder of a preparation in progress, with a log of chunks whose pixels are checked before they are reused."""

    LOG = "done.jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / self.LOG
        self.chunks: dict[str, Done] = {}
        self.domains: dict[str, tuple[str, int]] = {}
        """Key and file size in bytes of each finished domain."""
        for line in self.log.read_bytes().splitlines() if self.log.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # a line that was being written when the process was killed
                continue
            if "domain" in entry:
                self.domains[entry["domain"]] = (entry["key"], entry["bytes"])
            else:
                corrupt = tuple(Corrupt(*one) for one in entry["corrupt"])
                self.chunks[entry["chunk"]] = Done(entry["chunk"], entry["crc"], corrupt)

    def _append(self, entry: dict[str, object]) -> None:
        with self.log.open("ab") as file:
            # The line break comes first: a line that was cut off by a kill stays alone.
            file.write(f"\n{json.dumps(entry)}".encode())
            file.flush()
            os.fsync(file.fileno())

    def add(self, done: Done) -> None:
        """Record a finished chunk."""
        self.chunks[done.key] = done
        self._append({"chunk": done.key, "crc": done.crc, "corrupt": done.corrupt})

    def pixels(self, domain: str) -> Path:
        """Return the path of a domain's pixels, before its Arrow file is written."""
        return self.folder / f"{domain}.pixels"

    def arrow(self, domain: str) -> Path:
        """Return the path of a domain's Arrow file."""
        return self.folder / f"{domain}.arrow"

    def finish(self, domain: str, key: str, written: Path) -> None:
        """Record a domain's file `written`, after giving it its name, and delete the domain's pixels."""
        length = written.replace(self.arrow(domain)).stat().st_size
        self.domains[domain] = (key, length)
        self._append({"domain": domain, "key": key, "bytes": length})
        self.pixels(domain).unlink(missing_ok=True)

    def has_domain(self, domain: str, key: str) -> bool:
        """Return whether the domain's file is finished and has this key."""
        arrow = self.arrow(domain)
        return arrow.exists() and self.domains.get(domain) == (key, arrow.stat().st_size)

    def has_chunk(self, chunk: Chunk) -> bool:
        """Return whether the chunk is in the log with the checksum of the pixels in the file."""
        if (done := self.chunks.get(chunk.key)) is None:
            return False
        bad, crc, length = {one.slot for one in done.corrupt}, 0, chunk.geometry.image_bytes
        with chunk.pixels.open("rb", buffering=0) as file:
            for slot in chunk.slots:
                if slot not in bad:
                    crc = zlib.crc32(os.pread(file.fileno(), length, slot * length), crc)
        return crc == done.crc
