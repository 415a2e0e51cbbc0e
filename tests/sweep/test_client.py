"""A sweep whose driver runs on a cluster's head: what is sent there, how it is shown, what is refused. No Ray."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from fedsweep import cli
from fedsweep.cli.away import tune_away, words
from fedsweep.errors import UserError
from fedsweep.sweep import head, ray_client
from fedsweep.sweep.engine import engine_digest
from fedsweep.sweep.head import Driver, Request
from fedsweep.tracking import Destination
from tests.sweep.helpers import GRID, write_space

TUNE = typer.main.get_command(cli.app).commands["tune"]  # type: ignore[attr-defined]
WAITING = (  # writes in parts, and tells of Ctrl-C
    "import sys, time\n"
    "try:\n    print('waiting', sys.stdout.isatty(), sys.stderr.isatty(), flush=True)\n    time.sleep(60)\n"
    "except KeyboardInterrupt:\n    print('interrupted', file=sys.stderr)\n    sys.exit(130)\n"
)
FOLLOWED = (
    f"import sys\nfrom fedsweep.cli import followed\nfollowed.cli.main = lambda: exec({WAITING!r})\nfollowed.main()"
)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without anything of Ray's, restored at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FEDSWEEP_"))}
    monkeypatch.setattr(os, "environ", clean)


def shown(
    driver: Driver, until: bytes = b"", size: tuple[int, int] | None = None
) -> tuple[dict[int, bytes], int | None]:
    """What a command has written on stdout and stderr, to its end or until it has written something."""
    written, code = {1: b"", 2: b""}, None
    deadline = time.monotonic() + 60
    while code is None and not (until and until in written[1] + written[2]):
        assert time.monotonic() < deadline, written
        chunks, code = driver.read(size)
        for stream, chunk in chunks:
            written[stream] += chunk
    return written, code


def test_the_same_command_is_asked_for_with_what_the_environment_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDSWEEP_MLFLOW", "https://mlflow.example.org")
    typed = ["ablations/lora_rank", "federation.rounds=5", "seed=1", "--seeds", "0,1", "--gpus-per-trial", "0"]
    typed += ["--dry-run", "--at-once", "3", "--store", "here", "--address", "ray://head:10001"]
    asked = words(TUNE.make_context("tune", [*typed]))
    assert asked[0] == "tune"
    again = TUNE.make_context("tune", asked[1:]).params
    before = TUNE.make_context("tune", typed).params
    assert again["mlflow"] == "https://mlflow.example.org"
    assert {name: value for name, value in again.items() if value != before[name]}.keys() == {"store", "address"}


def test_a_command_that_is_refused_there_is_so_here_with_the_experiments_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "mine", GRID)
    driver = Driver()
    driver.start(ray_client._request(["tune", "--store", str(tmp_path), "--", "minne"]))
    written, code = shown(driver)
    assert code == 2
    assert written == {1: b"", 2: b"fedsweep: there is no search space `minne`; did you mean `mine`?\n"}
    assert not Path(driver._folder.name).exists()


@pytest.mark.parametrize(
    ("terminals", "answer", "on"), [((), b"False False", 2), ((1, 2), b"True True", 1), ((2,), b"False True", 2)]
)
def test_output_and_ctrl_c_are_those_of_a_terminal_or_of_pipes(monkeypatch, quiet, terminals, answer, on):
    hears = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where the tests do not
    monkeypatch.setattr(head, "COMMAND", (sys.executable, "-c", hears + WAITING))
    driver = Driver()
    assert driver.start(Request([], {}, {}, terminals)) == socket.gethostname()
    written, _ = shown(driver, b"\n", (100, 30))
    assert written[1] == b"waiting " + answer + b"\n"
    if terminals:
        assert os.get_terminal_size(driver._terminal) == (100, 30)
    driver.interrupt()
    written, code = shown(driver, size=(90, 30))
    assert (written[on], code) == (b"interrupted\n", 130)


def test_a_command_whose_terminal_is_lost_ends_as_by_ctrl_c(monkeypatch: pytest.MonkeyPatch, quiet: None):
    monkeypatch.setattr(head, "COMMAND", (sys.executable, "-c", FOLLOWED))
    driver = Driver()
    driver.start(Request([], {}, {}, (1, 2)))
    shown(driver, b"waiting")
    monkeypatch.setattr(head, "PATIENCE", 0.0)
    assert driver._process.wait(30) == 130


def test_ctrl_c_reaches_a_command_although_rays_processes_ignore_it():
    deaf = f"import signal, os\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nos.execv({sys.executable!r}, "
    with subprocess.Popen(
        [sys.executable, "-c", f"{deaf}[{sys.executable!r}, '-c', {FOLLOWED!r}])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"waiting")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_another_fedsweep_or_another_store_on_the_head_is_told(tmp_path: Path):
    assert Driver().problem(engine_digest(), "") == ""
    assert "has another version of fedsweep (" in Driver().problem("0" * 64, "")
    with ray_client.probed(ray_client.Store(tmp_path)) as probe:
        assert Driver().problem(engine_digest(), probe) == ""
    assert f"cannot use the store {tmp_path}" in Driver().problem(engine_digest(), probe)


def test_nobody_at_ray_clients_address_is_told_at_once(quiet: None):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=rf"^there is no Ray cluster at 127.0.0.1:{port} that could be reached: "):
        ray_client.run_on_head(f"ray://127.0.0.1:{port}", ["tune"], "mlruns")


def test_ray_client_that_is_not_installed_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch, quiet: None):
    monkeypatch.setattr(ray_client, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package grpcio; `pip install fedsweep\[cluster\]` installs it"):
        ray_client.run_on_head("ray://head:10001", ["tune"], "mlruns")


def test_what_keeps_a_client_out_is_one_sentence(quiet: None):
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as other:
        check_version_info({"ray_version": "2.1.0", "python_version": "3.11.1"}, "Ray Client")
    said = ray_client._why_not("ray://head:10001", other.value, "")
    assert said.startswith("the Ray cluster at ray://head:10001 has another Ray or Python than this machine: ")
    assert "\n" not in said
    nobody = ConnectionError("ray client connection timeout")  # Ray's own words, for a token that is refused as well
    assert "is no Ray Client server; its port is 10001" in ray_client._why_not("ray://head:6379", nobody, "")
    refused = "Received when checking init: Invalid or missing authentication token"
    assert "asks for a token, and none was given; " in ray_client._why_not("ray://head:10001", nobody, refused)
    os.environ["RAY_AUTH_MODE"] = "token"
    assert "the token given is not the cluster's; " in ray_client._why_not("ray://head:10001", nobody, refused)


def test_a_password_is_not_sent(tmp_path: Path):
    destination = Destination.of(tmp_path, "https://me:secret@mlflow.example.org")
    context = TUNE.make_context("tune", ["ablations/lora_rank"])
    with pytest.raises(UserError, match="a password in `--mlflow` is not sent through Ray Client") as refused:
        tune_away(context, "ray://head:10001", "mlruns", destination)
    assert "secret" not in str(refused.value)


def test_a_second_ctrl_c_is_passed_on_and_a_third_leaves(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C never interrupts an answer, whose output would be lost."""

    class Answer:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def remote(self, *given: object) -> str:
            asked.append(self.kind)
            return self.kind

    def get(kind: str) -> tuple[list[head.Chunk], int | None]:
        os.kill(os.getpid(), signal.SIGINT)
        return [], None

    class There:
        read, interrupt = Answer("read"), Answer("interrupt")

    asked: list[str] = []
    monkeypatch.setattr("ray.get", get)
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        ray_client._shown(There())
    assert asked == ["read", "interrupt", "read", "interrupt", "read"]
    assert signal.getsignal(signal.SIGINT) is before
