"""The result of a sweep, and the function that writes the report, ends the MLflow run and uploads the results."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedsweep.common.errors import disk_is_full
from fedsweep.common.progress import waiting
from fedsweep.report import AblationTable, Report, summarise, write_report
from fedsweep.results import OutcomeName, TrialRecord, count_outcomes
from fedsweep.sweep.running.display import delivering
from fedsweep.sweep.running.ray_tuner import SessionOutcome


@dataclass(frozen=True)
class SweepResult:
    """The result of one session of a sweep.

    A session lasts from the start or resumption of a sweep to its end or interruption.
    """

    session: SessionOutcome
    report: Report | None
    """None if no trial has recorded a round, or if the report could not be written."""
    report_error: Exception | None
    interrupted_status: int = 130
    """The exit status if the session was interrupted: 128 plus the number of the signal."""

    @property
    def folder(self) -> Path:
        """The sweep's folder on this machine."""
        return self.session.sweep.folder

    @property
    def trials(self) -> Sequence[TrialRecord]:
        """All trials, in the order of the plan."""
        return self.session.trials

    @property
    def tally(self) -> Mapping[OutcomeName, int]:
        """The number of ended trials with each outcome."""
        return count_outcomes(self.trials)

    @property
    def disk_full(self) -> bool:
        """True if the disk was full when a trial or the report was written."""
        return self.session.disk_full or (self.report_error is not None and disk_is_full(self.report_error))

    @property
    def status(self) -> int:
        """The exit status of the command.

        It is 128 plus the number of the signal if trials are left to run (130 after Ctrl-C), 1 if a trial or the report
        failed, and otherwise 0. If results could not be stored, or if trials are left to run because Ray has lost a
        process, it is always 1.
        """
        session = self.session
        lacking = self.disk_full or session.remote_error or session.sweep.remote.unsent
        if session.interrupted:
            return 1 if lacking or session.lost else self.interrupted_status
        return int(bool(lacking or self.tally["failed"] or self.report_error))


def finish(
    session: SessionOutcome,
    console: Console,
    show: Callable[[Report], object] = lambda report: None,
    interrupted_status: int = 130,
) -> SweepResult:
    """Write the report of a sweep, end its MLflow run, and upload the results to the remote store, if there is one.

    The MLflow run is ended even if the report cannot be written. `show` is called with the report before MLflow is
    contacted, because MLflow may be slow to answer. `interrupted_status` is the exit status if trials are left to run.
    """
    folder = session.sweep.folder / "report"
    report, failed = None, None
    if session.left:  # its driver writes the report
        return SweepResult(session, None, None, interrupted_status)
    try:
        if session.recorder is None:  # its driver has written the report
            manifest = session.sweep.manifest()
            table = AblationTable(manifest, summarise(manifest, session.trials))
            report = Report(table, session.trials, (), folder, tuple(sorted(folder.glob("*"))))
        elif any(trial.history for trial in session.trials):
            with waiting(console, "Writing the report"):
                report = write_report(session.sweep.manifest(), session.trials, folder)
    except Exception as error:
        if session.recorder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete report would look complete
        failed = error
    if report is not None:
        show(report)
    result = SweepResult(session, report, failed, interrupted_status)
    counts = {f"trials/{name}": float(number) for name, number in result.tally.items()}
    status = "KILLED" if session.interrupted else "FINISHED"
    if session.recorder is not None:
        with delivering(console) as tell:
            session.recorder.close_sweep(status, counts, folder if folder.exists() else None, tell)
    session.sweep.remote.push()
    return result
