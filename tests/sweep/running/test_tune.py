"""The Python function `tune`, from the YAML file to the report, with trials that run in this process."""

import contextlib
import io
import json
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.files import LockedError, locked
from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.report import Report
from fedsweep.results import Outcome, TrialPlan
from fedsweep.sweep import TuneOptions, tune
from fedsweep.sweep.cluster import ray_session
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.running import ray_tuner
from fedsweep.sweep.running.open_sweep import Prepared
from fedsweep.sweep.running.recording import Recording
from tests.fixtures import NewStore
from tests.sweep.helpers import GRID, SMALL, TUNED, assert_mlflow_equals_store, newest, runs, table, write_space


@pytest.fixture
def in_process(tmp_path: Path, new_store: NewStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run trials in this process instead of Ray, and return the list of their keys.

    The first session ends after one trial, as if it were interrupted.
    """
    ran: list[str] = []

    def fit(ready: Prepared, recording: Recording, planned: Sequence[TrialPlan]) -> None:
        left = [trial for trial in planned if recording.sweep.trial(trial.key).outcome() is None]
        for trial in left if ran else left[:1]:
            ran.append(trial.key)
            recording.announce(trial)
            *_, last = run_resumably(RunConfig.of(trial.config, "test"), recording.sweep.trial(trial.key).checkpoint)
            recording.end(trial.key, Outcome(outcome="finished", round=last.round))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_session, "started_early", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(ray_session, "ray_session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(ray_tuner, "_tune", fit)
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    new_store(tmp_path / "mlruns")
    write_space(tmp_path, "tiny", {**GRID, "fixed": {**SMALL, "data.test_fraction": 0.05, "federation.depths": [3, 2]}})
    return ran


def test_tune_writes_the_report_ends_the_parent_run_and_returns_the_outcome(
    in_process: list[str], tmp_path: Path
) -> None:
    options = TuneOptions("tiny", {"federation.rounds": 1}, {"seeds": [0]}, id_file=str(tmp_path / "id"))
    shown: list[Report] = []

    def show(report: Report) -> None:
        """Record the shown report while this process still holds the sweep and the parent run is open."""
        shown.append(report)
        (parent,), _, _ = runs(tmp_path, "tiny")
        assert parent.info.status == "RUNNING"
        with pytest.raises(LockedError), locked(newest(tmp_path, "tiny").folder / ".lock", "busy"):
            pass

    stopped = tune(options, show=show)
    assert shown == [stopped.report]
    assert (tmp_path / "id").read_text().strip() == stopped.folder.name
    assert (stopped.status, stopped.session.interrupted, len(stopped.trials)) == (130, True, 1)
    assert stopped.report is not None
    (parent,), _, _ = runs(tmp_path, "tiny")
    assert parent.info.status == "KILLED"

    continued = replace(options, overrides={}, space_options={}, resume=True)
    path = stopped.folder / "sweep.json"
    begun = path.read_text()
    manifest = json.loads(begun)
    assert manifest["device"] == "cpu"
    path.write_text(json.dumps({**manifest, "device": "cuda"}))
    with pytest.raises(UserError, match="was started on a GPU, but this machine has no GPU"):
        tune(continued)
    assert len(in_process) == 1
    path.write_text(begun)
    result = tune(continued)
    assert (result.status, result.session.interrupted, result.tally["finished"]) == (0, False, 2)
    assert in_process == [trial.plan.key for trial in result.trials]
    assert result.folder == stopped.folder
    assert result.report is not None
    assert (result.report.folder / "table.csv").read_text() == table(tmp_path, "tiny")
    (parent,), children, _ = runs(tmp_path, "tiny")
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert parent.data.metrics["trials/finished"] == 2
    assert_mlflow_equals_store(tmp_path, "tiny")


def test_nothing_is_opened_if_ray_does_not_start(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise UserError("Ray did not start on this machine.")

    monkeypatch.setattr(ray_session, "ray_session", late)
    before = sorted((tmp_path / "mlruns").iterdir())
    options = TuneOptions("tiny", {"federation.rounds": 1}, {"seeds": [0]})
    with pytest.raises(UserError, match="Ray did not start"):
        tune(options)
    assert not list((tmp_path / "mlruns").rglob("sweep.json"))
    assert sorted((tmp_path / "mlruns").iterdir()) == before
    assert in_process == []


def test_a_sweep_whose_trials_are_all_reused_ends_without_ray(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[str] = []

    def session(*_: object) -> contextlib.AbstractContextManager[None]:
        sessions.append("started")
        return contextlib.nullcontext()

    monkeypatch.setattr(ray_session, "ray_session", session)
    single = {"space": {"lora.rank": {"grid": [4]}}, "seeds": [0]}
    few = {**SMALL, "data.test_fraction": 0.05, "federation.depths": [3, 2], "federation.rounds": 1}
    write_space(tmp_path, "one", {**GRID, **single, "fixed": few})
    first = tune(TuneOptions("one"))
    said = io.StringIO()
    second = tune(TuneOptions("one"), Console(file=said, width=200))
    assert (first.status, second.status, len(sessions), len(in_process)) == (0, 0, 1, 1)
    assert second.folder != first.folder
    assert (second.folder / "report/table.csv").read_text() == (first.folder / "report/table.csv").read_text()
    assert "1 of 1 trials is reused from earlier sweeps; add `--fresh` to run all trials again." in said.getvalue()


def test_seeds_until_decided_that_are_all_reused_need_no_ray(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(ready: Prepared, recording: Recording, planned: Sequence[TrialPlan]) -> None:
        assert isinstance(recording.state, SeedState)
        while wanted := recording.state.wanted():
            trial = recording.state.plans[wanted[0][0]]
            in_process.append(trial.key)
            recording.announce(trial)
            [*run_resumably(RunConfig.of(trial.config, "test"), recording.sweep.trial(trial.key).checkpoint)]
            recording.state.refresh(trial.key)
            recording.decide()

    def started(*_: object) -> None:
        raise AssertionError("no trial is left to run")

    monkeypatch.setattr(ray_tuner, "_tune", fit)
    few = {**SMALL, "data.test_fraction": 0.05, "federation.depths": [3, 2], "federation.rounds": 1}
    seeds = {"until": "decided", "at_least": 2, "at_most": 9, "smallest_effect": 20}
    write_space(tmp_path, "decided", {**GRID, "fixed": few, "seeds": seeds})
    first = tune(TuneOptions("decided"))
    assert (first.status, len(first.trials)) == (0, len(in_process))
    assert len(in_process) < 2 * seeds["at_most"]
    monkeypatch.setattr(ray_session, "started_early", started)
    monkeypatch.setattr(ray_session, "ray_session", started)
    for options in (TuneOptions("decided"), TuneOptions("decided", resume=True)):
        again = tune(options)
        assert (again.status, len(again.trials)) == (0, len(first.trials))
        assert (again.folder / "report/table.csv").read_text() == (first.folder / "report/table.csv").read_text()
    assert len(in_process) == len(first.trials)
    with pytest.raises(AssertionError, match="no trial is left to run"):
        tune(TuneOptions("decided", fresh=True))
    with pytest.raises(AssertionError, match="no trial is left to run"):
        tune(TuneOptions("decided", overrides={"local.steps": 2}))


def test_linked_sweeps_share_one_ray_and_start_none_if_all_trials_are_reused(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def started(*_: object) -> Iterator[SimpleNamespace]:
        events.append("start")
        yield SimpleNamespace(workers=2)
        events.append("end")

    def written(self: object, *_: object) -> tuple[()]:
        events.append("report")
        return ()

    monkeypatch.setattr(ray_session, "started_early", started)
    monkeypatch.setattr(ray_session, "is_idle", lambda: True)
    monkeypatch.setattr(ray_session, "start_workers", lambda number: events.append(f"{number} workers"))
    monkeypatch.setattr("fedsweep.report.write_figures", written)
    few = {**TUNED["fixed"], "data.test_fraction": 0.05, "federation.depths": [3, 2], "federation.rounds": 1}
    tune_each = {**TUNED["tune_each"], "samples": 2}
    write_space(tmp_path, "tuned", {**TUNED, "fixed": few, "seeds": [0], "tune_each": tune_each})
    assert tune(TuneOptions("tuned")).status == 130
    assert events == ["start", "end", "report"]
    events.clear()
    assert tune(TuneOptions("tuned", resume=True)).status == 0
    kept = ["2 workers", "report"]
    assert events == ["start", *kept, *kept, "end", "report"]
    events.clear()
    trials = len(in_process)
    assert tune(TuneOptions("tuned")).status == 0
    assert (events, len(in_process)) == (["report"] * 3, trials)


def test_options_that_contradict_each_other_are_rejected() -> None:
    with pytest.raises(UserError, match="needs `--resume`"):
        TuneOptions("tiny", sweep_id="x")
    with pytest.raises(UserError, match="cannot be combined with `--resume`"):
        TuneOptions("tiny", fresh=True, resume=True)
    with pytest.raises(UserError, match=r"^`--id-file` none/id cannot be written: none is not a writable folder\.$"):
        TuneOptions("tiny", id_file="none/id")
    with pytest.raises(UserError, match="only counts parameters; use `fedsweep show`"):
        tune(TuneOptions("papers/fedbrick/table3"))


@pytest.mark.parametrize("again", [{"resume": True}, {"fresh": True}])
def test_a_sweep_in_a_copy_of_the_results_changes_nothing_in_the_original(
    in_process: list[str],
    tmp_path: Path,
    again: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original, copy = tmp_path / "mlruns", tmp_path / "copy"
    tune(TuneOptions("tiny", {"federation.rounds": 1}, {"seeds": [0]}))
    shutil.copytree(original, copy)
    before = content(original)
    # Within one process, MLflow remembers the artifact folder of each run.
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._artifact_repos_cache", OrderedDict())
    done = tune(TuneOptions("tiny", {"federation.rounds": 1}, {"seeds": [0]}, store=str(copy), **again))
    assert (done.status, len(in_process)) == (0, 2 if "resume" in again else 3)
    assert content(original) == before
    assert list((copy / "artifacts/tiny").rglob("table.csv"))
    assert "copied" not in capsys.readouterr().err


def content(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
