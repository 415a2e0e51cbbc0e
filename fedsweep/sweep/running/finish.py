"""End of a sweep: the report, the closing of MLflow's run, the upload to a remote store, and the exit status."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedsweep.common.errors import disk_is_full
from fedsweep.report import Report, write_report
from fedsweep.results import OutcomeName, TrialRecord, count_outcomes
from fedsweep.sweep.running.display import delivering
from fedsweep.sweep.running.ray_tuner import SessionOutcome


@dataclass(frozen=True)
class SweepResult:
    """The result of one session of a sweep: its trials, its report, and errors while writing them."""

    session: SessionOutcome
    report: Report | None
    """None if no trial has recorded a round, or the report failed."""
    report_error: Exception | None

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
        """The number of ended trials by outcome."""
        return count_outcomes(self.trials)

    @property
    def disk_full(self) -> bool:
        """True if the disk was full for a trial or for the report."""
        return self.session.disk_full or (self.report_error is not None and disk_is_full(self.report_error))

    @property
    def status(self) -> int:
        """The exit status: 0, 130 after Ctrl-C, or 1 if a trial failed or something could not be written."""
        lacking = self.disk_full or self.session.remote_error or self.session.sweep.remote.unsent
        if self.session.interrupted:
            return 1 if lacking else 130
        return int(bool(lacking or self.tally["failed"] or self.report_error))


def finish(
    session: SessionOutcome, console: Console, show: Callable[[Report], object] = lambda report: None
) -> SweepResult:
    """Write the report, close MLflow's parent run even if the report failed, and push to the remote store.

    `show` gets the report as soon as it is written, because MLflow may take a while to answer.
    """
    folder = session.sweep.folder / "report"
    report, failed = None, None
    try:
        if any(trial.history for trial in session.trials):
            report = write_report(session.sweep.manifest(), session.trials, folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete report would look complete
        failed = error
    if report is not None:
        show(report)
    result = SweepResult(session, report, failed)
    counts = {f"trials/{name}": float(number) for name, number in result.tally.items()}
    status = "KILLED" if session.interrupted else "FINISHED"
    with delivering(console) as tell:
        session.recorder.close_sweep(status, counts, folder if folder.exists() else None, tell)
    session.sweep.remote.push()
    return result
