"""The folder of a preparation in progress, from which an interrupted preparation is continued."""

import json
import os
import zlib
from pathlib import Path

from fedsweep.preparation.decode import Chunk, Corrupt, Done


class Scratch:
    """The folder of a preparation in progress.

    The log in the folder lists the finished chunks of images, so that an interrupted preparation can be continued.
    Listed chunks are verified before they are reused.
    """

    LOG = "done.jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / self.LOG
        self.chunks: dict[str, Done] = {}
        self.domains: dict[str, tuple[str, int]] = {}  # of each finished domain, the key and the file size in bytes
        for line in self.log.read_bytes().splitlines() if self.log.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # a line that was being written when the process was killed
                continue
            if "domain" in entry:
                self.domains[entry["domain"]] = (entry["key"], entry["bytes"])
            else:
                corrupt = tuple(Corrupt(*one) for one in entry["corrupt"])
                self.chunks[entry["chunk"]] = Done(entry["chunk"], entry["crc"], corrupt, tuple(entry.get("blank", ())))

    def _append(self, entry: dict[str, object]) -> None:
        with self.log.open("ab") as file:
            # The line break comes first, so that this entry does not continue a line that a killed process left.
            file.write(f"\n{json.dumps(entry)}".encode())
            file.flush()
            os.fsync(file.fileno())

    def add(self, done: Done) -> None:
        """Record a finished chunk in the log."""
        self.chunks[done.key] = done
        self._append({"chunk": done.key, "crc": done.crc, "corrupt": done.corrupt, "blank": done.blank})

    def pixels(self, domain: str) -> Path:
        """Return the path of the temporary file with a domain's pixels."""
        return self.folder / f"{domain}.pixels"

    def finish(self, domain: str, key: str, written: Path) -> None:
        """Rename the finished file `written` of a domain to its final name, and record the domain and `key` in the log.

        The domain's temporary file of pixels is deleted.
        """
        length = written.replace(self.folder / f"{domain}.arrow").stat().st_size
        self.domains[domain] = (key, length)
        self._append({"domain": domain, "key": key, "bytes": length})
        self.pixels(domain).unlink(missing_ok=True)

    def has_domain(self, domain: str, key: str) -> bool:
        """Return whether the domain's file is complete, and the scratch folder's log lists it with this `key`."""
        arrow = self.folder / f"{domain}.arrow"
        return arrow.exists() and self.domains.get(domain) == (key, arrow.stat().st_size)

    def has_chunk(self, chunk: Chunk) -> bool:
        """Return whether the log lists the chunk and the chunk's pixels still match the checksum in the log."""
        if (done := self.chunks.get(chunk.key)) is None:
            return False
        bad, crc, length = {one.slot for one in done.corrupt}, 0, chunk.geometry.image_bytes
        with chunk.pixels.open("rb", buffering=0) as file:
            for slot in chunk.slots:
                if slot not in bad:
                    crc = zlib.crc32(os.pread(file.fileno(), length, slot * length), crc)
        return crc == done.crc
