"""Take the documentation's pictures of the terminal, and pictures of the documentation site.

    python scripts/make_pictures.py                   take all pictures of the terminal (2 minutes on 2 cores)
    python scripts/make_pictures.py list doctor       take only these
    python scripts/make_pictures.py --site FOLDER     build the site, and take pictures of its pages into FOLDER

The commands run in a new project in a temporary folder, which is also the home folder. Pictures of the site need
Chromium. `scripts/screenshots.py` takes the pictures of a report and of MLflow.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from browser import Browser
from build_site import build
from screenshots import IMAGES, SPACE, shrink
from terminal import PROMPT, ROWS, Terminal

PAGES = {"home": "index.html", "guide": "guides/first_sweep.html", "table": "guides/steering.html"}
"""The pages of the site to take pictures of."""
WORDS = "smallest effect"
"""The words that are searched for."""
SIZES = {"phone": (390, 844), "desktop": (1280, 800)}
"""The sizes of the pictures of pages in pixels."""


class Desk:
    """A folder with a new project, in which terminals are opened and whose pictures are written to `into`."""

    def __init__(self, scratch: Path, into: Path) -> None:
        """Create the project `study` in the folder `scratch`, and install the completion in bash."""
        self.into, self.project = into, scratch / "study"
        into.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {"HOME": str(scratch), "PATH": path, "INPUTRC": "/dev/null"}
        (scratch / ".bashrc").write_text(f"PS1='{PROMPT}'\n", encoding="utf-8")
        for command in ("fedsweep init study", "fedsweep --install-completion bash"):
            with Terminal(scratch, self.environment) as terminal:
                terminal.run(command)

    def terminal(self, rows: int = ROWS) -> Terminal:
        """Open a terminal in the project."""
        return Terminal(self.project, self.environment, rows)

    def keep(self, terminal: Terminal, name: str, title: str) -> None:
        """Write the picture of a terminal to the file `terminal_<name>.svg`."""
        (self.into / f"terminal_{name}.svg").write_text(terminal.svg(f"terminal-{name}", title), encoding="utf-8")


def take_list(desk: Desk) -> None:
    """Take a picture of `fedsweep list`."""
    with desk.terminal(60) as terminal:
        terminal.run("fedsweep list")
        desk.keep(terminal, "list", "fedsweep list")


def take_doctor(desk: Desk) -> None:
    """Take a picture of `fedsweep doctor`."""
    with desk.terminal(60) as terminal:
        terminal.run("fedsweep doctor", 180)
        desk.keep(terminal, "doctor", "fedsweep doctor")


def take_completion(desk: Desk) -> None:
    """Take a picture of names that the Tab key completes."""
    with desk.terminal() as terminal:
        terminal.type("fedsweep tune ablations/lo\t")
        terminal.until(lambda text: "ablations/lora_" in text)
        terminal.type("\t\t")  # the first one beeps, and the second one lists the names
        terminal.until(lambda text: "ablations/lora_rank_clip" in text)
        desk.keep(terminal, "completion", "fedsweep tune ablations/lo, Tab, Tab")


def take_sweep(desk: Desk) -> None:
    """Take pictures of the live table of a sweep, and of `fedsweep status` while the sweep runs."""

    def busy(text: str) -> bool:
        begun = re.findall(r" [1-9]/\d.* running$", text, re.MULTILINE)
        return len(begun) >= 2 and text.count(" finished\n") >= 4 and text.endswith(" left")

    with desk.terminal() as sweep, desk.terminal(40) as watch:
        sweep.type(f"fedsweep tune {SPACE}\n")
        sweep.until(busy, 600)
        desk.keep(sweep, "live", f"fedsweep tune {SPACE}")
        watch.run("fedsweep status")
        desk.keep(watch, "status", "fedsweep status")
        sweep.type("\x03")
        sweep.finish(180)


TERMINAL: dict[str, Callable[[Desk], None]] = {
    "list": take_list,
    "doctor": take_doctor,
    "completion": take_completion,
    "sweep": take_sweep,
}
"""The functions that take pictures of the terminal, keyed by the name on the command line."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server for files that prints no lines about requests."""

    def log_message(self, *about: object) -> None:
        """Print nothing."""


def take_site(into: Path) -> None:
    """Build the site, and take pictures of some pages and of search results, each for a phone and for a desktop."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch) / "site")
        handler = functools.partial(Quiet, directory=str(Path(scratch) / "site"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            base = f"http://127.0.0.1:{server.server_port}"
            for device, size in SIZES.items():
                with Browser(*size) as browser:
                    for name, page in PAGES.items():
                        browser.open(f"{base}/{page}", "fedsweep")
                        if name == "table":
                            browser.run("document.querySelector('.md-content table').scrollIntoView({block: 'center'})")
                        picture(browser, into / f"site_{name}_{device}.png")
                    browser.run("document.querySelector('.md-search__button').click()")
                    time.sleep(1)  # until the search has the focus
                    browser.insert(WORDS)
                    picture(browser, into / f"site_search_{device}.png")
            server.shutdown()


def picture(browser: Browser, path: Path) -> None:
    """Write a small picture of the visible page."""
    time.sleep(1)  # until animations have ended
    browser.shot(path)
    shrink(path)


def main() -> None:
    """Take the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"pictures of the terminal: {', '.join(TERMINAL)}")
    parser.add_argument("--into", type=Path, default=IMAGES, help="folder for the pictures of the terminal")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="folder for pictures of the site")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in TERMINAL]:
        parser.error(f"{unknown[0]} is not one of {', '.join(TERMINAL)}")
    names = given.names or ([] if given.site else TERMINAL)
    if names:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            desk = Desk(Path(scratch), given.into)
            for name in names:
                TERMINAL[name](desk)
    if given.site:
        take_site(given.site)


if __name__ == "__main__":
    main()
