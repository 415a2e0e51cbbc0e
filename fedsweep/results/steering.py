"""The processes that run a sweep, and the requests by which other processes change the sweep.

The process that holds the lock of a sweep is called its driver. Other processes can take part in the sweep: they train
trials, but only the driver writes to MLflow and answers requests. If the driver ends, one of them becomes the driver.

A command such as `fedsweep drop` writes a request into the hidden folder `.requests` of the sweep. The driver looks for
requests several times a second, and answers each of them. No connection between the processes is needed, so the command
can also run on another machine that shares the results folder.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.files import is_locked, locked
from fedsweep.results.arms import Arm
from fedsweep.results.folders import SweepStore, read_record, write_record
from fedsweep.results.records import StoredRecord

REQUESTS, DRIVER, JOINED = ".requests", ".driver.json", ".joined"
ANSWER = ".answer"


class ExtendRequest(StoredRecord):
    """The request to run further seeds of every arm."""

    name: Literal["extend"] = "extend"
    seeds: tuple[int, ...] = Field(min_length=1, description="the new seeds")


class DropRequest(StoredRecord):
    """The request to stop an arm, and to leave it out of the results."""

    name: Literal["drop"] = "drop"
    arm: Arm = Field(description="all values of the arm, by dotted name")


class StopRequest(StoredRecord):
    """The request to stop the sweep, as Ctrl-C does."""

    name: Literal["stop"] = "stop"


Request = ExtendRequest | DropRequest | StopRequest
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="name")])


class Answer(StoredRecord):
    """The answer of the driver to a request."""

    error: str | None = Field(None, description="why the request was refused; null if it was granted")
    sentence: str = Field("", description="the change that was made, in words")


class Driver(Config):
    """A process that runs trials of a sweep."""

    what_a_name_is: ClassVar[str] = "an entry that this version of fedsweep knows"

    pid: int
    machine: str = Field(description="name of the machine on which the process runs")
    started: str = Field(description="time in UTC at which the process started to run the sweep, as in ISO 8601")
    parallel: int = Field(description="largest number of trials that run at the same time")
    planned: int | None = Field(
        None, description="number of trials until the next decision, for a sweep with seeds until decided"
    )

    @classmethod
    def here(cls, parallel: int) -> Driver:
        """Return the description of this process."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(pid=os.getpid(), machine=platform.node(), started=now, parallel=parallel)


def is_running(sweep: SweepStore) -> bool:
    """Return whether a process runs the sweep, or holds its lock for another reason such as a change."""
    return has_driver(sweep) or bool(joined(sweep))


def has_driver(sweep: SweepStore) -> bool:
    """Return whether a process holds the sweep's lock."""
    lock = sweep.folder / ".lock"
    try:
        return lock.exists() and is_locked(lock)
    except OSError:  # the folder belongs to somebody else, so its lock cannot be tried
        return (sweep.folder / DRIVER).exists()


@contextlib.contextmanager
def taking_part(sweep: SweepStore, parallel: int) -> Iterator[None]:
    """Keep the description of this process, which is not the driver, in the sweep's folder for the block."""
    here = Driver.here(parallel)
    place = sweep.folder / JOINED / f"{secrets.token_hex(8)}.json"
    with locked(place.with_suffix(".lock"), "the process already takes part in the sweep"):
        try:
            write_record(place, here)
            yield
        finally:
            for path in (place, place.with_suffix(".lock")):
                path.unlink(missing_ok=True)


def joined(sweep: SweepStore) -> list[Driver]:
    """Return the processes that take part in the sweep besides its driver. Those that were killed are left out."""
    found = []
    for path in sorted((sweep.folder / JOINED).glob("*.json")):
        with contextlib.suppress(UserError, OSError):  # the process has just ended
            if is_locked(path.with_suffix(".lock")):
                found.append(read_record(Driver, path))
    return found


@contextlib.contextmanager
def driving(sweep: SweepStore, parallel: int) -> Iterator[None]:
    """Keep the description of this process in the sweep's folder, and the folder of requests ready, for the block."""
    write_record(sweep.folder / DRIVER, Driver.here(parallel))
    (sweep.folder / REQUESTS).mkdir(exist_ok=True)  # it belongs to the driver, so that the driver can answer
    try:
        yield
    finally:
        (sweep.folder / DRIVER).unlink(missing_ok=True)


def keep_planned(sweep: SweepStore, planned: int) -> None:
    """Add the number of planned trials to the description of this process, which is the driver of the sweep."""
    path = sweep.folder / DRIVER
    write_record(path, read_record(Driver, path).model_copy(update={"planned": planned}))


def driver_of(sweep: SweepStore) -> Driver | None:
    """Return the process that runs the sweep, or None if no process runs it or it has just begun."""
    path = sweep.folder / DRIVER
    try:
        return read_record(Driver, path) if path.exists() and has_driver(sweep) else None
    except UserError:
        return None


def parallel_trials(sweep: SweepStore) -> int:
    """Return the largest number of trials that all processes of a sweep run at the same time; 0 if none is known."""
    driver = driver_of(sweep)
    return sum(one.parallel for one in (*joined(sweep), *([driver] if driver is not None else [])))


class Requests:
    """The folder of a sweep's requests. Each request is a file, and so is the answer to it."""

    def __init__(self, sweep: SweepStore) -> None:
        self._folder = sweep.folder / REQUESTS

    def ask(self, request: Request) -> str:
        """Write a request, and return its name; raise UserError if the folder cannot be written."""
        name = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}"
        try:
            write_record(self._folder / f"{name}.json", request)
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written: {error.strerror or error}.") from None
        return name

    def waiting(self) -> Iterator[tuple[str, Request]]:
        """Yield the name and the content of each request without an answer, oldest first.

        A request that cannot be read is refused.
        """
        try:
            names = sorted(one for one in os.listdir(self._folder) if one.endswith(".json") and one[0] != ".")
        except FileNotFoundError:
            return
        for name in (Path(one).stem for one in names if not one.endswith(f"{ANSWER}.json")):
            if self._answer(name).exists():
                continue
            try:
                request = _REQUEST.validate_json((self._folder / f"{name}.json").read_bytes())
            except OSError:  # it has just been withdrawn, or is not readable
                continue
            except ValidationError:
                self.answer(name, "the request was written by another version of fedsweep.")
                continue
            yield name, request

    def answer(self, name: str, error: str | None = None, sentence: str = "") -> None:
        """Answer a request, unless it was withdrawn. It is granted unless there is an error."""
        if (self._folder / f"{name}.json").exists():
            write_record(self._answer(name), Answer(error=error, sentence=sentence))

    def answered(self, name: str) -> Answer | None:
        """Return the answer to a request and remove both, or return None if there is no answer yet."""
        if not self._answer(name).exists():
            return None
        found = read_record(Answer, self._answer(name))
        self.withdraw(name)
        return found

    def withdraw(self, name: str) -> None:
        """Remove a request and its answer."""
        for path in (self._folder / f"{name}.json", self._answer(name)):
            path.unlink(missing_ok=True)

    def _answer(self, name: str) -> Path:
        return self._folder / f"{name}{ANSWER}.json"
