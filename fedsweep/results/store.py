"""The class of the results folder, which contains the folders of all sweeps and single runs.

If the results are in a remote store, the results folder is a local mirror of a folder in that store.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from fedsweep.common.errors import UserError, near, warn
from fedsweep.common.files import write_atomically
from fedsweep.common.paths import inside, mirror_folder, results_folder
from fedsweep.results.checkpoint import without_tensors
from fedsweep.results.folders import SweepStore, TrialStore, is_hidden
from fedsweep.results.records import SweepManifest
from fedsweep.results.remote import NOTHING, Place, Remote
from fedsweep.results.remote.mirror import AT_ONCE, Mirror
from fedsweep.results.remote.objects import check_there, check_writable, filesystem, is_uri, persistently, read

SHORTEN = {"checkpoint.safetensors": without_tensors}
"""For each large file, a function that reads only the part that the driver (the process that runs a sweep) needs."""


class Store:
    """The results folder, or the local mirror of a remote results folder.

    Methods raise UserError for names that lead out of the folder, such as `../runs`.
    """

    def __init__(self, root: Path, uri: str | None = None) -> None:
        self.root, self.uri = root.resolve(), uri
        self.where = uri or str(self.root)
        """The path or URI, as shown to users."""
        self._warned: set[Path] = set()

    @classmethod
    def at(cls, address: str | Path) -> Store:
        """Open the results folder at a path (see `results_folder`) or URI.

        Raise UserError if a remote store is not accessible.
        """
        if not is_uri(address):
            return cls(results_folder(address))
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
        folders = [path.parent for path in sorted((self.root / "runs").glob("**/trial.json"))]
        return [TrialStore(folder) for folder in folders if not is_hidden(folder)]

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
        """Return the folders of all sweeps, oldest first. Of remote sweeps, only the manifests are downloaded.

        Sweeps whose manifest cannot be read are left out, and a warning on stderr names each of them.
        """
        existing, unreadable = self._listed()
        self._warn(unreadable)
        return [sweep for sweep, _ in existing]

    def find(self, name: str, sweep_id: str | None = None) -> SweepStore:
        """Return the folder of a sweep. If the store is remote, the folder is updated first.

        Args:
            name: The search space, the id of a sweep, or both as `SPACE@SWEEP`.
            sweep_id: The id of the sweep, or `SPACE@SWEEP`; None for the newest sweep of the search space.

        Raises:
            UserError: There is no such sweep, or its manifest cannot be read.
        """
        existing, unreadable = self._listed()
        sweep_id = sweep_id and sweep_id.removeprefix(f"{name}@")
        if sweep_id is None and "@" in name:
            name, _, sweep_id = name.partition("@")
        elif sweep_id is None:
            by_id = {sweep.folder.name: manifest.name for sweep, manifest in existing}
            by_id |= {folder.name: self._space(folder) for folder in unreadable}
            name, sweep_id = (by_id[name], name) if name in by_id else (name, None)
        mine = {sweep.folder.name: sweep for sweep, manifest in existing if manifest.name == name}
        broken = {folder.name: folder for folder in unreadable if self._space(folder) == name}
        # Ids begin with the time at which the sweep started, so the last id is that of the newest sweep.
        newest = max(broken, default="")
        wanted = sweep_id if sweep_id is not None else newest if all(newest > one for one in mine) else ""
        if wanted in broken:
            raise UserError(self._repair(broken[wanted], unreadable[broken[wanted]]))
        self._warn(unreadable)
        if sweep_id is not None and sweep_id not in mine:
            raise UserError(f"there is no sweep `{sweep_id}` of {name} in {self.where}{near(sweep_id, mine) or '.'}")
        if not mine:
            names = sorted({manifest.name for _, manifest in existing})
            raise UserError(f"there is no sweep of {name} in {self.where}{near(name, names) or '.'}")
        found = mine[sweep_id] if sweep_id is not None else list(mine.values())[-1]
        found.fetch()
        return found

    def check_readable(self, space: str) -> None:
        """Raise UserError if the manifest of every sweep of a search space is damaged. `space` can also be an id."""
        existing, unreadable = self._listed()
        if not any(space in (sweep.folder.name, manifest.name) for sweep, manifest in existing):
            for folder, reason in unreadable.items():
                if space in (folder.name, self._space(folder)):
                    raise UserError(self._repair(folder, reason))

    def _listed(self) -> tuple[list[tuple[SweepStore, SweepManifest]], dict[Path, str]]:
        """Return all sweeps with their manifests, oldest first, and the reasons why other manifests cannot be read."""
        root, unreadable = self.root / "sweeps", dict[Path, str]()
        local = (path.parent for path in root.glob("**/sweep.json"))
        found: list[tuple[SweepStore, SweepManifest]] = []
        for folder in self._remote_sweeps if self.uri else local:
            if any(part.startswith(".") for part in folder.relative_to(root).parts):
                continue
            sweep = SweepStore(folder, self.remote(folder))
            try:
                found.append((sweep, sweep.manifest()))
            except UserError as error:
                unreadable[folder] = str(error)
        return sorted(found, key=lambda one: one[1].created), unreadable

    def _space(self, folder: Path) -> str:
        """Return the search space of a sweep from the path of its folder."""
        return folder.parent.relative_to(self.root / "sweeps").as_posix()

    def _warn(self, unreadable: Mapping[Path, str]) -> None:
        """Print one warning for each sweep that cannot be read, unless it has been printed before."""
        for folder, reason in unreadable.items():
            if folder not in self._warned:
                self._warned.add(folder)
                warn(f"a sweep of {self._space(folder)} is left out: {self._repair(folder, reason)}")

    def _repair(self, folder: Path, reason: str) -> str:
        """Return the error message about a manifest that cannot be read. `reason` begins with the path of its file."""
        where = f"{self.uri}/{folder.relative_to(self.root).as_posix()}" if self.uri else folder
        repair = "use the version of fedsweep that wrote it, restore it from a backup, or delete the sweep's folder"
        return f"{reason.rstrip('.')}; {repair} {where}."

    @cached_property
    def _remote_sweeps(self) -> list[Path]:
        """The local folders of all remote sweeps.

        On first use, the remote store is listed, and manifests that are missing or unreadable on this machine are
        downloaded.
        """
        place, root = Place(self.where, "sweeps"), self.root / "sweeps"

        def manifest(name: str) -> Path:
            path = inside(root, name, "sweep.json")
            if not _is_readable(path.parent):
                write_atomically(path, read(place.filesystem, f"{place.base}/{name}/sweep.json"))
            return path.parent

        def look() -> list[Path]:
            names = place.folders("sweep.json", lambda one: (root / one / "sweep.json").exists())
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return list(pool.map(manifest, names))

        return persistently(look)


def _is_readable(folder: Path) -> bool:
    """Return whether a folder contains a manifest that can be read."""
    try:
        SweepStore(folder).manifest()
    except (UserError, FileNotFoundError):
        return False
    return True
