"""The durable truth of a sweep: plain files, those of a trial each written atomically. MLflow is a view of this.

<root>/sweeps/<search space>/<sweep id>/
    sweep.json                      SweepManifest
    experiment.yaml search_space.yaml
    decisions.jsonl                 the scheduler's memory, where it has one
    warm_start.json                 what the search knew from the start, if anything
    trials/<key>/trial.json         what is to be run
    trials/<key>/checkpoint.safetensors   state and history after the last whole round
    trials/<key>/tsne.csv tsne.png  features after the last round, where the experiment asks for them
    trials/<key>/outcome.json       how it ended; absent while it has not
    trials/<key>/gpus.json          what it was given of a GPU, and took, each time that it was handed out

Where the store is a URI, these are objects, and the root is a folder of this machine with what it needs of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedsweep.checkpoint import load_history, write_atomically
from fedsweep.embedding.points import FILES
from fedsweep.errors import UserError, near
from fedsweep.history import RoundRecord
from fedsweep.lock import held
from fedsweep.mirror import AT_ONCE
from fedsweep.object_store import check_there, check_writable, filesystem, is_uri, persistently, read
from fedsweep.paths import inside, mirror_folder
from fedsweep.records import (
    Outcome,
    OutcomeName,
    Start,
    SweepManifest,
    TrialPlan,
    TrialRecord,
    count_outcomes,
)
from fedsweep.remote import NOTHING, Place, Remote

__all__ = [
    "Outcome",
    "OutcomeName",
    "Start",
    "Store",
    "SweepManifest",
    "SweepStore",
    "TrialPlan",
    "TrialRecord",
    "TrialStore",
    "count_outcomes",
]


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
        return Outcome.of(json.loads(path.read_text()), str(path)) if path.exists() else None

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
        plan = TrialPlan.of(json.loads(path.read_text()), str(path))
        artifacts = {name: self.folder / name for name in FILES if (self.folder / name).exists()}
        return TrialRecord(plan, self.outcome(), self.history(), artifacts)

    def _end(self, outcome: Outcome) -> None:
        write_atomically(self.folder / "outcome.json", outcome.model_dump_json(indent=2).encode())


class SweepStore:
    """The folder of one sweep."""

    def __init__(self, folder: Path, remote: Remote = NOTHING) -> None:
        self.folder, self.remote = folder, remote

    def create(self, manifest: SweepManifest, files: Mapping[str, str]) -> None:
        """Make the folder with the manifest and copies of the YAMLs.

        Raises:
            UnreachableError: the store elsewhere does not take it.
        """
        for name, text in files.items():
            write_atomically(self.folder / name, text.encode())
        write_atomically(self.folder / "sweep.json", manifest.model_dump_json(indent=2).encode())
        self.remote.push(needed=True)

    def manifest(self) -> SweepManifest:
        """What the sweep is."""
        path = self.folder / "sweep.json"
        return SweepManifest.of(json.loads(path.read_text()), str(path))

    def fetch(self) -> None:
        """Bring the folder up to what lies elsewhere, unless a process of this machine runs the sweep and does so.

        Raises:
            UnreachableError: the store elsewhere does not answer.
        """
        if self.remote is NOTHING:
            return
        try:
            with held(self.folder / ".lock", "taken"):
                self.remote.pull(discard=True)
                self.remote.save()
        except UserError as error:
            if str(error) != "taken":
                raise

    def trial(self, key: str) -> TrialStore:
        """One trial's folder."""
        return TrialStore(inside(self.folder / "trials", key), self.remote.below("trials", key))

    def ended(self) -> list[str]:
        """Keys of the trials that have ended."""
        if (mirror := self.remote.mirror) is not None:
            names = persistently(lambda: mirror.names("trials"))
            return [Path(name).parent.name for name in names if name.endswith("/outcome.json")]
        return [path.parent.name for path in (self.folder / "trials").glob("*/outcome.json")]

    def trials(self) -> list[TrialRecord]:
        """All trials, in the order of the plan."""
        folders = [path.parent for path in (self.folder / "trials").glob("*/trial.json")]
        return sorted((TrialStore(folder).read() for folder in folders), key=lambda trial: trial.plan.number)


