"""The remote objects behind a folder of the results folder, if the results folder mirrors an object store."""

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

LOST = "another process has taken the sweep over"


@dataclass(frozen=True)
class Place:
    """The address of a remote folder. It holds no secrets and can be sent to workers."""

    uri: str
    path: str

    @property
    def filesystem(self) -> FileSystem:
        """The file system, opened once per process."""
        return filesystem(self.uri)[0]

    @property
    def base(self) -> str:
        """The path in the file system."""
        return f"{filesystem(self.uri)[1].rstrip('/')}/{self.path}"

    def below(self, *names: str) -> Place:
        """Return the address of a folder within this one."""
        return Place(self.uri, "/".join((self.path, *names)))

    def folders(self, marker: str, known: Callable[[str], bool], above: str = "") -> Iterator[str]:
        """Yield the folders below `above` that contain the file `marker`; folders in `known` need no request."""
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
    """The objects of a mirror below a prefix, or nothing.

    Methods raise UnreachableError if the store does not answer.
    """

    mirror: Mirror | None = None
    place: Place | None = None
    prefix: str = ""
    unsent: dict[str, str] = field(default_factory=dict)
    """Prefixes below which a push has failed, with the reason; shared by all parts of a mirror."""
    is_lost: Callable[[], bool] = lambda: False
    """Function that returns whether another process has taken the remote folder over."""

    def below(self, *names: str) -> Remote:
        """Return the remote copy of a folder or file within this one."""
        return replace(self, prefix="/".join((self.prefix, *names)).lstrip("/"))

    def pull(self, whole: bool = False, discard: bool = False) -> None:
        """Update the folder from the objects, as `Mirror.pull` does."""
        if self.mirror is not None:
            persistently(partial(self.mirror.pull, self.prefix, whole, discard))

    def push(self, needed: bool = False) -> None:
        """Send new files, including files that an earlier push could not send.

        Files that are not `needed` at once are sent in one attempt. If it fails, the next push repeats it.
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
        """Remove a remote folder that is not mirrored; ignore errors of the store."""
        if self.place is not None:
            with contextlib.suppress(OSError):
                self.place.filesystem.delete_dir(f"{self.place.base}/{name}")

    def save(self) -> None:
        """Record the mirrored files, so that later processes need not fetch them again."""
        if self.mirror is not None:
            self.mirror.save()

    def is_taken(self) -> bool:
        """Return whether another process, on any machine, is writing to the remote folder."""
        if self.place is None:
            return False
        other, _ = persistently(Lease(UnconditionalObjects(self.place.filesystem), self.place.base).look)
        return other is not None

    @contextlib.contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Hold the lease on the remote folder during the context, or raise UserError if another process has it."""
        if self.place is None:
            yield
            return
        from fedsweep.results.remote.conditional_writes import objects_of

        with Lease(objects_of(self.place.uri), self.place.base).acquired(what) as lease:
            self.is_lost = lambda: lease.lost
            yield

    def __reduce__(self) -> tuple[type[Remote], tuple[()]]:
        """Pickle as `NOTHING`: Ray pickles the search algorithm that contains this object, but never restores it."""
        return Remote, ()


NOTHING = Remote()
