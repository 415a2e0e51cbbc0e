"""A thread that writes runs to MLflow, so that the driver of a sweep never waits for a database or a server."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from fedsweep.common.errors import UserError, one_line, warn
from fedsweep.common.files import LockedError, locked, write_atomically
from fedsweep.results import Store, SweepManifest, SweepStore, TrialRecord, count_outcomes
from fedsweep.tracking.destination import SERVER, Destination, check_writable
from fedsweep.tracking.experiment import error_sentence
from fedsweep.tracking.parent_and_child_runs import Runs

Job = Callable[[], None]
Tell = Callable[[int], None]
PARENT, END = "the parent run", "the parent run's end"
PATIENCE = 20.0  # seconds without a successful write, after which `deliver` no longer waits
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts to write; the pause doubles with each failure."""
TRIES = 3  # attempts at a write that MLflow rejects, before it is postponed until the run's next sync or the end


class Recorder:
    """A recorder that writes one MLflow run per trial. The runs of a sweep's trials are children of a parent run.

    Only `deliver` and `close_sweep` wait for MLflow. Errors of MLflow are not raised: runs that are not fully written
    are listed in `unsynced`. No data are lost, because the results folder contains all records.
    """

    def __init__(self, store: Store, experiment: str, destination: Destination | None = None) -> None:
        """Open the local database if it exists. A server is not contacted until the first write.

        If the database does not exist yet, nothing is written until `begin` or `deliver` is called. MLflow needs
        seconds to create its tables, which would delay the start of the first trials.

        Raises:
            UserError: The local database cannot be opened, or its folder is not writable.
        """
        self.destination = destination or Destination.of(store.root)
        self._experiment = experiment
        self._held = not self.destination.exists()
        if self.destination.artifacts is not None:
            if self._held:
                check_writable(self.destination.artifacts.parent)
            else:
                _ = self.runs
        self.outage: str | None = None
        """The error message while MLflow cannot be used, or None."""
        self._news = threading.Condition()
        self._due: dict[str, Job] = {}
        self._refused: dict[str, Job] = {}
        self._errors: dict[str, str] = {}
        self._tries: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._now = threading.Event()

    @cached_property
    def runs(self) -> Runs:
        """The runs of the MLflow experiment. In a local database, the tables and the experiment are created.

        Raises:
            UserError: The local database cannot be opened or created.
        """
        if self.destination.server:
            return Runs(self.destination, self._experiment)
        try:
            runs = Runs(self.destination, self._experiment)
            with self.destination.lock():
                _ = runs.experiment.id
        except Exception as error:  # MLflow and the libraries below it raise many types
            reason = one_line(error)[:300].rstrip(".")
            database = self.destination.uri.removeprefix("sqlite:///")
            raise UserError(f"MLflow cannot open {database}: {reason}.") from None
        return runs

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.deliver()

    def begin(self) -> None:
        """Start the queued writes, the first of which creates the local database if it does not exist."""
        with self._news:
            self._held = False
            self._start()

    def open_sweep(self, manifest: SweepManifest, folder: Path) -> None:
        """Queue the opening of a sweep's parent run, which is created if it does not exist.

        Call this method before calling `sync` for the sweep's trials.
        """
        if self.destination.server:
            write_atomically(folder / SERVER, f"{self.destination.uri}\n".encode())
        self._put(PARENT, lambda: self.runs.open_sweep(manifest, folder))

    def close_sweep(
        self, status: str, metrics: Mapping[str, float], artifacts: Path | None = None, tell: Tell = lambda left: None
    ) -> None:
        """End the parent run, and call `deliver` to wait until all runs are written.

        Args:
            status: MLflow's status of the parent run, such as `FINISHED`.
            metrics: Metrics of the sweep, such as the number of finished trials.
            artifacts: The folder of the report, if there is a report.
            tell: A function that is called about once a second with the number of runs that are not written yet.
        """
        self._put(END, lambda: self.runs.close_sweep(status, metrics, artifacts))
        self.deliver(tell)

    def sync(self, trial: TrialRecord) -> None:
        """Queue an update of a trial's run, and return at once."""
        self._put(trial.plan.key, lambda: self.runs.sync(trial))

    def interrupt(self, trial: TrialRecord) -> None:
        """Queue an update that marks a trial's run as interrupted. A resumed sweep continues the run."""
        self._put(trial.plan.key, lambda: self.runs.interrupt(trial))

    @property
    def unsynced(self) -> dict[str, str]:
        """The runs that are not fully written, as a dict from run to reason. A reason can be a traceback.

        A trial's run is named by the key of the trial. The other names are `the parent run` and `the parent run's end`.
        """
        with self._news:
            return {what: self._errors.get(what, "not written yet") for what in (*self._due, *self._refused)}

    def deliver(self, tell: Tell = lambda left: None) -> bool:
        """Wait for all queued writes, and return whether all runs are written.

        The wait ends early on Ctrl-C, or if no write succeeds for `PATIENCE` seconds. About once a second, `tell` is
        called with the number of runs that are not written yet.
        """
        with self._news:
            refused, self._refused = self._refused, {}
        for what, job in sorted(refused.items(), key=lambda one: one[0] == END):
            self._put(what, job)
        self.begin()
        self._now.set()
        left, deadline = -1, 0.0
        with contextlib.suppress(KeyboardInterrupt), self._news:
            while self._due:
                opening = "runs" not in vars(self) and not self._errors  # it may take long on a busy machine
                if len(self._due) != left or opening:
                    left, deadline = len(self._due), time.monotonic() + PATIENCE
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                tell(left)
                self._news.wait(min(remaining, 1.0))
        return not self.unsynced

    def _put(self, what: str, job: Job) -> None:
        """Queue the write `job` for the run `what`, in place of any older write for the same run."""
        with self._news:
            self._refused.pop(what, None)
            self._due[what] = job
            self._start()

    def _start(self) -> None:
        """Start the thread if a write is due, `begin` was called and no thread is running."""
        if self._due and self._thread is None and not self._held:
            self._thread = threading.Thread(target=self._write, name="mlflow", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        """Perform the queued writes until the queue is empty. The thread runs this function."""
        pause = FIRST_PAUSE
        while True:
            with self._news:
                if not self._due:
                    self._thread = None
                    return
                what, job = next(iter(self._due.items()))
            try:
                job()
            except Exception as error:
                self._failed(what, job, error)
                hurried = self._now.wait(pause)
                self._now.clear()
                pause = FIRST_PAUSE if hurried else min(2 * pause, LONGEST_PAUSE)
            else:
                pause = FIRST_PAUSE
                with self._news:
                    self.outage = None
                    self._errors.pop(what, None)
                    self._tries.pop(what, None)
                    if self._due[what] is job:  # otherwise a newer write is in the queue
                        del self._due[what]
                    self._news.notify_all()

    def _failed(self, what: str, job: Job, error: Exception) -> None:
        """Record the error of a failed write, and check whether MLflow is available.

        If MLflow is available, it has rejected the write. The write is then repeated after the other writes. After
        `TRIES` attempts, it is postponed until the next update of the run or the next call of `deliver`.
        """
        outage = str(error) if isinstance(error, UserError) else None  # the local database cannot be created
        if outage is None:
            try:
                self.runs.client.search_experiments(max_results=1)
            except Exception as trouble:
                outage = error_sentence(self.destination, trouble)
        with self._news:
            self.outage = outage
            self._errors[what] = "".join(traceback.format_exception(error))
            if outage is None:
                self._tries[what] += 1
                newest = self._due.pop(what)  # moved behind the other writes
                if self._tries[what] < TRIES or newest is not job:
                    self._due[what] = newest
                else:
                    self._refused[what] = newest
                    del self._tries[what]
            self._news.notify_all()


def deliver_all(
    store: Store, destination: Destination, tell: Tell = lambda left: None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Write all sweeps and single runs of a results folder to MLflow, except sweeps that are still running.

    Yields:
        The name of a sweep or single run, and its MLflow runs that could not be written, as a dict from run to reason.
    """
    for sweep in store.sweeps():
        sweep.fetch()
        if sweep.remote.is_taken():
            continue
        with contextlib.suppress(LockedError), locked(sweep.folder / ".lock", "taken"):
            try:
                trials = sweep.trials()
            except UserError as error:
                warn(f"sweep {sweep.folder.name} is left out: {error}")
                continue
            manifest = sweep.manifest()
            yield f"{manifest.name} {manifest.id}", _deliver_sweep(store, sweep, trials, destination, tell)
    for run in store.runs():
        path = run.folder.relative_to(store.root / "runs")
        try:
            record = run.read()
        except UserError as error:
            warn(f"the run {path.as_posix()} is left out: {error}")
            continue
        recorder = Recorder(store, path.parent.as_posix(), destination)
        _ = recorder.runs
        recorder.sync(record)  # not `interrupt`, because a run without an outcome may still be running
        recorder.deliver(tell)
        yield path.as_posix(), recorder.unsynced


def _deliver_sweep(
    store: Store, sweep: SweepStore, trials: Sequence[TrialRecord], destination: Destination, tell: Tell
) -> dict[str, str]:
    manifest = sweep.manifest()
    recorder = Recorder(store, manifest.name, destination)
    _ = recorder.runs  # if the local database cannot be created, this ends the command
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
