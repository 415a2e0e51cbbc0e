"""Servers for tests on the loopback interface: MLflow, PostgreSQL, and a proxy that loses responses."""

import contextlib
import http.client
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

POSTGRES = next(
    (
        Path(found).resolve().parent
        for name in ("initdb", "/usr/lib/postgresql/15/bin/initdb", "/usr/lib/postgresql/16/bin/initdb")
        if (found := shutil.which(name))
    ),
    None,
)
"""The folder of PostgreSQL's programs, or None if it is not installed."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """An MLflow server that can be stopped and started again."""

    def __init__(self, folder: Path, backend: str, *options: str) -> None:
        self.folder, self.backend, self.options = folder, backend, options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, patience: float = 240) -> None:
        """Start the server, and wait until it answers, for at most `patience` seconds."""
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.backend, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1", *self.options]
        if "--default-artifact-root" not in self.options:
            command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()  # noqa: S310 (loopback)
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise RuntimeError("MLflow's server did not start:\n" + (self.folder / "server.log").read_text()[-3000:])

    def stop(self) -> None:
        """Kill the server, so that unfinished writes are lost."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@contextlib.contextmanager
def mlflow_server(folder: Path, backend: str | None = None, *options: str) -> Iterator[Server]:
    """Run an MLflow server with a new database, or with the database `backend`, and stop the server at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, backend or f"sqlite:///{folder / 'server.db'}", *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a new PostgreSQL server and yield the database's address for SQLAlchemy.

    PostgreSQL refuses to run as root, so root starts the server as the user `nobody`.
    """
    if POSTGRES is None:
        raise RuntimeError("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # pytest's folders would be accessible to root only
    data, port = folder / "data", free_port()
    other: dict[str, Any] = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        other = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def run(program: str, *words: str) -> None:
        with (folder / "programs.log").open("a+") as log:  # the server would keep a pipe open
            done = subprocess.run(
                [str(POSTGRES / program), *words], cwd=folder, stdout=log, stderr=log, timeout=120, **other
            )
            log.seek(0)
            assert done.returncode == 0, log.read()

    run("initdb", "-D", str(data), "-U", "fedsweep", "-A", "trust", "-N", "-E", "UTF8")
    settings = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
    run("pg_ctl", "start", "-w", "-D", str(data), "-l", str(folder / "log"), "-o", settings)
    try:
        yield f"postgresql+psycopg2://fedsweep@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "stop", "-m", "immediate", "-D", str(data))
        shutil.rmtree(folder)


Lose = Callable[[str], bool]


class Proxy:
    """A proxy that forwards requests to a server, and loses the response to a path if `lose(path)` is true."""

    def __init__(self, url: str, lose: Lose) -> None:
        upstream = url.removeprefix("http://")
        self.lost: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                connection = http.client.HTTPConnection(upstream, timeout=60)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    content = answer.read()
                finally:
                    connection.close()
                asked = self.path.partition("?")[0].removeprefix("/api/2.0/mlflow/")
                if lose(asked):
                    outer.lost.append(asked)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
