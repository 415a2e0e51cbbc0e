"""Whole sweeps through Ray Client: their driver runs on the head, and nothing else is different."""

import signal
import socket
from pathlib import Path

import pytest

from tests.sweep.clusters import authenticated, ray_cluster
from tests.sweep.helpers import (
    GRID,
    SMALL,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    newest,
    play_alone,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = [
    pytest.mark.slow,
    # Ray leaves the log files open with which it starts the server for its clients.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LONGER = {**GRID, "fixed": {**SMALL, "federation.rounds": 12}, "seeds": [0]}


def test_a_sweep_through_ray_client_is_interrupted_and_goes_on_with_the_numbers_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        write_space(folder, "tiny", LONGER)
    play_alone(here, "tiny")
    # Three attempts of one second where a token is refused, and a client that could not be served is soon forgotten.
    for name, seconds in (("INITIAL_CONNECTION_TIMEOUT_S", 1), ("MAX_CONNECTION_TIMEOUT_S", 1)):
        monkeypatch.setenv(f"RAY_CLIENT_{name}", str(seconds))
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "5")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with authenticated("token", tmp_path) as token, ray_cluster(1, head={"ray_client_server_port": port}) as cluster:
        tune = ("tune", "tiny", "--address", f"ray://{cluster.address.split(':')[0]}:{port}")
        with monkeypatch.context() as patch:
            patch.delenv("RAY_AUTH_TOKEN_PATH")
            patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
            refused = fedsweep(there, *tune, code=2)
        assert "asks for a token, and the token given is not the cluster's; " in refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr

        process = start(there, *tune)
        wait_for_rounds(there, "tiny", 2, process)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=280)
        assert process.returncode == 130, out + error
        assert "Stopped with " in out
        assert any(trial.outcome is None for trial in newest(there, "tiny").trials())
        done = fedsweep(there, *tune, "--resume")
        assert "The sweep's driver runs on " in done.stderr
        assert "The sweep runs on 1 node of the Ray cluster" in done.stderr
        assert token.read_text() not in out + error + done.stdout + done.stderr
    assert table(there, "tiny") == table(here, "tiny")
    assert histories(newest(there, "tiny")) == histories(newest(here, "tiny"))
    assert_mlflow_equals_store(there, "tiny")
