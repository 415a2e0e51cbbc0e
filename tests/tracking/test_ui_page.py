"""The server of MLflow's page, which listens on loopback or accepts only requests to the machine's own names."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.cli import run as verbs
from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Recorder
from fedsweep.tracking.ui import answers, check_free, page_url, server_command
from tests.sweep.helpers import command, environment
from tests.tracking.helpers import MANIFEST, finished, sweep_folder
from tests.tracking.servers import free_port

ANYWHERE = "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("localhost", True), (ANYWHERE, False)])
def test_loopback_addresses_are_recognised(host: str, loopback: bool) -> None:
    assert check_free(host, free_port()) is loopback


def test_a_port_in_use_on_any_address_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", ANYWHERE):
            with pytest.raises(
                UserError, match=rf"^port {port} is already in use on this machine; try `--port {port + 1}`"
            ):
                check_free(host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x y", "a" * 300])
def test_a_host_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(UserError, match=r"^`--host` must be an address or a name of this machine, .*, but it is `"):
        check_free(host, free_port())


def test_the_servers_command_lists_names_unless_the_host_is_loopback(tmp_path: Path) -> None:
    local, _ = server_command(tmp_path, 5001)
    assert local[local.index("--host") + 1] == "127.0.0.1"
    assert "--allowed-hosts" not in local
    shared, _ = server_command(tmp_path, 5001, ANYWHERE)
    names = shared[shared.index("--allowed-hosts") + 1].split(",")
    assert {f"{socket.gethostname()}:5001", "127.0.0.1:5001", "localhost"} <= set(names)
    assert not any("*" in name for name in names)
    assert page_url(ANYWHERE, 5001) == f"http://{socket.gethostname()}:5001"
    assert page_url("::1", 5001) == "http://[::1]:5001"


def test_the_wait_for_a_server_ends_when_it_answers_or_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        assert answers(ended, "127.0.0.1", free_port()) is False
    waiting = [sys.executable, "-c", "input()"]
    with socket.create_server(("127.0.0.1", 0)) as taken, subprocess.Popen(waiting, stdin=subprocess.PIPE) as on:
        assert answers(on, ANYWHERE, taken.getsockname()[1]) is True
        on.kill()


def test_without_a_browser_only_the_address_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(asked.append(address)))
    verbs._open("http://127.0.0.1:5000")
    assert asked == ["http://127.0.0.1:5000"]
    assert capsys.readouterr().err == "fedsweep: no browser was found; open the first link yourself.\n"


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Serve a recorded trial by `fedsweep ui --host 0.0.0.0`, and yield the port and the process."""
    folder = tmp_path_factory.mktemp("ui")
    store = Store(folder / "mlruns")
    recorder = Recorder(store, MANIFEST.name)
    recorder.open_sweep(MANIFEST, sweep_folder(folder / "sweep"))
    recorder.sync(finished(3))
    assert recorder.deliver()
    port = free_port()
    server = subprocess.Popen(
        command("ui", "--host", ANYWHERE, "--port", str(port)), cwd=folder, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not listening(port):
            assert server.poll() is None, server.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield port, server
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        if server.stderr:
            server.stderr.close()


def ask(port: int, host: str, origin: str | None) -> int:
    """Return the HTTP status of a request to MLflow's search for experiments, which the page also sends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Host": host, "Content-Type": "application/json", **({"Origin": origin} if origin else {})}
    connection.request("POST", "/ajax-api/2.0/mlflow/experiments/search", json.dumps({"max_results": 1}), headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.slow
def test_a_page_for_the_network_accepts_the_machines_names_and_warns(
    shared: tuple[int, "subprocess.Popen[str]"],
) -> None:
    port, server = shared
    own = f"{socket.gethostname()}:{port}"
    for name in (own, f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(port, name, None) == ask(port, name, f"http://{name}") == 200, name
    assert ask(port, f"evil.example:{port}", None) == 403
    assert ask(port, f"10.evil.example:{port}", None) == 403
    assert ask(port, own, "http://evil.example") == 403
    assert server.stderr is not None
    assert server.stderr.readline() == "Loading MLflow ...\n"
    assert server.stderr.readline() == (
        f"fedsweep: this page has no password: anyone who can reach port {port} of this machine can read, change and "
        "delete the recorded results.\n"
    )
