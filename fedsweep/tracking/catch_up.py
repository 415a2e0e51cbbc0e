"""MLflow brought up to what a store holds: after an outage, for a lost database, or for another server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fedsweep.common.files import LockedError, locked
from fedsweep.results import Store, SweepStore, TrialStore, count_outcomes
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.recorder import Recorder, Tell, silently


def deliver_all(store: Store, destination: Destination, tell: Tell = silently) -> Iterator[tuple[str, dict[str, str]]]:
    """Each sweep and run of a store as it is brought to MLflow, with what that did not take.

    Sweeps that another process is running are left to it.
    """
    for sweep in store.sweeps():
        sweep.fetch()
        if sweep.remote.is_taken():
            continue
        with contextlib.suppress(LockedError), locked(sweep.folder / ".lock", "taken"):
            yield f"{sweep.manifest().name} {sweep.manifest().id}", _deliver_sweep(store, sweep, destination, tell)
    runs = store.root / "runs"
    for run in store.runs():
        yield run.folder.relative_to(runs).as_posix(), _deliver_run(store, run.folder, runs, destination, tell)


def _deliver_sweep(store: Store, sweep: SweepStore, destination: Destination, tell: Tell) -> dict[str, str]:
    manifest, trials = sweep.manifest(), sweep.trials()
    recorder = Recorder(store, manifest.name, destination)
    recorder.open_sweep(manifest, sweep.folder)
    for trial in trials:
        (recorder.sync if trial.outcome else recorder.interrupt)(trial)
    report = sweep.folder / "report"
    whole = all(trial.outcome for trial in trials) and len(trials) >= (manifest.trials or 0)
    recorder.close_sweep(
        "FINISHED" if whole else "KILLED",
        {f"trials/{name}": float(number) for name, number in count_outcomes(trials).items()},
        report if report.exists() else None,
        tell,
    )
    return recorder.unsynced


def _deliver_run(store: Store, folder: Path, runs: Path, destination: Destination, tell: Tell) -> dict[str, str]:
    name = folder.parent.relative_to(runs).as_posix()
    with Recorder(store, name, destination) as recorder:
        recorder.sync(TrialStore(folder).read())  # one without an end may be running
        recorder.deliver(tell=tell)
    return recorder.unsynced
