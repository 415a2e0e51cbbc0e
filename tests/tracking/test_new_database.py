"""Several processes that open MLflow's database in one new results folder at the same time."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Destination, Recorder, recorder
from fedsweep.tracking.destination import UNNAMED
from tests.sweep.helpers import environment
from tests.tracking.helpers import trial

PROCESSES = 8
OPEN = """
import sys, time
from pathlib import Path

import mlflow

from fedsweep.results import Store
from fedsweep.tracking import Recorder

Path(f"ready-{sys.argv[1]}").touch()
while not Path("go").exists():
    time.sleep(0.001)
Recorder(Store(Path("mlruns").absolute()), "tiny").runs
"""


@pytest.mark.slow
def test_eight_processes_open_an_empty_results_folder_at_once(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, str(number)], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]  # fmt: skip
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("ready-*"))) < PROCESSES and time.monotonic() < deadline:
        time.sleep(0.1)
    (tmp_path / "go").touch()
    told = [one.communicate(timeout=300)[1] for one in started]
    assert [one.returncode for one in started] == [0] * PROCESSES, told
    found = Destination.of(tmp_path / "mlruns").client().search_experiments()
    assert sorted(one.name for one in found) == ["Default", "tiny"]


def test_the_tables_are_created_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from filelock import FileLock, Timeout

    held = []

    def created(tracking_uri: str) -> mlflow.MlflowClient:
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".mlflow.lock", blocking=False).acquire()
        held.append(tracking_uri)
        assert not (tmp_path / "mlflow.db").exists(), "a database without tables has no name that others could open"
        raise OSError("not created in this test")

    monkeypatch.setattr(mlflow, "MlflowClient", created)
    with pytest.raises(UserError, match=r"^MLflow cannot open .*/mlflow\.db: not created in this test\.$"):
        _ = Recorder(Store(tmp_path), "tiny").runs
    assert held == [f"sqlite:///{tmp_path / UNNAMED}"]


def test_what_a_killed_process_left_of_a_new_database_does_not_matter(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / UNNAMED)) as database:
        database.execute("CREATE TABLE latest_metrics (key TEXT)")  # which MLflow could not create again
    assert [one.name for one in Recorder(Store(tmp_path), "tiny").runs.client.search_experiments()] == [
        "tiny",
        "Default",
    ]
    assert not (tmp_path / UNNAMED).exists()


def test_a_missing_database_is_created_once_writing_begins_and_an_existing_one_is_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, trying = tmp_path / "mlruns" / "mlflow.db", threading.Event()
    held = Recorder(Store(database.parent), "tiny")

    def client(destination: Destination) -> None:
        trying.set()
        raise OSError(destination.uri)

    monkeypatch.setattr(Destination, "client", client)
    monkeypatch.setattr(recorder, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(recorder, "PATIENCE", 1.0)
    held.sync(trial(1))
    assert not trying.wait(0.2)
    assert not database.exists()
    held.begin()
    assert trying.wait(60)
    assert not held.deliver()
    assert held.outage == f"MLflow cannot open {database}: sqlite:///{database}."
    thread = held._thread
    held._due.clear()
    held._now.set()
    assert thread is not None
    with contextlib.suppress(KeyError):  # the write that is no longer due
        thread.join(60)
    database.touch()
    with pytest.raises(UserError, match=rf"^MLflow cannot open {database}: sqlite:///{database}\.$"):
        Recorder(Store(database.parent), "tiny")


@pytest.mark.parametrize("end", ["deliver", "with"])
def test_a_recorder_that_never_began_writes_in_the_end(end: str, tmp_path: Path) -> None:
    made = Recorder(Store(tmp_path), "tiny")
    if end == "with":
        with made:
            made.sync(trial(1))
            assert made._thread is not None
    else:
        made.sync(trial(1))
        assert made.deliver()
    assert (made.unsynced, len(made.runs.experiment.search({}))) == ({}, 1)


def test_a_missing_database_in_a_folder_that_cannot_be_written_is_an_error_before_the_first_write(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^the results folder .*/file/mlruns cannot be written: Not a directory\.$"):
        Recorder(Store(tmp_path / "file" / "mlruns"), "tiny")
