"""Images decoded chunk by chunk in parallel, with a rule for files that cannot be decoded."""

import os
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Self

from fedsweep.common.errors import UserError, one_line
from fedsweep.preparation.decode import CorruptImageError, Geometry, decode
from fedsweep.preparation.layouts.base import Item, Layout
from fedsweep.preparation.plan import DomainPlan

AHEAD = 2
"""Chunks per worker that are handed out before they are asked for."""


@dataclass(frozen=True)
class Chunk:
    """Some images of a domain, and where their pixels belong in the file `pixels`."""

    key: str
    layout: Layout
    root: Path
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    geometry: Geometry
    pixels: Path


@dataclass(frozen=True)
class Done:
    """A chunk whose pixels are in place. `crc` is of its good images' pixels, in the order of the chunk."""

    key: str
    crc: int
    corrupt: tuple[tuple[int, str, str], ...]
    """Slot, path and reason of each image that could not be decoded; nothing is in its place."""


def decode_chunk(chunk: Chunk) -> Done:
    """Read, decode and write the images of a chunk.

    Raises:
        UserError: a file cannot be read, or the pixels not written, for a reason that is not the image's.
    """
    crc, corrupt = 0, []
    stream = chunk.layout.read(chunk.root, chunk.items)
    length = 3 * chunk.geometry.size**2
    with chunk.pixels.open("r+b", buffering=0) as file:
        for item, slot in zip(chunk.items, chunk.slots, strict=True):
            data = _next(stream, chunk.root, item)
            try:
                pixels = decode(data, chunk.geometry).tobytes()
            except CorruptImageError as error:
                corrupt.append((slot, item.path, str(error)))
                continue
            write_at(file.fileno(), pixels, slot * length, chunk.pixels)
            crc = zlib.crc32(pixels, crc)
    return Done(chunk.key, crc, tuple(corrupt))


def _next(stream: Iterator[bytes], root: Path, item: Item) -> bytes:
    try:
        return next(stream)
    except OSError as error:
        raise UserError(f"{root / item.path} cannot be read: {error.strerror or one_line(error)}.") from None


def write_at(file: int, data: bytes, offset: int, path: Path) -> None:
    """Write all of `data`. A map would end the process where the disk is full.

    Raises:
        UserError: it cannot be written.
    """
    try:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError, begun: bool = True) -> UserError:
    """The sentence for a write that failed, before or after decoding has begun."""
    kept = "what is decoded so far is kept, and the same command goes on from there."
    hint = kept if begun else "FEDSWEEP_DATA can name another folder for data."
    return UserError(f"{path} cannot be written: {error.strerror or one_line(error)}; {hint}")


class Decoders:
    """Decodes chunks in this process or, with several workers, in processes of their own that start when needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def decode(self, chunks: Sequence[Chunk]) -> Iterator[Done]:
        """Decode all chunks, in the order of their end.

        Raises:
            UserError: something cannot be read or written, or a worker was killed.
        """
        if self._pool is None and min(self.workers, len(chunks)) <= 1:
            yield from map(decode_chunk, chunks)
            return
        try:
            yield from self._decode(chunks)
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed while decoding, perhaps for memory; the same command goes on from "
                "there, and a smaller `--workers` needs less."
            ) from None

    def _decode(self, chunks: Sequence[Chunk]) -> Iterator[Done]:
        if self._pool is None:  # not forked: this process may have threads
            self._pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _start_worker)
        left = iter(chunks)
        running: set[Future[Done]] = set()
        while True:
            free = AHEAD * self.workers - len(running)
            running |= {self._pool.submit(decode_chunk, chunk) for chunk in islice(left, free)}
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


CORRUPT = "corrupt.txt"
SHOWN = 10
Corrupt = Sequence[tuple[str, str, str]]
"""Domain, path within the root, and reason."""


def some(corrupt: Corrupt) -> str:
    """The first ten with their reasons, and how many more there are."""
    shown = ", ".join(f"{path} ({reason})" for _, path, reason in corrupt[:SHOWN])
    return shown + (f" and {len(corrupt) - SHOWN} more" if len(corrupt) > SHOWN else "")


def count(corrupt: Corrupt) -> str:
    """`1 image` or `12 images`."""
    return f"{len(corrupt)} image{'s' * (len(corrupt) != 1)}"


def write_list(path: Path, corrupt: Corrupt) -> None:
    """One line per image, its path and the reason; no file where there is none."""
    if corrupt:
        path.write_text("".join(f"{name}\t{reason}\n" for _, name, reason in corrupt), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def refuse(name: str, corrupt: Corrupt, path: Path) -> UserError:
    """The sentence that ends a preparation which may not skip."""
    return UserError(
        f"{count(corrupt)} of {name} cannot be decoded: {some(corrupt)}; {path} lists all, and `--skip-corrupt` "
        "leaves them out without decoding the others again."
    )


def check_complete(domains: Sequence[DomainPlan], class_names: Sequence[str], corrupt: Corrupt) -> None:
    """Refuse a store in which a split, or a class of a domain, has lost all of its images.

    Raises:
        UserError: with the first such class or split.
    """
    if not corrupt:
        return
    bad = {(domain, path) for domain, path, _ in corrupt}
    for domain in domains:
        placed = list(zip(domain.slots, domain.items, strict=True))
        good = [(slot, item) for slot, item in placed if (domain.name, item.path) not in bad]
        before, after = (Counter(item.label for _, item in items) for items in (placed, good))
        for label in sorted(before):
            if not after[label]:
                raise UserError(
                    f"the class `{class_names[label]}` of the domain `{domain.name}` has no image that can be decoded, "
                    f"of {before[label]}; without it the data set would be another one."
                )
        for split, train in (("train", True), ("test", False)):
            if not any((slot < domain.train) == train for slot, _ in good):
                raise UserError(f"the domain `{domain.name}` has no {split} image that can be decoded.")
