"""Classes that represent a folder in a remote store and synchronise a local folder with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from fedsweep.results.remote.lease import Lease, UnconditionalObjects
from fedsweep.results.remote.mirror import Mirror
from fedsweep.results.remote.objects import UnreachableError, filesystem, persistently

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

LOST = "another process is now running the sweep"


@dataclass(frozen=True)
class Place:
    """The address of a remote folder. It contains no credentials, so it can be sent to workers."""

    uri: str
    path: str

    @property
    def filesystem(self) -> FileSystem:
        """The pyarrow file system of the store, opened once per process."""
        return filesystem(self.uri)[0]

    @property
    def base(self) -> str:
        """The path of this folder in the store's file system."""
        return f"{filesystem(self.uri)[1].rstrip('/')}/{self.path}"

    def below(self, *names: str) -> Place:
        """Return the address of a subfolder."""
        return Place(self.uri, "/".join((self.path, *names)))

    def folders(self, marker: str, known: Callable[[str], bool], above: str = "") -> Iterator[str]:
        """Search a subfolder recursively, and yield the paths of the folders that contain a file named `marker`.

        All paths are relative to this address.

        Args:
            marker: The name of the file.
            known: A function that returns whether a folder is already known to contain the file. Such a folder is
                yielded without a request to the store.
            above: The path of the folder to search. If empty, the whole remote folder is searched.
        """
        from pyarrow.fs import FileSelector

        found = self.filesystem.get_file_info(FileSelector(f"{self.base}/{above}".rstrip("/"), allow_not_found=True))
        if any(one.is_file and one.base_name == marker for one in found):
            yield above
            return
        for name in sorted(one.base_name for one in found if not one.is_file and not one.base_name.startswith(".")):
            path = f"{above}/{name}".lstrip("/")
            if known(path):
                yield path
            else:
                yield from self.folders(marker, known, path)


@dataclass(eq=False)
class Remote:
    """The copy of a local folder in a remote store. If there is no remote store, the methods have no effect.

    Methods raise UnreachableError if the store does not answer.
    """

    mirror: Mirror | None = None
    place: Place | None = None
    prefix: str = ""
    unsent: dict[str, str] = field(default_factory=dict)
    """The reason by prefix of the files that could not be sent. All parts of a mirror share this dict."""
    is_lost: Callable[[], bool] = lambda: False
    """A function that returns whether another process has acquired the lease on the remote folder."""

    def below(self, *names: str) -> Remote:
        """Return the remote folder or object that a subfolder or file of the local folder mirrors."""
        return replace(self, prefix="/".join((self.prefix, *names)).lstrip("/"))

    def pull(self, whole: bool = False, discard: bool = False) -> None:
        """Update the local folder from the remote folder.

        Args:
            whole: Whether to download large files completely. Otherwise, checkpoints may be downloaded without tensors.
            discard: Whether to overwrite local changes that were not sent. Otherwise, local changes are kept.
        """
        if self.mirror is not None:
            persistently(partial(self.mirror.pull, self.prefix, whole, discard))

    def push(self, needed: bool = False) -> None:
        """Send new and changed files, and files that an earlier call could not send.

        Args:
            needed: Whether other processes need the files now. If so, failed attempts are repeated, and
                UnreachableError is raised if all of them fail. Otherwise, files that cannot be sent are recorded in
                `unsent` for the next call.
        """
        if self.mirror is None:
            return
        for prefix in dict.fromkeys((*self.unsent, self.prefix)):
            try:
                if self.is_lost():
                    raise UnreachableError(LOST)
                persistently(partial(self.mirror.push, prefix), None if needed else ())
                self.unsent.pop(prefix, None)
            except UnreachableError as error:
                self.unsent[prefix] = self.unsent[self.prefix] = str(error)
                if needed:
                    raise
                return

    def clear(self, name: str) -> None:
        """Delete the subfolder `name` of the remote folder. Errors of the store are ignored.

        The subfolder must have no local mirror.
        """
        if self.place is not None:
            with contextlib.suppress(OSError):
                self.place.filesystem.delete_dir(f"{self.place.base}/{name}")

    def save(self) -> None:
        """Record which local files are identical to their remote objects.

        Later processes then do not download these files again.
        """
        if self.mirror is not None:
            self.mirror.save()

    def is_taken(self) -> bool:
        """Return whether another process, on any machine, holds the lease on the remote folder."""
        if self.place is None:
            return False
        other, _ = persistently(Lease(UnconditionalObjects(self.place.filesystem), self.place.base).look)
        return other is not None

    @contextlib.contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Hold the lease on the remote folder during the context, or raise UserError if another process holds it.

        `what` is the name of the sweep in the error message.
        """
        if self.place is None:
            yield
            return
        from fedsweep.results.remote.conditional_writes import objects_of

        with Lease(objects_of(self.place.uri), self.place.base).acquired(what) as lease:
            self.is_lost = lambda: lease.lost
            yield

    def __reduce__(self) -> tuple[type[Remote], tuple[()]]:
        """Pickle an empty `Remote` in place of this object.

        Ray pickles the search algorithm, and the search algorithm refers to this object. An empty object is sufficient,
        because fedsweep never restores the search algorithm from a pickle.
        """
        return Remote, ()


NOTHING = Remote()
