"""Sweeps that `ray job submit` starts, stops and resumes from a machine outside of the cluster."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from ray._private.utils import write_ray_address
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.sweep.clusters import authenticated
from tests.sweep.helpers import (
    GRID,
    SMALL,
    assert_mlflow_equals_store,
    command,
    environment,
    histories,
    newest,
    play_alone,
    played,
    table,
    write_space,
)

pytestmark = pytest.mark.slow
MINUTES = 5 * 60
PATIENT = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}})


class Jobs:
    """The `ray job` commands against the dashboard of one cluster."""

    def __init__(self, address: str, store: Path) -> None:
        self.address, self.store = address, store
        self.client = JobSubmissionClient(address)

    def ray_job(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        ray = str(Path(sys.executable).with_name("ray"))
        whole = [ray, "job", verb, "--address", self.address, *words]
        return subprocess.run(whole, env=environment(), capture_output=True, text=True, timeout=MINUTES)

    def submit(self, name: str, folder: Path, *words: str, code: int = 0, options: tuple[str, ...] = ()) -> None:
        tune = command("tune", *words, "--address", "auto", "--store", str(self.store))
        files = ("--working-dir", str(folder), "--runtime-env-json", PATIENT)
        done = self.ray_job("submit", "--submission-id", name, *files, *options, "--", *tune)
        assert done.returncode == code, done.stdout + done.stderr

    def status(self, name: str) -> JobStatus:
        """Return the final status of a job.

        The log stream of a job may end before the job does (ray-project/ray#57002).
        """
        deadline = time.monotonic() + MINUTES
        while not (status := self.client.get_job_status(name)).is_terminal():
            assert time.monotonic() < deadline, self.client.get_job_logs(name)
            time.sleep(0.5)
        return status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Start a head node with two cores and a dashboard, and yield its `ray job` commands.

    Further nodes on this machine would overwrite the job's working directory.
    """
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}  # Ray's defaults are fixed
    with authenticated("token", tmp_path), tempfile.TemporaryDirectory() as own:  # short, for the names of sockets
        head = {"num_cpus": 2, "include_dashboard": True, "temp_dir": own, **ports}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        write_ray_address(cluster.address, own)  # as `ray start` does; jobs would join any Ray of this machine
        try:
            yield Jobs(f"http://{cluster.head_node.webui_url}", tmp_path / "mlruns")
        finally:
            cluster.shutdown()


def test_a_submitted_sweep_can_be_stopped_and_resumed(jobs: Jobs, tmp_path: Path) -> None:
    longer = {**GRID, "fixed": {**SMALL, "federation.rounds": 10}}
    for folder in (tmp_path / "laptop", tmp_path / "undisturbed"):
        write_space(folder, "tiny", longer)
    laptop = tmp_path / "laptop"

    with pytest.raises(HTTPError, match="401"):  # without the token
        urlopen(f"{jobs.address}/api/jobs/")  # noqa: S310

    jobs.submit("first", laptop, "tiny", options=("--no-wait",))
    deadline = time.monotonic() + MINUTES
    while not (list(jobs.store.rglob("sweep.json")) and played(tmp_path, "tiny") >= 2):
        assert not jobs.client.get_job_status("first").is_terminal(), jobs.client.get_job_logs("first")
        assert time.monotonic() < deadline, jobs.client.get_job_logs("first")
        time.sleep(0.1)
    assert jobs.ray_job("stop", "first").returncode == 0
    log = jobs.client.get_job_logs("first")
    assert jobs.status("first") == JobStatus.STOPPED, log
    assert "run the same command with --resume." in " ".join(log.split()), log  # the sweep ended as after Ctrl-C
    assert (newest(tmp_path, "tiny").folder / "report" / "table.csv").exists()

    jobs.submit("second", laptop, "tiny", "--resume")
    assert jobs.status("second") == JobStatus.SUCCEEDED
    play_alone(tmp_path / "undisturbed", "tiny")
    assert table(tmp_path, "tiny") == table(tmp_path / "undisturbed", "tiny")
    assert histories(newest(tmp_path, "tiny")) == histories(newest(tmp_path / "undisturbed", "tiny"))
    assert_mlflow_equals_store(tmp_path, "tiny")

    jobs.submit("third", laptop, "tinny", code=1)
    assert jobs.status("third") == JobStatus.FAILED
    assert jobs.client.get_job_info("third").driver_exit_code == 2
