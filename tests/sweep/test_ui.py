"""The MLflow page in a real browser: the parent with its children, and their comparison by `lora.rank`."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.store import Outcome, Store, TrialPlan
from fedsweep.tracking import Recorder, page_links
from tests.sweep.helpers import command, environment
from tests.tracking.helpers import MANIFEST, trial

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Store]]:
    """A recorded sweep of three ranks behind `fedsweep ui`."""
    folder = tmp_path_factory.mktemp("ui")
    store = Store(folder / "mlruns")
    store.root.mkdir()
    sweep = store.sweep(MANIFEST.name, MANIFEST.id)
    sweep.create(MANIFEST, {"search_space.yaml": "seed: 0\n", "experiment.yaml": "seed: 0\n"})
    recorder = Recorder(store, MANIFEST.name)
    recorder.open_sweep(MANIFEST, sweep.folder)
    for number, rank in enumerate((1, 4, 8)):
        plan = TrialPlan(
            key=f"k{rank}", number=number, arm={"lora.rank": rank}, seed=0, config={"seed": 0, "lora": {"rank": rank}}
        )
        recorder.sync(trial(4, Outcome(outcome="finished", round=3), plan))
    recorder.close_sweep("FINISHED", {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        command("ui", "--port", str(port)), cwd=folder, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
        yield url, store
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def page(url: str, folder: Path) -> str:
    """The page's text as the browser draws it; a screenshot lies beside for the eye."""
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1600,1000", "--virtual-time-budget=20000",
    ]  # fmt: skip
    assert CHROMIUM is not None
    shot = folder / "page.png"
    subprocess.run([CHROMIUM, *options, f"--screenshot={shot}", url], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000
    dom = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    return re.sub(r"<[^>]+>", " ", dom.stdout)


def test_the_runs_table_shows_the_parent(served: tuple[str, Store], tmp_path: Path) -> None:
    url, store = served
    text = page(page_links(store, url)["sweeps and their trials"], tmp_path)
    assert "tiny s1" in text
    assert "4 matching runs" in " ".join(text.split()), "three children hang below their parent"


def test_the_charts_show_the_children_beside_their_parent(served: tuple[str, Store], tmp_path: Path) -> None:
    url, store = served
    text = page(page_links(store, url)["curves"], tmp_path)
    assert all(name in text for name in ("tiny s1", "rank 1 · seed 0", "rank 4 · seed 0", "rank 8 · seed 0"))


def test_the_compare_view_shows_lora_rank(served: tuple[str, Store], tmp_path: Path) -> None:
    url, store = served
    text = page(page_links(store, url)["trials side by side"], tmp_path)
    assert "Comparing 3 Runs" in " ".join(text.split())
    assert "lora.rank" in text
    assert all(f"rank {rank} · seed 0" in text for rank in (1, 4, 8))
