"""Classes for the folder of a sweep and the folder of a trial.

If the results are in a remote store, these folders are local mirrors of folders in that store.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.files import LockedError, is_locked, locked, write_atomically
from fedsweep.common.paths import inside
from fedsweep.common.yaml_values import read_json
from fedsweep.results.checkpoint import load_history
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import RIGHT, Attempts, Outcome, OutcomeName, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.remote import NOTHING, Remote
from fedsweep.results.remote.objects import persistently
from fedsweep.results.trial_lock import TAKEN, Taken
from fedsweep.results.tsne_files import FILES

if TYPE_CHECKING:
    from fedsweep.results.right_images import RightImages

Record = TypeVar("Record", bound=Config)

ERROR = "error.json"
"""The file in the folder of a trial with its error, which need not be its outcome yet."""


def read_record(kind: type[Record], path: Path) -> Record:
    """Read a record of class `kind` from a JSON file, or raise UserError if the file contains no valid record."""
    try:
        return kind.of(read_json(path), str(path))
    except UserError as error:  # fedsweep has written the file, so similar names do not help
        raise UserError(f"{str(error).partition('; did you mean')[0].rstrip('.')}.") from None


def read_right(path: Path) -> RightImages:
    """Read the correctly predicted test images of a trial.

    Raises:
        UserError: The file is damaged. The message states how to get a report, and how to repair the sweep.
    """
    from fedsweep.results.right_images import RightImages  # imports numpy, which slows down the start of commands

    try:
        found = read_record(RightImages, path)
        found.check(str(path))
    except UserError as error:
        raise UserError(
            f"{str(error).rstrip('.')}; delete this file to get a report without the interval for other images, or "
            f"{_run_again(path.parent)}."
        ) from None
    return found


def write_record(path: Path, record: Config) -> None:
    """Write a record to a JSON file atomically."""
    write_atomically(path, record.model_dump_json(indent=2).encode())


def is_hidden(path: Path) -> bool:
    """Return whether the name of a file or folder begins with a dot, as in `.ipynb_checkpoints`.

    Hidden files and folders in the results folder are no records: other programs, or interrupted writes, left them.
    """
    return path.name.startswith(".")


class TrialStore:
    """The folder of one trial, with the trial's plan, checkpoint, outcome and attempts.

    If the results are in a remote store, the driver (the process that runs the sweep) writes each file to this folder
    and then sends the file to the store. Methods raise UnreachableError if files cannot be downloaded, or if files that
    workers need cannot be sent.
    """

    def __init__(self, folder: Path, remote: Remote = NOTHING) -> None:
        self.folder, self.remote = folder, remote
        self.checkpoint = folder / "checkpoint.safetensors"

    def plan(self, plan: TrialPlan) -> None:
        """Write the plan of the trial. The plan must be written before the trial starts."""
        write_record(self.folder / "trial.json", plan)
        self.remote.push(needed=True)

    @property
    def planned(self) -> bool:
        """True if the trial's plan has been written."""
        return (self.folder / "trial.json").exists()

    @contextlib.contextmanager
    def take(self, seconds: float = 0.5) -> Iterator[Taken | None]:
        """Take the trial for the block, so that no other process runs it.

        The operating system ends the lock of a process that is killed. The lock file stays, because a network file
        system does not reliably tell other processes that a locked file was deleted.

        Args:
            seconds: The time to wait for another process; -1 waits until the trial is free.

        Yields:
            The lock; None if another process has taken the trial, or if the trial has no plan, for example because its
            arm has just been dropped.
        """
        with Taken(self.folder / TAKEN).held(seconds) as lock:
            yield lock if lock is not None and self.planned else None

    @property
    def is_taken(self) -> bool:
        """True if a worker on any machine runs the trial at the moment."""
        lock = self.folder / TAKEN
        return lock.exists() and is_locked(lock)

    def recorded(self) -> Sequence[RoundRecord]:
        """Return the records of all rounds in the local checkpoint, or an empty list if there is no checkpoint."""
        return load_history(self.checkpoint) if self.checkpoint.exists() else []

    def history(self) -> Sequence[RoundRecord]:
        """Return the records of the trial's rounds.

        A trial that was pruned may have recorded rounds after the round at which it was pruned. These records are left
        out.
        """
        outcome = self.outcome()
        return [one for one in self.recorded() if outcome is None or one.round <= outcome.round]

    def outcome(self) -> Outcome | None:
        """Return the trial's outcome, or None if the trial has not ended."""
        path = self.folder / "outcome.json"
        return read_record(Outcome, path) if path.exists() else None

    def begin_from(self, other: TrialStore, round: int) -> None:
        """Copy the checkpoint of another trial, so that this trial continues where the other trial ended.

        Args:
            other: The other trial.
            round: The expected last round of the other trial.

        Raises:
            ValueError: The last round of the other trial is not `round`.
        """
        other.remote.pull(whole=True)
        history = other.recorded()
        if not history or history[-1].round != round:
            found = f"it is {history[-1].round}" if history else "no round is recorded"
            raise ValueError(f"the last round of trial {other.folder.name} must be {round}, but {found}")
        write_atomically(self.checkpoint, other.checkpoint.read_bytes())

    def end(self, outcome: Outcome) -> None:
        """Record the trial's outcome."""
        write_record(self.folder / "outcome.json", outcome)
        self.remote.push()

    def keep_error(self, error: Outcome) -> None:
        """Record an error that becomes the trial's outcome only if the trial is promoted beyond the round of the error.

        Another process, or a later session, then does not run the trial again.
        """
        write_record(self.folder / ERROR, error)
        self.remote.push()

    def error(self) -> Outcome | None:
        """Return the trial's error, which need not be its outcome yet, or None if it had none."""
        path = self.folder / ERROR
        return read_record(Outcome, path) if path.exists() else None

    def reopen(self) -> None:
        """Remove the outcome and the error, so that the trial continues from its checkpoint."""
        for name in ("outcome.json", ERROR):
            (self.folder / name).unlink(missing_ok=True)
        self.remote.push()

    def copy(self, other: TrialStore, ends: Collection[OutcomeName]) -> None:
        """Copy the results of the same trial from another sweep.

        The checkpoint and the files of the last round are always copied. The outcome is copied only if it is in `ends`,
        without the reason that the trial does not count in the other sweep.

        Args:
            other: The trial's folder in the other sweep.
            ends: The outcomes that may be copied, for example `finished`.
        """
        other.remote.pull(whole=True)
        for name in (*FILES, RIGHT, self.checkpoint.name):
            if (other.folder / name).exists():
                write_atomically(self.folder / name, (other.folder / name).read_bytes())
        outcome = other.outcome()
        if outcome is not None and outcome.outcome in ends:
            kept = outcome if outcome.counts else outcome.model_copy(update={"reason": None})
            write_record(self.folder / "outcome.json", kept)

    def read(self, plan: TrialPlan | None = None) -> TrialRecord:
        """Return the trial's plan, outcome, history, t-SNE files and attempts.

        The file of the plan is not read if the caller knows its content, `plan`.

        If the trial has finished, was pruned or diverged, but its checkpoint is missing or lacks rounds, the returned
        record has no outcome. The rounds of a failed trial are not needed, because the trial counts for nothing.

        Raises:
            UserError: A file is damaged, or was written by another version of fedsweep.
        """
        plan = plan or read_record(TrialPlan, self.folder / "trial.json")
        artifacts = {name: self.folder / name for name in FILES if (self.folder / name).exists()}
        outcome, history = self.outcome(), self.history()
        last = history[-1].round if history else 0
        missing = outcome is not None and outcome.outcome != "failed" and last < outcome.round
        right = self.folder / RIGHT if (self.folder / RIGHT).exists() else None
        ended = None if missing else outcome
        return TrialRecord(plan, ended, history, artifacts, self.attempts().attempts, missing, right)

    def attempts(self) -> Attempts:
        """Return the attempts to run the trial on a GPU, with the measured GPU memory of each attempt."""
        path = self.folder / "gpus.json"
        return read_record(Attempts, path) if path.exists() else Attempts()

    def keep_attempts(self, attempts: Attempts) -> None:
        """Write the list of all attempts to run the trial on a GPU."""
        write_record(self.folder / "gpus.json", attempts)
        self.remote.push()


