"""Classes for the results folder, the folder of a sweep and the folder of a trial.

If the results are in a remote store, these folders are local mirrors of folders in that store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near
from fedsweep.common.files import LockedError, locked, write_atomically
from fedsweep.common.paths import inside, mirror_folder
from fedsweep.common.yaml_values import read_json
from fedsweep.results.checkpoint import load_history, without_tensors
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import Attempts, Outcome, OutcomeName, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.remote import NOTHING, Place, Remote
from fedsweep.results.remote.mirror import AT_ONCE, Mirror
from fedsweep.results.remote.objects import check_there, check_writable, filesystem, is_uri, persistently, read
from fedsweep.results.tsne_files import FILES

Record = TypeVar("Record", bound=Config)
SHORTEN = {"checkpoint.safetensors": without_tensors}
"""For each large file, a function that reads only the part that the driver (the process that runs a sweep) needs."""


def read_record(kind: type[Record], path: Path) -> Record:
    """Read a record of class `kind` from a JSON file, or raise UserError if the file contains no valid record."""
    return kind.of(read_json(path), str(path))


def write_record(path: Path, record: Config) -> None:
    """Write a record to a JSON file atomically."""
    write_atomically(path, record.model_dump_json(indent=2).encode())


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

    def reopen(self) -> None:
        """Remove the outcome, so that the trial continues from its checkpoint."""
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self.remote.push()

    def take(self, other: TrialStore, ends: Collection[OutcomeName]) -> None:
        """Copy the results of the same trial from another sweep.

        The checkpoint and the t-SNE files are always copied. The outcome is copied only if it is in `ends`.

        Args:
            other: The trial's folder in the other sweep.
            ends: The outcomes that may be copied, for example `finished`.
        """
        other.remote.pull(whole=True)
        for name in (*FILES, self.checkpoint.name):
            if (other.folder / name).exists():
                write_atomically(self.folder / name, (other.folder / name).read_bytes())
        outcome = other.outcome()
        if outcome is not None and outcome.outcome in ends:
            write_record(self.folder / "outcome.json", outcome)

    def read(self) -> TrialRecord:
        """Return the trial's plan, outcome, history, t-SNE files and attempts."""
        plan = read_record(TrialPlan, self.folder / "trial.json")
        artifacts = {name: self.folder / name for name in FILES if (self.folder / name).exists()}
        return TrialRecord(plan, self.outcome(), self.history(), artifacts, self.attempts().attempts)

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
        return TrialStore(inside(self.folder / "trials", key), self.remote.below("trials", key))

    def ended(self) -> list[str]:
        """Return the keys of the trials that have ended. A key is the name of the trial's folder."""
        if (mirror := self.remote.mirror) is not None:
            names = persistently(lambda: mirror.names("trials"))
            return [Path(name).parent.name for name in names if name.endswith("/outcome.json")]
        return [path.parent.name for path in (self.folder / "trials").glob("*/outcome.json")]

    def trials(self) -> list[TrialRecord]:
        """Return the records of all planned trials, sorted by their numbers in the sweep's plan."""
        trials = [TrialStore(path.parent).read() for path in (self.folder / "trials").glob("*/trial.json")]
        return sorted(trials, key=lambda trial: trial.plan.number)


