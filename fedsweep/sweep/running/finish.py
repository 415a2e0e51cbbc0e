"""The end of a sweep: the report, MLflow closed, a remote store pushed, and the exit status."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedsweep.common.errors import disk_is_full
from fedsweep.report import Report, write_report
from fedsweep.results import OutcomeName, TrialRecord, count_outcomes
from fedsweep.sweep.running.display import delivering
from fedsweep.sweep.running.tuner import SessionOutcome


@dataclass(frozen=True)
class SweepResult:
    """A sweep at the end of a session: its trials, its report, and what could not be written."""

    session: SessionOutcome
    report: Report | None
    """None where no trial has recorded a round, or the report could not be made."""
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
        """Ended trials by outcome."""
        return count_outcomes(self.trials)

    @property
    def disk_full(self) -> bool:
        """Whether a trial or the report found no space on the disk."""
        return self.session.disk_full or (self.report_error is not None and disk_is_full(self.report_error))

    @property
    def status(self) -> int:
        """The exit status: 0, 130 after Ctrl-C, or 1 where a trial failed or something could not be written."""
        lacking = self.disk_full or self.session.remote_error or self.session.sweep.remote.unsent
        if self.session.interrupted:
            return 1 if lacking else 130
        return int(bool(lacking or self.tally["failed"] or self.report_error))


def finish(session: SessionOutcome, console: Console) -> SweepResult:
    """Write the report, close the parent run in MLflow, and push what a remote store lacks.

    A report that cannot be made is part of the result: it keeps no trial from MLflow.
    """
    folder = session.sweep.folder / "report"
    report, failed = None, None
    try:
        if any(trial.history for trial in session.trials):
            report = write_report(session.sweep.manifest(), session.trials, folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # a part of it would look like the whole
        failed = error
    result = SweepResult(session, report, failed)
    with delivering(console) as tell:
        session.recorder.close_sweep(
            "KILLED" if session.interrupted else "FINISHED",
            {f"trials/{name}": float(number) for name, number in result.tally.items()},
            folder if folder.exists() else None,
            tell,
        )
    session.sweep.remote.push()
    return result
