"""The folder of one trial."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from fedsweep.common.files import write_atomically
from fedsweep.common.yaml_values import read_json
from fedsweep.results.checkpoint import load_history
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import Attempts, Outcome, OutcomeName, TrialPlan, TrialRecord
from fedsweep.results.remote import NOTHING, Remote
from fedsweep.results.tsne_files import FILES


class TrialStore:
    """The folder of one trial. What the driver writes is sent to where the truth lies, if that is elsewhere."""

    def __init__(self, folder: Path, remote: Remote = NOTHING) -> None:
        self.folder, self.remote = folder, remote
        self.checkpoint = folder / "checkpoint.safetensors"

    def plan(self, plan: TrialPlan) -> None:
        """Write what is to be run, before anything of it is.

        Raises:
            UnreachableError: the store elsewhere does not take it, and a worker would not find it.
        """
        write_atomically(self.folder / "trial.json", plan.model_dump_json(indent=2).encode())
        self.remote.push(needed=True)

    @property
    def planned(self) -> bool:
        """Whether the plan is there."""
        return (self.folder / "trial.json").exists()

    def recorded(self) -> Sequence[RoundRecord]:
        """All rounds on disk."""
        return load_history(self.checkpoint) if self.checkpoint.exists() else []

    def history(self) -> Sequence[RoundRecord]:
        """The rounds of the trial so far; what was played beyond its end, before that was decided, is none of them."""
        outcome = self.outcome()
        return [one for one in self.recorded() if outcome is None or one.round <= outcome.round]

    def outcome(self) -> Outcome | None:
        """How the trial ended, or None."""
        path = self.folder / "outcome.json"
        return Outcome.of(read_json(path), str(path)) if path.exists() else None

    def begin_from(self, other: TrialStore, round: int) -> None:
        """Start with the state and history of another trial, which must stand at that round.

        Raises:
            ValueError: it does not.
        """
        other.remote.pull(whole=True)
        history = other.recorded()
        if not history or history[-1].round != round:
            stands = history[-1].round if history else "none"
            raise ValueError(f"trial {other.folder.name} must stand at round {round}, but it stands at {stands}")
        write_atomically(self.checkpoint, other.checkpoint.read_bytes())

    def end(self, outcome: Outcome) -> None:
        """Mark the trial as ended."""
        self._end(outcome)
        self.remote.push()

    def reopen(self) -> None:
        """Take back how the trial ended, so that it goes on from its checkpoint."""
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self.remote.push()

    def take(self, other: TrialStore, ends: Collection[OutcomeName]) -> None:
        """What another sweep has of the same trial: its rounds, and its end if it is one of these; before its plan."""
        other.remote.pull(whole=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, self.checkpoint.name):
            if (other.folder / name).exists():
                write_atomically(self.folder / name, (other.folder / name).read_bytes())
        outcome = other.outcome()
        if outcome is not None and outcome.outcome in ends:
            self._end(outcome)

    def read(self) -> TrialRecord:
        """Everything about the trial."""
        path = self.folder / "trial.json"
        plan = TrialPlan.of(read_json(path), str(path))
        artifacts = {name: self.folder / name for name in FILES if (self.folder / name).exists()}
        return TrialRecord(plan, self.outcome(), self.history(), artifacts, self.attempts().attempts)

    def attempts(self) -> Attempts:
        """What it was given of a GPU, and took, each time that it was handed out."""
        path = self.folder / "gpus.json"
        return Attempts.of(read_json(path), str(path)) if path.exists() else Attempts()

    def keep_attempts(self, attempts: Attempts) -> None:
        """Put them on disk."""
        write_atomically(self.folder / "gpus.json", attempts.model_dump_json(indent=2).encode())
        self.remote.push()

    def _end(self, outcome: Outcome) -> None:
        write_atomically(self.folder / "outcome.json", outcome.model_dump_json(indent=2).encode())
