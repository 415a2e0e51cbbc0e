"""A log of which trials were stopped where, each line on disk before it takes effect. No ray, no torch."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from fedsweep.results.checkpoint import write_atomically
from fedsweep.results.remote import NOTHING, Remote


@dataclass(frozen=True)
class Decision:
    """Whether a trial was stopped after a round, by the value that it had then; better when larger."""

    key: str
    round: int
    value: float
    stop: bool
    stratum: str = ""


class Decisions:
    """All decisions of a sweep, by trial and round; a last line torn by a crash is cut off."""

    def __init__(self, log: Path, remote: Remote = NOTHING) -> None:
        self.log, self._remote = log, remote.below(log.name)
        self.made: dict[tuple[str, int], Decision] = {}
        for line in self._whole_lines():
            self._remember(Decision(**json.loads(line)))

    def add(self, decision: Decision) -> None:
        """Put a decision down for good."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(json.dumps(asdict(decision)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._remote.push()
        self._remember(decision)

    def _remember(self, decision: Decision) -> None:
        self.made[decision.key, decision.round] = decision

    def _whole_lines(self) -> list[str]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_atomically(self.log, whole.encode())
        return whole.splitlines()
