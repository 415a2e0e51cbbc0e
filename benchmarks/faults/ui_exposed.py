"""Check who can reach the page of `fedsweep ui`, and which files it gives away.

    python -m benchmarks.faults.ui_exposed

The script records a short run, starts `fedsweep ui` on its results folder, and sends requests that the server must not
obey: from pages of other sites, to unknown host names, and for files outside of the results folder. It prints one line
per request. The exit code is 1 if a request is obeyed that docs/security.md does not mention.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient

from fedsweep.tracking.destination import tracking_uri

CONTENT = "a file that is not part of any results"
OWN = "note.txt"
EVIL = "http://evil.example"
SECONDS = 120.0  # the longest time until the page answers


class Page:
    """The page of `fedsweep ui`."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, content: Any = None, **headers: str) -> tuple[int, str]:
        """Return the status and the text of the answer to a request, without any normalisation of `path`.

        The request is a POST request if it has a content.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = None if content is None else json.dumps(content)
        sent = {name.title(): value for name, value in headers.items()}
        if body is not None:
            sent["Content-Type"] = "application/json"
        connection.request("GET" if body is None else "POST", path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")

    def api(self, method: str, /, **content: Any) -> dict[str, Any]:
        """Call MLflow's API and return its answer, which is empty after an error."""
        status, text = self.ask(f"/api/2.0/mlflow/{method}", content)
        return dict(json.loads(text)) if status == http.client.OK else {}


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Record a short run in `folder`, and serve its page during the context."""
    short = ["federation.rounds=1", "local.steps=1", "data.domains=[plain]", "federation.depths=[12]"]
    fedsweep = [sys.executable, "-m", "fedsweep"]
    subprocess.run([*fedsweep, "run", "fedra_digits", *short], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    client = MlflowClient(tracking_uri(folder / "mlruns"))
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    client.log_text(run.info.run_id, "of the run", OWN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*fedsweep, "ui", "--port", str(port)], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if Page(port).ask("/health")[0] == http.client.OK:
                    break
            time.sleep(0.2)
        yield Page(port)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def listening(port: int) -> set[str]:
    """Return the addresses on which a process of this machine listens on `port`."""
    found = psutil.net_connections("inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def from_other_sites(there: Page) -> dict[str, bool]:
    """Return which requests of other sites, or to other host names, are obeyed."""
    create = "/api/2.0/mlflow/experiments/create"
    rebound, _ = there.ask("/", host="evil.example")
    written, _ = there.ask(create, {"name": "evil"}, origin=EVIL)
    rewritten, _ = there.ask(create, {"name": "evil"}, host="evil.example", origin=EVIL)
    return {
        "a page that is addressed by an unknown host name": rebound < http.client.BAD_REQUEST,
        "a write from a page of another site": written < http.client.BAD_REQUEST,
        "a write from a page of another site to an unknown host name": rewritten < http.client.BAD_REQUEST,
    }


def outside_of_the_results(there: Page, secret: Path) -> dict[str, bool]:
    """Return which requests give away a file outside of the results folder."""
    runs = there.api("runs/search", experiment_ids=[one["experiment_id"] for one in experiments(there)])["runs"]
    run, quoted = runs[0]["info"]["run_id"], urllib.parse.quote
    up = "../" * 12 + str(secret).lstrip("/")
    found = {}
    for name, path in (("with dots", up), ("of an absolute path", str(secret)), ("of a URI", secret.as_uri())):
        for address in ("/get-artifact?run_uuid={run}&path={path}", "/api/2.0/mlflow-artifacts/artifacts/{path}"):
            answers = [there.ask(address.format(run=run, path=one))[1] for one in (path, quoted(path, safe=""))]
            served = "an artifact" if "run_uuid" in address else "a served artifact"
            found[f"{served} {name}"] = any(CONTENT in answer for answer in answers)
    folder = secret.parent.as_uri()
    made = there.api("experiments/create", name="elsewhere", artifact_location=folder)
    reader = there.api("runs/create", experiment_id=made["experiment_id"], run_name="reader")["run"]["info"]
    path = os.path.relpath(secret, secret.parent / reader["artifact_uri"].removeprefix(folder).strip("/"))
    answer = there.ask(f"/get-artifact?run_uuid={reader['run_id']}&path={quoted(path)}")[1]
    found["an artifact of an experiment that is created in another folder"] = CONTENT in answer
    there.api("registered-models/create", name="reader")
    version = there.api("model-versions/create", name="reader", source=folder, run_id=run)
    answer = there.ask(f"/model-versions/get-artifact?name=reader&version=1&path={quoted(secret.name)}")[1]
    found["a model version whose source is another folder"] = bool(version) and CONTENT in answer
    return found


def own_artifact(there: Page) -> bool:
    """Return whether the page serves an artifact of a recorded run, which shows that the other requests are valid."""
    runs = there.api("runs/search", experiment_ids=[one["experiment_id"] for one in experiments(there)])["runs"]
    run = runs[0]["info"]["run_id"]
    return there.ask(f"/get-artifact?run_uuid={run}&path={OWN}") == (http.client.OK, "of the run")


def experiments(there: Page) -> list[dict[str, Any]]:
    """Return all experiments."""
    return list(there.api("experiments/search", max_results=100).get("experiments", []))


def main() -> int:
    """Send all requests, print which of them are obeyed, and return the exit code."""
    with tempfile.TemporaryDirectory() as root:
        folder, secret = Path(root) / "work", Path(root) / "outside" / "secret.txt"
        folder.mkdir()
        secret.parent.mkdir()
        secret.write_text(CONTENT)
        with page(folder) as there:
            addresses, works = listening(there.port), own_artifact(there)
            found = {**from_other_sites(there), **outside_of_the_results(there, secret)}
    print(f"listens on: {', '.join(sorted(addresses))}; serves the artifacts of runs: {works}")
    for name, obeyed in found.items():
        print(f"{'OBEYED ' if obeyed else 'refused'}  {name}")
    return addresses != {"127.0.0.1"} or not works or any(found.values())


if __name__ == "__main__":
    sys.exit(main())
