"""A headless Chromium browser for tests and screenshots: it opens a page, waits for text, and takes pictures.

Chromium is controlled over two pipes with the DevTools protocol
(https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The path of the browser, or None if it is not installed."""
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
    # Pretend that there is a mouse; without one, charts always show their tools.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
]  # fmt: skip

VISITED = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true"}
"""Entries of local storage with which MLflow's page does not open its assistant by itself."""

UNFOLD = "document.querySelectorAll(`[col-id*='Run Name'] a`).length > 1 || "
UNFOLD += "(document.querySelector(`[col-id*='Run Name'] button`)?.click(), false)"
"""JavaScript that expands the first parent run on MLflow's page, and is true once it is expanded.

It must be repeated, because a click before the page is ready has no effect.
"""


class Browser:
    """A browser with one page."""

    def __init__(self, width: int = 1600, height: int = 1000, storage: dict[str, str] | None = None) -> None:
        """Start the browser.

        Args:
            width: Width of the page in pixels.
            height: Height of the page in pixels.
            storage: Entries of local storage that every site finds, as if a user had visited the site before.

        Raises:
            RuntimeError: Chromium is not installed.
        """
        if CHROMIUM is None:
            raise RuntimeError("chromium is not installed")
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        high = [
            fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (theirs_in, theirs_out)
        ]  # so that the new descriptors are not 3 or 4

        def connect() -> None:  # the browser reads commands from descriptor 3 and writes answers to 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], preexec_fn=connect, pass_fds=(3, 4), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for one in (theirs_in, theirs_out, *high):
            os.close(one)
        self._in, self._out = ours_in, ours_out
        self._buffer, self._number, self._session = b"", 0, ""
        self._size, self._storage = (width, height), storage or {}

    def __enter__(self) -> Self:
        try:
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self._ask("Page.enable")
            self.resize(*self._size)
            keep = (f"localStorage.setItem({json.dumps(k)}, {json.dumps(v)});" for k, v in self._storage.items())
            self._ask("Page.addScriptToEvaluateOnNewDocument", source=f"try {{ {''.join(keep)} }} catch (error) {{}}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def resize(self, width: int, height: int) -> None:
        """Change the size of the page to `width` by `height` pixels."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str, *texts: str, patience: float = 90) -> str:
        """Open an address, wait until the page shows all `texts`, and return the text of the page.

        Raises:
            TimeoutError: The page does not show all `texts` within `patience` seconds.
        """
        self._ask("Page.navigate", url="about:blank")  # a new fragment (#...) alone would not load the page
        self._ask("Page.navigate", url=url)
        return self.wait(*texts, patience=patience)

    def wait(self, *texts: str, patience: float = 90) -> str:
        """Wait until the page shows all `texts`, and return the text of the page.

        Raises:
            TimeoutError: The page does not show all `texts` within `patience` seconds.
        """
        end = time.monotonic() + patience
        while True:
            text = self.text()
            missing = [one for one in texts if one not in text]
            if not missing:
                return text
            if time.monotonic() > end:
                raise TimeoutError(f"the page does not show {missing}, but:\n{text[:3000]}")
            time.sleep(0.2)

    def text(self) -> str:
        """Return all text of the page, including the text in SVG drawings, with single spaces between words."""
        drawn = "[...document.querySelectorAll('svg text')].map(one => one.textContent).join(' ')"
        return " ".join(str(self.run(f"(document.body ? document.body.innerText : '') + ' ' + {drawn}")).split())

    def until(self, script: str, patience: float = 60) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            TimeoutError: The expression is not true within `patience` seconds.
        """
        end = time.monotonic() + patience
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"the page does not satisfy {script}; it shows:\n{self.text()[:3000]}")
            time.sleep(0.2)

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression on the page, and return its value."""
        return self._ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def insert(self, text: str) -> None:
        """Type a text into the field that has the focus."""
        self._ask("Input.insertText", text=text)

    def shot(self, path: Path) -> None:
        """Write a picture of the visible page to a PNG file."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        """Return the next message of the browser.

        Raises:
            TimeoutError: The browser has ended, or has sent no message for a minute.
        """
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], 60)
            piece = os.read(self._in, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("chromium does not answer")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
