"""Sweeps that several processes run together, on one machine or on machines that share the results folder.

One process, the driver, holds the lock of the sweep. The other processes only train trials. Each worker locks the
folder of its trial while it trains, so no trial runs twice. Decisions, such as which arm is pruned, depend on recorded
metrics alone, so all processes make the same decisions. If the driver ends, another process becomes the driver.

This module does not import ray.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked
from fedsweep.results import SweepStore
from fedsweep.results.folders import ERROR
from fedsweep.results.records import Change
from fedsweep.results.steering import has_driver, joined

if TYPE_CHECKING:
    from fedsweep.sweep.plan.plan import Plan

LOOK_SECONDS = 1.0
"""Seconds between two looks at the trials of other processes."""
WATCHED = ("trial.json", "checkpoint.safetensors", "outcome.json", ERROR)
"""The files that show the progress of a trial."""


def check_shareable(plan: Plan) -> None:
    """Raise UserError if several processes cannot run the sweep of a plan together."""
    scheduler = plan.space.scheduler.name
    if scheduler in ("asha_async", "median", "pbt"):
        rule = "copies trials" if scheduler == "pbt" else "decides in the order in which trials report"
        raise UserError(
            f"{plan.name} cannot be joined, because `scheduler` {scheduler} {rule}; "
            "this needs `scheduler` none, arms or asha."
        )


@contextlib.contextmanager
def planning(sweep: SweepStore) -> Iterator[None]:
    """Let only this process write plans of trials, or change the plan of the sweep, within the block."""
    with locked(sweep.folder / ".plans.lock", "the plans are locked", seconds=-1):
        yield


class OtherTrials:
    """The trials that other processes run."""

    def __init__(self, sweep: SweepStore, present: bool = False) -> None:
        self.present = present
        """True if another process takes part in the sweep, or has done so in this session."""
        self.taken: set[str] = set()
        """The keys of the unfinished trials that other processes were running at one of the last two looks.

        A worker unlocks its trial for a moment after each round, so a single look can miss a running trial.
        """
        self._sweep, self._next = sweep, 0.0
        self._locked: set[str] = set()
        self._ended: set[str] = set()
        self._seen: dict[str, tuple[tuple[int, int], ...]] = {}

    def news(self, own: Collection[str]) -> list[str]:
        """Return the keys of the trials that other processes have changed since the last look.

        The result is empty if the last look was less than `LOOK_SECONDS` ago.

        Args:
            own: The keys of the trials that this process runs.
        """
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_SECONDS
        self.present = self.present or bool(joined(self._sweep))
        if not self.present:
            return []
        before, self._locked, found = self._locked, set(), []
        for folder in (self._sweep.folder / "trials").glob("[!.]*"):
            key = folder.name
            if key in self._ended:
                continue
            # A trial is released after its last round is written, so this order misses no round.
            if key not in own and self._sweep.trial(key).is_taken:
                self._locked.add(key)
            seen = tuple(map(_stamp, (folder / name for name in WATCHED)))
            if seen != self._seen.get(key):
                self._seen[key] = seen
                found += [key] * (key not in own)
            self._ended |= {key} if (folder / "outcome.json").exists() else set()
        self.taken.clear()
        self.taken |= (before | self._locked) - {*own} - self._ended
        return found

    def keep_away(self, key: str) -> None:
        """Leave a trial alone until the next look, because a worker has found that another process runs it."""
        self.present = True
        self.taken.add(key)
        self._locked.add(key)


def _stamp(path: Path) -> tuple[int, int]:
    """Return the time of the last change of a file, and its size; zeros if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


class Following:
    """A sweep whose driver is another process. It stands in the place of `Steering`."""

    def __init__(self, plan: Plan, sweep: SweepStore, known: int) -> None:
        """Follow a sweep.

        Args:
            plan: The plan of the sweep.
            sweep: The sweep.
            known: The number of changes that the plan contains.
        """
        self.plan, self.interrupted = plan, False
        self.outdated = sweep.manifest().digests.get("definition") != plan.digests()["definition"]
        """True if the driver has changed the sweep since the plan was made."""
        self.paused = self.outdated
        """True if the driver has changed the sweep or has ended, so that the running trials must end their rounds."""
        self._sweep, self._known, self._next, self._stopped = sweep, known, 0.0, False

    def look(self) -> bool:
        """Look whether the driver is still there and has changed the sweep, and return whether it was told to stop."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_SECONDS
            with contextlib.suppress(OSError):  # of a network file system
                alone = not has_driver(self._sweep)  # first, because a driver records a stop before it ends
                changes = self.changes()
                self._stopped = any(one.kind == "stopped" for one in changes)
                self.paused = self.paused or alone or bool(changes)
        return self._stopped

    def changes(self) -> Sequence[Change]:
        """Return the changes that the driver has made and that the plan does not contain."""
        return self._sweep.manifest().changes[self._known :]

    @contextlib.contextmanager
    def planning(self) -> Iterator[bool]:
        """Let only this process write plans within the block, and yield whether its plan of the sweep is current."""
        with planning(self._sweep):
            yield not self.outdated and not self.changes()