class SweepStore:
    """The folder of one sweep. Methods raise UnreachableError if the remote store does not answer."""

    def __init__(self, folder: Path, remote: Remote = NOTHING) -> None:
        self.folder, self.remote = folder, remote
        self._folders: dict[str, Path] = {}

    def create(self, manifest: SweepManifest, files: Mapping[str, str]) -> None:
        """Write the manifest of the sweep and the texts in `files`, which are keyed by file name."""
        for name, text in files.items():
            write_atomically(self.folder / name, text.encode())
        write_record(self.folder / "sweep.json", manifest)
        self.remote.push(needed=True)

    def manifest(self) -> SweepManifest:
        """Return the sweep's manifest."""
        return read_record(SweepManifest, self.folder / "sweep.json")

    def show(self, columns: tuple[str, ...], asked: bool) -> None:
        """Record which columns the reports of the sweep show.

        Args:
            columns: The names of the columns.
            asked: Whether the user chose the columns. If so, later changes to the YAML file of the search
                space do not change the columns.
        """
        manifest = self.manifest()
        if manifest.columns != columns:
            options = {**manifest.options, "columns": list(columns)} if asked else manifest.options
            shown = manifest.model_copy(update={"columns": columns, "options": options})
            write_record(self.folder / "sweep.json", shown)

    def fetch(self) -> None:
        """Update the folder from the remote store, unless a process on this machine is running the sweep."""
        if self.remote is not NOTHING:
            with contextlib.suppress(LockedError), locked(self.folder / ".lock", "taken"):
                self.remote.pull(discard=True)
                self.remote.save()

    def trial(self, key: str) -> TrialStore:
        """Return the folder of the trial with this key."""
        if key not in self._folders:  # the check is slow, and a sweep asks for each trial many times
            self._folders[key] = inside(self.folder / "trials", key)
        return TrialStore(self._folders[key], self.remote.below("trials", key))

    def ended(self) -> list[str]:
        """Return the keys of the trials that have ended. A key is the name of the trial's folder.

        The files of the trials are not read.
        """
        if (mirror := self.remote.mirror) is not None:
            names = persistently(lambda: mirror.names("trials"))
            return [Path(name).parent.name for name in names if name.endswith("/outcome.json")]
        folders = [path.parent for path in (self.folder / "trials").glob("*/outcome.json")]
        return [folder.name for folder in folders if not is_hidden(folder)]

    def trials(self) -> list[TrialRecord]:
        """Return the records of all planned trials, sorted by their numbers in the sweep's plan.

        Raises:
            UserError: A file of a trial cannot be read. The message states how to repair the sweep.
        """
        trials: list[TrialRecord] = []
        damaged: dict[str, str] = {}
        for folder in sorted(path.parent for path in (self.folder / "trials").glob("*/trial.json")):
            if is_hidden(folder):
                continue
            try:
                trials.append(TrialStore(folder).read())
            except UserError as error:
                if folder.exists():  # otherwise, its arm has just been dropped
                    damaged[folder.name] = str(error)
        if damaged:
            raise UserError(self._repair(damaged))
        return sorted(trials, key=lambda trial: trial.plan.number)

    def set_aside(self, key: str) -> None:
        """Move the folder of a trial to the folder `dropped`. The trial no longer belongs to the sweep."""
        place = inside(self.folder / "dropped", key)
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        (self.folder / "trials" / key).rename(place)
        self.remote.push()

    def dropped(self) -> dict[str, TrialStore]:
        """Return the folders of the trials that no longer belong to the sweep, by key."""
        folders = [path.parent for path in (self.folder / "dropped").glob("*/trial.json")]
        return {folder.name: TrialStore(folder, self.remote.below("dropped", folder.name)) for folder in folders}

    def change(self, manifest: SweepManifest) -> None:
        """Replace the manifest of the sweep."""
        write_record(self.folder / "sweep.json", manifest)
        self.remote.push(needed=True)

    def any_left(self) -> bool:
        """Return whether a resumed sweep may have trials to run: unfinished or failed trials, or a population."""
        trials, planned = self.trials(), self.manifest().trials
        ended = [trial for trial in trials if trial.outcome is not None and trial.outcome.outcome != "failed"]
        return planned is None or len(ended) < max(planned, len(trials))

    def _repair(self, damaged: Mapping[str, str]) -> str:
        """Return the error message about trials that cannot be read. `damaged` maps their keys to the reasons."""
        (first, reason), *others = damaged.items()
        place = self.remote.place
        folder = f"{place.uri}/{place.path}/trials/{first}" if place else self.folder / "trials" / first
        keys = f"; {len(others)} more trials cannot be read: {', '.join(key for key, _ in others)}" if others else ""
        return f"{reason.rstrip('.')}; {_run_again(folder)}{keys}."


def _run_again(folder: Path | str) -> str:
    return f"delete the folder {folder} and resume the sweep with `--resume`, which runs this trial again"
