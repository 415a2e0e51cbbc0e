"""The output at the end of a sweep if its report cannot be written or its MLflow runs are incomplete."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedsweep.cli import output as terminal
from fedsweep.results import Outcome, TrialRecord
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running import finish as finish_module
from fedsweep.sweep.running.finish import SweepResult, finish
from fedsweep.sweep.running.ray_tuner import SessionOutcome
from tests.report.conftest import Trials, make_manifest


def test_all_trials_are_in_mlflow_although_the_report_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def fails(*arguments: object) -> None:
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "table.csv").touch()  # an incomplete report, which could be mistaken for a complete one
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(finish_module, "write_report", fails)
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(terminal, "result_console", lambda: console)
    recorder = SimpleNamespace(close_sweep=lambda status, *rest: closed.append(status), unsynced=[], outage="")
    remote = SimpleNamespace(push=lambda: None, unsent={})
    sweep = SimpleNamespace(folder=tmp_path, manifest=make_manifest, remote=remote)
    plan, trials = Plan.read("ablations/lora_rank", {}, {}), Trials().arms({4: [0.5, 0.6]}).records
    result = finish(SessionOutcome(plan, sweep, recorder, trials, interrupted=False), console)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as end:
        terminal.show_sweep(result, "fedsweep ui")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert (end.value.code, result.status, closed) == (1, 1, ["FINISHED"])
    assert "The report could not be written: too many values to unpack." in said
    assert "run `fedsweep report ablations/lora_rank` to try again." in said
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 run is incomplete in MLflow"), (2, "2 runs are incomplete in MLflow")]
)
def test_a_warning_counts_the_runs_that_are_incomplete_in_mlflow(count: int, said: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    recorder = SimpleNamespace(unsynced=dict.fromkeys("ab"[:count], "not written yet"), outage="no answer.")
    terminal.show_undelivered(console, recorder, "fedsweep ui")  # type: ignore[arg-type]
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        f"{said}: no answer. The results folder has everything; run `fedsweep ui --deliver` to copy it to MLflow.\n"
    )


def test_the_reason_of_a_rejection_is_the_last_error_without_its_query() -> None:
    console = Console(file=io.StringIO(), width=200)
    trace = (
        "Traceback (most recent call last):\nsqlite3.OperationalError: attempt to write a readonly database\n"
        "mlflow.exceptions.MlflowException: (raised as a result of Query-invoked autoflush; consider another block)\n"
        "(sqlite3.OperationalError) attempt to write a readonly database\n"
        "[SQL: INSERT INTO tags]\n(Background on this error at: a page)\n"
    )
    recorder = SimpleNamespace(unsynced={"a": "not written yet", "b": trace}, outage=None)
    terminal.show_undelivered(console, recorder, "fedsweep ui")  # type: ignore[arg-type]
    assert console.file.getvalue().startswith(  # type: ignore[attr-defined]
        "2 runs are incomplete in MLflow: MLflow rejected them (attempt to write a readonly database). The results"
    )


def shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trials: list[TrialRecord], lost: str = ""
) -> tuple[int, list[str]]:
    """Print the end of a sweep, and return its exit code and the printed lines."""
    printed = io.StringIO()
    monkeypatch.setattr(terminal, "result_console", lambda: Console(file=printed, width=200))
    sweep = SimpleNamespace(folder=folder, remote=SimpleNamespace(unsent={}))
    recorder = SimpleNamespace(unsynced=[], outage="")
    plan = Plan.read("ablations/lora_rank", {}, {})
    session = SessionOutcome(plan, sweep, recorder, trials, interrupted=False, lost=lost)  # type: ignore[arg-type]
    result = SweepResult(session, None, None)
    with contextlib.suppress(SystemExit):
        terminal.show_sweep(result, "fedsweep ui")
    return result.status, printed.getvalue().splitlines()


def test_a_process_that_is_lost_after_the_last_trial_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials().arms({4: [0.5, 0.6]}).records
    status, said = shown(tmp_path, monkeypatch, trials, lost="the GCS on this machine")
    assert status == 0
    assert said[-1] == (
        "After the last trial had ended, the GCS on this machine was killed or has crashed; nothing was lost."
    )


def test_the_causes_of_failed_trials_are_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials().arms({4: [0.5, 0.6, 0.7]}).records
    reasons = ("the machine ran out of memory", "the machine ran out of memory", None)
    failed = [
        replace(trial, outcome=Outcome(outcome="failed", round=0, reason=reason))
        for trial, reason in zip(trials, reasons, strict=True)
    ]
    status, said = shown(tmp_path, monkeypatch, failed)
    assert status == 1
    assert said[-1] == "Cause of 2 failed trials: the machine ran out of memory."
    assert any(line.startswith("3 trials failed; see the tracebacks") for line in said)
