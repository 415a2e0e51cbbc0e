"""The choice of an MLflow server or a local database, and the error messages of unusable servers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Destination, Recorder, check_server
from fedsweep.tracking.experiment import error_sentence
from tests.cli.conftest import GRID, Refused, call, refused, write
from tests.tracking.helpers import MANIFEST, sweep_folder

__all__ = ["call", "refused"]  # fixtures


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDSWEEP_MLFLOW", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("address", [None, "", "store"])
def test_without_an_address_the_local_database_is_used(tmp_path: Path, address: str | None) -> None:
    own = Destination.of(tmp_path, address)
    assert (own.uri, own.server, own.artifacts) == (f"sqlite:///{tmp_path / 'mlflow.db'}", None, tmp_path / "artifacts")


def test_mlflows_own_environment_variable_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert Destination.of(tmp_path).server is None


def test_a_password_is_passed_only_to_mlflows_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    given = Destination.of(tmp_path, "https://ada:s%40cret@host:81/mlflow/")
    assert given.uri == given.server == "https://host:81/mlflow"
    given.client()
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("ada", "s@cret")
    recorder = Recorder(Store(tmp_path), "x", given)
    monkeypatch.setattr(recorder, "_put", lambda *_: None)
    recorder.open_sweep(MANIFEST, sweep_folder(tmp_path / "sweep"))
    left = "".join(path.read_text() for path in (tmp_path / "sweep").iterdir())
    assert "https://host:81/mlflow" in left
    for told in (repr(given), left, str(vars(recorder.runs.client))):
        assert "cret" not in told
    again = Destination.of_sweep(tmp_path, tmp_path / "sweep")
    assert again.uri == given.uri
    assert Destination.of_sweep(tmp_path, tmp_path / "sweep", "store").server is None


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("ftp://host", "ftp://host"),
        ("host:5000", "host:5000"),
        ("http://", "http://"),
        ("http://host:port", "http://host:port"),
        ("http://host:0", "http://host:0"),
        ("http://host/#/experiments/1", "http://host/#/experiments/1"),
        ("http://host?x=1", "http://host?x=1"),
        ("http://ho st", "http://ho st"),
        ("postgresql://ada:cret@host/db", "postgresql://***@host/db"),
        ("http://ada:c/ret@host:x", "http://***@host:x"),
        ("databricks", "databricks"),
        ("file:///tmp/x", "file:///tmp/x"),
    ],
)
def test_an_invalid_address_is_an_error_that_hides_the_password(tmp_path: Path, address: str, shown: str) -> None:
    with pytest.raises(UserError) as refused:
        Destination.of(tmp_path, address)
    assert str(refused.value) == (
        "`--mlflow` must be the URL of an MLflow server (http://HOST[:PORT] or https://...) or `store` for a local "
        f"database, but it is `{shown}`."
    )


@contextmanager
def answering(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """Serve, on loopback, the status and body that `answer` returns for each path."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


ACCESS = (
    "denies access (HTTP {}{}); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
)
HOST = "Invalid Host header - possible DNS rebinding attack detected"


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (401, "You are not authenticated.", ACCESS.format(401, ": You are not authenticated")),
        (401, "<html>Sign in</html>", ACCESS.format(401, "")),
        (403, HOST, ACCESS.format(403, f": {HOST}")),
        (403, json.dumps({"error_code": "PERMISSION_DENIED", "message": "no"}), ACCESS.format(403, "")),
        (404, "not here", "cannot be used: it returned HTTP 404, so it has failed or is not an MLflow server."),
        (500, "oh", "cannot be used: it returned HTTP 500, so it has failed or is not an MLflow server."),
        (200, "<html>a page</html>", "cannot be used: its response is not that of an MLflow server."),
    ],
)
def test_a_servers_error_is_reported_in_one_sentence(tmp_path: Path, status: int, body: str, sentence: str) -> None:
    with answering(lambda path: (status, body)) as url, pytest.raises(UserError) as refused:
        check_server(Destination.of(tmp_path, url))
    assert str(refused.value) == f"the MLflow server {url} {sentence}"


def test_a_server_that_keeps_artifacts_on_its_disk_is_rejected(tmp_path: Path) -> None:
    experiment = {"experiment_id": "7", "name": "x", "artifact_location": "/srv/mlruns/7", "lifecycle_stage": "active"}

    def answer(path: str) -> tuple[int, str]:
        return 200, json.dumps({"experiments": [], "experiment": experiment})

    with answering(answer) as url, pytest.raises(UserError) as refused:
        check_server(Destination.of(tmp_path, url), "x")
    sentence = f"the MLflow server {url} stores the artifacts of `x` in /srv/mlruns/7, a folder on the server's "
    assert str(refused.value).startswith(f"{sentence}machine;")


def test_missing_write_access_is_an_error_before_a_sweep_starts(tmp_path: Path) -> None:
    experiment = {"experiment_id": "7", "name": "x", "artifact_location": "mlflow-artifacts:/7"}

    def answer(path: str) -> tuple[int, str]:
        if path.endswith("set-experiment-tag"):
            return 403, "Permission denied"
        return 200, json.dumps({"experiments": [], "experiment": experiment})

    with answering(answer) as url, pytest.raises(UserError) as refused:
        check_server(Destination.of(tmp_path, url), "x")
    assert str(refused.value) == f"the MLflow server {url} {ACCESS.format(403, ': Permission denied')}"


def test_an_unusable_server_is_an_error_before_anything_is_written(refused: Refused) -> None:
    write("search_spaces", "x", GRID)
    sentence = refused("tune", "x", "--mlflow", "http://ada:cret@127.0.0.1:9")
    assert sentence == "the MLflow server http://127.0.0.1:9 cannot be used: Connection refused."
    assert not list(Path("mlruns").glob("sweeps/**/*"))
    assert refused("run", "fedra_digits", "--mlflow", "http://127.0.0.1:9") == sentence
    assert not list(Path("mlruns").glob("runs/**/*"))
    assert refused("ui", "--mlflow", "http://127.0.0.1:9") == sentence
    assert refused("tune", "x", "--dry-run", "--mlflow", "http://127.0.0.1:9") == sentence
    assert refused("tune", "x", "--mlflow", "mlflow").startswith("`--mlflow` must be the URL of an MLflow server")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("no.", "no."),
        ("long " * 40, f"{'long ' * 32}[...]."),
        (
            "(sqlite3.OperationalError) disk I/O error [SQL: SELECT 1 FROM runs] (Background on this error)",
            "disk I/O error.",
        ),
    ],
)
def test_a_reason_is_short_and_contains_no_query(tmp_path: Path, error: str, told: str) -> None:
    sentence = error_sentence(Destination.of(tmp_path), OSError(error))
    assert sentence == f"MLflow's database {tmp_path / 'mlflow.db'} cannot be used: {told}"
