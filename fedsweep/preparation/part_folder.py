"""The folder of a preparation in progress, and the name of the data set that it becomes."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsweep.common.files import locked
from fedsweep.data.prepared.card import CARD, StoreCard
from fedsweep.preparation.chunks import CORRUPT, Done


class Scratch:
    """A log that is believed only where the pixels agree with it."""

    LOG = "done.jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / self.LOG
        self.chunks: dict[str, Done] = {}
        self.domains: dict[str, tuple[str, int]] = {}
        """Key and bytes of each finished domain."""
        if self.log.exists():
            for line in self.log.read_bytes().splitlines():
                self._read(line)

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except ValueError:  # a line that was being written when the process was killed
            return
        if "domain" in entry:
            self.domains[entry["domain"]] = (entry["key"], entry["bytes"])
        else:
            corrupt = tuple((slot, path, reason) for slot, path, reason in entry["corrupt"])
            self.chunks[entry["chunk"]] = Done(entry["chunk"], entry["crc"], corrupt)

    def _append(self, entry: dict[str, object]) -> None:
        with self.log.open("ab") as file:
            # The line break comes first: a line that was cut off by a kill stays alone.
            file.write(f"\n{json.dumps(entry)}".encode())
            file.flush()
            os.fsync(file.fileno())

    def add(self, done: Done) -> None:
        """Note a chunk whose pixels are in place."""
        self.chunks[done.key] = done
        self._append({"chunk": done.key, "crc": done.crc, "corrupt": done.corrupt})

    def pixels(self, domain: str, length: int) -> Path:
        """The file for a domain's pixels, `length` bytes of it; what is in it stays."""
        path = self.folder / f"{domain}.pixels"
        path.touch()
        os.truncate(path, length)
        return path

    def arrow(self, domain: str) -> Path:
        """The file of a domain."""
        return self.folder / f"{domain}.arrow"

    def finish(self, domain: str, key: str, written: Path) -> None:
        """Take a domain's file for whole, and drop its pixels."""
        arrow = self.arrow(domain)
        written.replace(arrow)
        self.domains[domain] = (key, arrow.stat().st_size)
        self._append({"domain": domain, "key": key, "bytes": self.domains[domain][1]})
        (self.folder / f"{domain}.pixels").unlink(missing_ok=True)

    def has_domain(self, domain: str, key: str) -> bool:
        """Whether the domain's file is finished and its chunks were these."""
        arrow = self.arrow(domain)
        return arrow.exists() and self.domains.get(domain) == (key, arrow.stat().st_size)

    def has_chunk(self, key: str, slots: Sequence[int], pixels: Path, image_bytes: int) -> bool:
        """Whether the chunk is in the log and its pixels are in the file."""
        if (done := self.chunks.get(key)) is None:
            return False
        bad, crc = {slot for slot, _, _ in done.corrupt}, 0
        with pixels.open("rb", buffering=0) as file:
            for slot in slots:
                if slot not in bad:
                    crc = zlib.crc32(os.pread(file.fileno(), image_bytes, slot * image_bytes), crc)
        return crc == done.crc

    def used(self) -> int:
        """Bytes of unfinished pixels that are on the disk."""
        return sum(512 * path.stat().st_blocks for path in self.folder.glob("*.pixels"))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a store that is being made.

    Raises:
        UserError: another process holds it.
    """
    with locked(folder.with_name(f".{folder.name}.lock"), f"another `fedsweep data prepare` is making {folder} now."):
        yield


def recover(folder: Path) -> None:
    """Undo an exchange of stores that was killed between its two steps."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def take_name(part: Path, folder: Path, card: StoreCard) -> None:
    """Rename the work to the store that it has become. Processes that have mapped an older one keep its pages."""
    keep = {CARD, *(f"{name}.arrow" for name in card.domains), *([CORRUPT] if card.skipped else [])}
    for path in part.iterdir():
        if path.name not in keep and path.name != Scratch.LOG:
            path.unlink()
    if folder.exists():
        folder.rename(_old(folder))
    part.rename(folder)
    (folder / Scratch.LOG).unlink()
    shutil.rmtree(_old(folder), ignore_errors=True)