class Store:
    """The root folder that runs leave things in, `mlruns/` by default, or that mirrors a store elsewhere."""

    def __init__(self, root: Path, uri: str | None = None) -> None:
        self.root, self.uri = root.resolve(), uri
        self._found: list[Path] | None = None

    @classmethod
    def at(cls, address: str | Path) -> Store:
        """The store in a folder, or at a URI of an object store, of which this machine then keeps a mirror.

        Raises:
            UserError: there is no such store, or it does not let us in.
        """
        if not is_uri(address):
            return cls(Path(address))
        uri = str(address).rstrip("/")
        found, base = filesystem(uri)
        if found.type_name == "local":
            return cls(Path(base))
        check_there(uri)
        return cls(mirror_folder(uri), uri)

    @property
    def where(self) -> str:
        """What a person calls it."""
        return self.uri or str(self.root)

    def check_writable(self) -> None:
        """Find out before anything starts whether objects can be written, where the store is elsewhere.

        Raises:
            UserError: they cannot.
        """
        if self.uri:
            check_writable(self.uri)

    def remote(self, folder: Path, plays: bool = False) -> Remote:
        """What lies behind a folder of the store, if that is elsewhere; `plays` where checkpoints are written here."""
        if self.uri is None:
            return NOTHING
        return Remote.of(Place(self.uri, folder.relative_to(self.root).as_posix()), folder, plays)

    def sweep(self, name: str, sweep_id: str) -> SweepStore:
        """The folder of a sweep, whether it exists or not.

        Raises:
            UserError: the names would leave the store.
        """
        folder = inside(self.root / "sweeps", name, sweep_id)
        return SweepStore(folder, self.remote(folder))

    def run(self, name: str, stamp: str) -> TrialStore:
        """The folder of a run outside a sweep.

        Raises:
            UserError: the names would leave the store.
        """
        folder = inside(self.root / "runs", name, stamp)
        return TrialStore(folder, self.remote(folder, plays=True))

    def runs(self) -> list[TrialStore]:
        """Existing runs outside sweeps, with what lies elsewhere of them brought here."""
        folder = self.root / "runs"
        if self.uri:
            remote = self.remote(folder)
            remote.pull()
            remote.save()
        return [TrialStore(path.parent) for path in sorted(folder.glob("**/trial.json"))]

    def sweeps(self, name: str | None = None) -> list[SweepStore]:
        """Existing sweeps (of one search space), oldest first; of those elsewhere, only what they are is fetched."""
        here = (path.parent for path in (self.root / "sweeps").glob("**/sweep.json"))
        folders = self._look(self.uri) if self.uri else here
        found = [SweepStore(folder, self.remote(folder)) for folder in folders]
        named = [sweep for sweep in found if name is None or sweep.manifest().name == name]
        return sorted(named, key=lambda sweep: sweep.manifest().created)

    def find(self, name: str, sweep_id: str | None = None) -> SweepStore:
        """The newest sweep of a search space, or the one with the given id, with what lies elsewhere brought here.

        Raises:
            UserError: there is none.
        """
        existing = self.sweeps()
        mine = [sweep for sweep in existing if sweep.manifest().name == name]
        if sweep_id is not None:
            mine = [sweep for sweep in mine if sweep.folder.name == sweep_id]
            if not mine:
                ids = [sweep.folder.name for sweep in self.sweeps(name)]
                raise UserError(f"there is no sweep `{sweep_id}` of {name} in {self.where}{near(sweep_id, ids) or '.'}")
        if not mine:
            names = sorted({sweep.manifest().name for sweep in existing})
            raise UserError(f"there is no sweep of {name} in {self.where}{near(name, names) or '.'}")
        mine[-1].fetch()
        return mine[-1]

    def _look(self, uri: str) -> list[Path]:
        """Folders of sweeps elsewhere, each with its manifest here; asked for once, since each one there is asked."""
        if self._found is None:
            place, root = Place(uri, "sweeps"), self.root / "sweeps"

            def manifest(name: str) -> Path:
                path = inside(root, name, "sweep.json")
                if not path.exists():
                    write_atomically(path, read(place.filesystem, f"{place.base}/{name}/sweep.json"))
                return path

            def look() -> list[Path]:
                names = list(place.folders("sweep.json", lambda one: (root / one / "sweep.json").exists()))
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    return [path.parent for path in pool.map(manifest, names)]

            self._found = persistently(look)
        return self._found