class Store:
    """The results folder, or the local mirror of a remote results folder.

    Methods raise UserError for names that lead out of the folder, such as `../runs`.
    """

    def __init__(self, root: Path, uri: str | None = None) -> None:
        self.root, self.uri = root.resolve(), uri
        self.where = uri or str(self.root)
        """The path or URI, as shown to users."""

    @classmethod
    def at(cls, address: str | Path) -> Store:
        """Open the results folder at a path or URI. Raise UserError if a remote store is not accessible."""
        if not is_uri(address):
            return cls(Path(address))
        uri = str(address).rstrip("/")
        found, base = filesystem(uri)
        if found.type_name == "local":
            return cls(Path(base))
        check_there(uri)
        return cls(mirror_folder(uri), uri)

    def check_writable(self) -> None:
        """Raise UserError if the results are in a remote store that is not writable."""
        if self.uri:
            check_writable(self.uri)

    def remote(self, folder: Path, plays: bool = False) -> Remote:
        """Return the folder in the remote store that a folder in the results folder mirrors.

        Args:
            folder: The local folder.
            plays: Whether this process trains the run in the folder and therefore needs the tensors in the run's
                checkpoint. Otherwise, checkpoints are downloaded without tensors and are never sent.
        """
        if self.uri is None:
            return NOTHING
        place = Place(self.uri, folder.relative_to(self.root).as_posix())
        return Remote(Mirror(place.filesystem, place.base, folder, None if plays else SHORTEN), place)

    def sweep(self, name: str, sweep_id: str) -> SweepStore:
        """Return the folder of a sweep. The folder need not exist."""
        folder = inside(self.root / "sweeps", name, sweep_id)
        return SweepStore(folder, self.remote(folder))

    def run(self, name: str, stamp: str) -> TrialStore:
        """Return the folder of a run outside of sweeps.

        Args:
            name: The name of the run's experiment.
            stamp: The start time of the run.
        """
        folder = inside(self.root / "runs", name, stamp)
        return TrialStore(folder, self.remote(folder, plays=True))

    def runs(self) -> list[TrialStore]:
        """Return the folders of all runs outside of sweeps. Local copies of remote folders are updated first."""
        remote = self.remote(self.root / "runs")
        remote.pull()
        remote.save()
        return [TrialStore(path.parent) for path in sorted((self.root / "runs").glob("**/trial.json"))]

    def whole_run(self, name: str, stamp: str) -> TrialStore:
        """Return the folder of a run outside of sweeps, with a complete checkpoint.

        The tensors of the checkpoint are downloaded if they are missing.

        Args:
            name: The name of the experiment.
            stamp: The start time of the run.
        """
        # Only the mirror of `runs` records which checkpoints were downloaded without tensors.
        remote = self.remote(self.root / "runs").below(name, stamp)
        remote.pull(whole=True)
        remote.save()
        return TrialStore(inside(self.root / "runs", name, stamp))

    def sweeps(self) -> list[SweepStore]:
        """Return the folders of all sweeps, oldest first. Of remote sweeps, only the manifests are downloaded."""
        local = (path.parent for path in (self.root / "sweeps").glob("**/sweep.json"))
        found = [SweepStore(folder, self.remote(folder)) for folder in (self._remote_sweeps if self.uri else local)]
        return sorted(found, key=lambda sweep: sweep.manifest().created)

    def find(self, name: str, sweep_id: str | None = None) -> SweepStore:
        """Return the folder of a sweep. If the store is remote, the folder is updated first.

        Args:
            name: The search space, the id of a sweep, or both as `SPACE@SWEEP`.
            sweep_id: The id of the sweep, or `SPACE@SWEEP`; None for the newest sweep of the search space.

        Raises:
            UserError: There is no such sweep.
        """
        existing = self.sweeps()
        sweep_id = sweep_id and sweep_id.removeprefix(f"{name}@")
        if sweep_id is None and "@" in name:
            name, _, sweep_id = name.partition("@")
        elif sweep_id is None:
            by_id = {sweep.folder.name: sweep.manifest().name for sweep in existing}
            name, sweep_id = (by_id[name], name) if name in by_id else (name, None)
        mine = {sweep.folder.name: sweep for sweep in existing if sweep.manifest().name == name}
        if sweep_id is not None and sweep_id not in mine:
            raise UserError(f"there is no sweep `{sweep_id}` of {name} in {self.where}{near(sweep_id, mine) or '.'}")
        if not mine:
            names = sorted({sweep.manifest().name for sweep in existing})
            raise UserError(f"there is no sweep of {name} in {self.where}{near(name, names) or '.'}")
        found = mine[sweep_id] if sweep_id is not None else list(mine.values())[-1]
        found.fetch()
        return found

    @cached_property
    def _remote_sweeps(self) -> list[Path]:
        """The local folders of all remote sweeps.

        On first use, the remote store is listed, and missing manifests are downloaded.
        """
        place, root = Place(self.where, "sweeps"), self.root / "sweeps"

        def manifest(name: str) -> Path:
            path = inside(root, name, "sweep.json")
            if not path.exists():
                write_atomically(path, read(place.filesystem, f"{place.base}/{name}/sweep.json"))
            return path.parent

        def look() -> list[Path]:
            names = place.folders("sweep.json", lambda one: (root / one / "sweep.json").exists())
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return list(pool.map(manifest, names))

        return persistently(look)
