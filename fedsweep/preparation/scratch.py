"""The `.part` folder of a preparation: what is decoded so far, and a log of it that survives a kill at any moment.

pacs-64.part/
  done.jsonl          a line for each decoded chunk and each finished domain, under the key of its content
  photo.pixels        the domain at work: images at their places, still without labels
  cartoon.arrow       a finished domain
"""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from fedsweep.preparation.chunks import Done


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
