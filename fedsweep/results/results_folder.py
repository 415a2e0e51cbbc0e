"""All sweeps and runs of a root, in a folder or elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.common.files import write_atomically
from fedsweep.common.paths import inside, mirror_folder
from fedsweep.results.remote import NOTHING, Place, Remote
from fedsweep.results.remote.mirror import AT_ONCE
from fedsweep.results.remote.objects import (
    check_there,
    check_writable,
    filesystem,
    is_uri,
    persistently,
    read,
)
from fedsweep.results.sweep_folder import SweepStore
from fedsweep.results.trial_folder import TrialStore


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

    def whole_run(self, name: str, stamp: str) -> TrialStore:
        """One of these runs, its tensors with it."""
        run = self.run(name, stamp)
        if self.uri:  # through the mirror of `runs`, which knows what of them it has only in part
            remote = self.remote(self.root / "runs").below(name, stamp)
            remote.pull(whole=True)
            remote.save()
        return TrialStore(run.folder)

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
