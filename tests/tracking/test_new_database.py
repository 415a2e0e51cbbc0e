"""Several processes that open MLflow's database in one new results folder at the same time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Destination, Recorder
from tests.sweep.helpers import environment

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
Recorder(Store(Path("mlruns").absolute()), "tiny")
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
        raise OSError("not created in this test")

    monkeypatch.setattr(mlflow, "MlflowClient", created)
    with pytest.raises(UserError, match=r"^MLflow cannot open .*/mlflow\.db: not created in this test\.$"):
        Recorder(Store(tmp_path), "tiny")
    assert held == [f"sqlite:///{tmp_path / 'mlflow.db'}"]
