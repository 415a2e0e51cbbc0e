"""Faults during a sweep, after which its table must equal that of an undisturbed sweep in every digit.

A killed driver and a single Ctrl-C are tested in `test_end_to_end.py`, a lost node in `test_cluster_sweep.py`.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sweep.helpers import (
    GRID,
    SMALL,
    assert_mlflow_equals_store,
    command,
    environment,
    fedsweep,
    histories,
    kill,
    newest,
    played,
    runs,
    start,
    table,
    wait_for_rounds,
    workers_of,
    write_space,
)

pytestmark = pytest.mark.slow

ARMS = {
    **GRID,
    "fixed": {**SMALL, "local.steps": 6},
    "space": {"optimizer.lr": {"grid": [0.01, 0.03, 0.06, 0.1, 0.2, 0.3]}},
    "seeds": [0],
    "baseline": {"optimizer.lr": 0.3},
    "scheduler": {"name": "arms", "grace_rounds": 1, "reduction_factor": 3},
}
"""A search space in which some arms are pruned."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep with pruned arms, one trial after the other, and return its working directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_space(folder, "arms", ARMS)
    fedsweep(folder, "tune", "arms", "--at-once", "1")
    return folder


def assert_the_same(folder: Path, undisturbed: Path) -> None:
    assert table(folder, "arms") == table(undisturbed, "arms")
    assert histories(newest(folder, "arms")) == histories(newest(undisturbed, "arms"))
    assert_mlflow_equals_store(folder, "arms")


def test_arms_are_pruned_and_rounds_that_ran_in_advance_are_not_shown(undisturbed: Path) -> None:
    ends = {
        trial.plan.arm["optimizer.lr"]: trial.outcome and (trial.outcome.outcome, trial.outcome.round)
        for trial in newest(undisturbed, "arms").trials()
    }
    assert ends[0.3] == ("finished", 3)  # the baseline is never pruned
    assert ("pruned", 1) in ends.values()
    assert_mlflow_equals_store(undisturbed, "arms")
    _, children, _ = runs(undisturbed, "arms")
    fallen = [run for run in children if run.data.tags["fedsweep.outcome"] == "pruned"]
    assert all("below the last promoted arm" in run.data.tags["fedsweep.reason"] for run in fallen)
    assert fallen


def test_a_killed_worker_a_killed_driver_and_two_ctrl_c_do_not_change_the_arms(
    undisturbed: Path, tmp_path: Path
) -> None:
    write_space(tmp_path, "arms", ARMS)
    process = start(tmp_path, "tune", "arms")
    wait_for_rounds(tmp_path, "arms", 1, process)
    victims = workers_of(process.pid)
    assert victims
    victims[0].kill()
    wait_for_rounds(tmp_path, "arms", 4, process)  # its trial continues in another worker
    kill(process)

    process = start(tmp_path, "tune", "arms", "--resume")
    wait_for_rounds(tmp_path, "arms", played(tmp_path, "arms") + 1, process)
    os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=0.3)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode in (130, 0), out + error
    assert "Traceback" not in out + error
    fedsweep(tmp_path, "tune", "arms", "--resume")
    assert_the_same(tmp_path, undisturbed)


def end(process: subprocess.Popen[str], number: signal.Signals, victims: str) -> None:
    """Send a signal to the driver's whole process group (`group`), or to Ray's process with the name `victims`."""
    if victims == "group":
        rays = [one for one in psutil.Process(process.pid).children() if one.name() in ("raylet", "gcs_server")]
        assert len(rays) == 2
        assert process.pid not in {os.getpgid(one.pid) for one in rays}  # otherwise, Ray may end the driver
        os.killpg(process.pid, number)
        return
    found = [one for one in psutil.Process(process.pid).children() if one.name() == victims]
    assert len(found) == 1
    found[0].send_signal(number)


@pytest.fixture
def rays_parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let Ray's folders be created in a folder of their own, whose path is short."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_a_lost_ray_and_sigterm_to_all_processes_end_the_session_with_a_table(
    undisturbed: Path, tmp_path: Path, rays_parent: Path
) -> None:
    write_space(tmp_path, "arms", ARMS)
    lost = r"was killed or has crashed\. All recorded rounds are kept, with \d of 6 trials finished\. To continue, run"
    cases = (
        (signal.SIGKILL, "raylet", 1, rf"Stopped because the raylet on this machine {lost}"),
        (signal.SIGKILL, "gcs_server", 1, rf"Stopped because the GCS on this machine {lost}"),
        (signal.SIGTERM, "group", 143, r"Stopped with \d of 6 trials finished\. To continue, run"),
    )
    for number, (kind, victims, code, sentence) in enumerate(cases):
        before = played(tmp_path, "arms") if number else 0
        process = start(tmp_path, "tune", "arms", *(["--resume"] if number else []))
        wait_for_rounds(tmp_path, "arms", before + 1, process)
        end(process, kind, victims)
        out, error = process.communicate(timeout=120)
        assert process.returncode == code, out + error
        assert re.search(sentence, " ".join(out.split())), out + error
        assert "Traceback" not in out + error
        assert "raylet)" not in out + error  # Ray's own log
        assert list(rays_parent.iterdir()) == []
        parents, children, _ = runs(tmp_path, "arms")
        assert {run.info.status for run in (*parents, *children)} <= {"KILLED", "FINISHED"}
        assert (newest(tmp_path, "arms").folder / "report" / "table.csv").exists()
    fedsweep(tmp_path, "tune", "arms", "--resume")
    assert_the_same(tmp_path, undisturbed)


FULL_DISK = """
mount -t tmpfs -o size={room}k none {store} || exit 77
{tune} tune arms > first.txt 2>&1; code=$?
df -k {store} | tail -1; cat first.txt; echo "code $code"
mount -o remount,size=200m {store}
{tune} tune arms --resume > second.txt 2>&1; code=$?
cat second.txt; echo "then $code"
cp -r {store} kept
"""


def test_a_full_disk_ends_the_session_and_the_sweep_can_be_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """The sweep runs in its own mount namespace on a file system that is too small for its results."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    write_space(tmp_path, "arms", ARMS)
    store = tmp_path / "mlruns"
    store.mkdir()
    used = sum(path.stat().st_size for path in (undisturbed / "mlruns").rglob("*") if path.is_file())
    script = FULL_DISK.format(room=int(used * 0.7 / 1024), store=store, tune=" ".join(command()))
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=290,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("a file system cannot be mounted here")
    assert "code 1" in done.stdout, done.stdout + done.stderr
    assert "the disk is full" in done.stdout
    assert "then 0" in done.stdout, done.stdout + done.stderr
    shutil.rmtree(store, ignore_errors=True)
    shutil.move(tmp_path / "kept", store)
    assert table(tmp_path, "arms") == table(undisturbed, "arms")
    assert histories(newest(tmp_path, "arms")) == histories(newest(undisturbed, "arms"))
