"""The folder of one sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.paths import inside
from fedsweep.common.yaml_values import read_json
from fedsweep.results.records import SweepManifest, TrialRecord
from fedsweep.results.remote import NOTHING, Remote
from fedsweep.results.remote.objects import persistently
from fedsweep.results.trial_folder import TrialStore


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
        return SweepManifest.of(read_json(path), str(path))

    def show(self, columns: tuple[str, ...], asked: bool) -> None:
        """Let reports have these columns from now on; those that were `asked` for outlive a change of the YAML."""
        manifest = self.manifest()
        if manifest.columns != columns:
            options = {**manifest.options, "columns": list(columns)} if asked else manifest.options
            changed = manifest.model_copy(update={"columns": columns, "options": options})
            write_atomically(self.folder / "sweep.json", changed.model_dump_json(indent=2).encode())

    def fetch(self) -> None:
        """Bring the folder up to what lies elsewhere, unless a process of this machine runs the sweep and does so.

        Raises:
            UnreachableError: the store elsewhere does not answer.
        """
        if self.remote is NOTHING:
            return
        try:
            with locked(self.folder / ".lock", "taken"):
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
