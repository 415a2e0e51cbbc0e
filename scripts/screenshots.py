"""Take the documentation's screenshots of a sweep's report and of its pages in MLflow.

    python scripts/screenshots.py                       run `ablations/lora_rank` first (4 minutes on 2 cores)
    python scripts/screenshots.py --store mlruns        use the newest sweep in a results folder
    python scripts/screenshots.py --store mlruns --sweep 20260101-120000-ab12

The script needs Chromium. It uses no network except this machine's loopback interface.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from browser import UNFOLD, VISITED, Browser
from fedsweep.tracking.ui import answers

SPACE = "ablations/lora_rank"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLOURS = 256
"""The number of colours in a picture's palette. With 64, the lines of a figure lose their colours."""
HIDE_PATH = "[...document.querySelectorAll('body *')].filter(one => one.textContent.startsWith('Path: '))"
HIDE_PATH += ".forEach(one => one.style.visibility = 'hidden')"
"""JavaScript that hides the local paths of artifacts."""
FEDSWEEP = [sys.executable, "-m", "fedsweep"]


def main() -> None:
    """Run a sweep unless a results folder is given, serve MLflow's page, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="results folder with a sweep; by default, a new sweep is run")
    parser.add_argument("--sweep", help="id of the sweep; the newest by default")
    parser.add_argument("--into", type=Path, default=IMAGES, help="folder for the pictures")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = given.store or Path(scratch)
        if given.store is None:
            subprocess.run([*FEDSWEEP, "tune", SPACE, "--store", str(store)], check=True)
        which = ["--sweep", given.sweep] if given.sweep else []
        written = Path(scratch) / "report.html"
        command = [*FEDSWEEP, "report", SPACE, *which, "--store", str(store), "--format", "html"]
        written.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        with Browser(1200, 2245) as browser:  # down to the first figure
            browser.open(written.as_uri(), "Findings", "rank 16")
            browser.shot(given.into / "report.png")
        shrink(given.into / "report.png")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(
            [*FEDSWEEP, "ui", SPACE, *which, "--store", str(store), "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            take(links(server, port), given.into)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def links(server: subprocess.Popen[bytes], port: int) -> dict[str, str]:
    """Wait until the server of `fedsweep ui` answers, and return a dict from labels to the links that it prints."""
    found: dict[str, str] = {}
    for line in map(bytes.decode, server.stdout or ()):
        if line.startswith("  "):
            label, _, address = line.strip().partition(": ")
            found[label] = address
        if "trials side by side" in found:  # the last link
            break
    if not answers(server, "127.0.0.1", port):
        raise SystemExit("fedsweep ui ended before its page answered")
    return found


def take(addresses: dict[str, str], into: Path) -> None:
    """Take five pictures of MLflow's pages at the given addresses, and write them to the folder `into`."""
    base = addresses["the sweep's results"].partition("#")[0]
    page, _, query = addresses["the sweep's results"].partition("?")
    with Browser(1500, 1120, VISITED) as browser:

        def picture(name: str) -> None:
            time.sleep(2)  # until animations have ended
            browser.shot(into / f"{name}.png")
            shrink(into / f"{name}.png")

        browser.open(addresses["the sweep by arm"], "Group: rank", "loss/train", "rank 16 (loss/test)")
        picture("mlflow_view")
        browser.open(addresses["trials side by side"], "Parallel Coordinates Plot", "Run details")
        picture("mlflow_compare")
        browser.open(addresses["sweeps and their trials"], "matching runs")
        browser.until(UNFOLD)
        picture("mlflow_runs")
        browser.open(f"{page}/artifacts/report/table.md?{query}", "By domain", "verdict", "Path: ")
        browser.run(HIDE_PATH)
        picture("mlflow_artifacts")
        browser.resize(1500, 420)
        browser.open(f"{base}#/experiments?{query}", SPACE)
        picture("mlflow_experiments")


def shrink(path: Path) -> None:
    """Reduce the colours of a picture file to a palette, so that the file becomes smaller."""
    with Image.open(path) as whole:
        whole.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
