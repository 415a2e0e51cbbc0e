"""A bash in a pseudo-terminal for pictures of the terminal: it types keys, waits for text, and draws the screen as SVG.

The library pyte interprets what bash and its commands write, and Rich draws the screen that pyte holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 80, 24
"""The size of the terminal in characters."""
SETTLED = 0.1
"""Seconds without output after which the screen is taken to be complete."""
PROMPT = "$ "
SETTINGS = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
"""The environment variables of bash for the terminal; the last one prevents a message on macOS."""
FONTS = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)
"""The parts of Rich's SVG that name other servers: rules that load a font, and a comment."""


class Screen(pyte.Screen):
    """A screen that shows dim text in grey, because pyte ignores dim text."""

    def select_graphic_rendition(self, *attrs: int, **private: bool) -> None:
        """Set the style of the text that follows."""
        super().select_graphic_rendition(*(90 if one == 2 and 38 not in attrs else one for one in attrs))


class Terminal:
    """A running bash, and the screen that a user would see."""

    def __init__(self, folder: Path, environment: Mapping[str, str], rows: int = ROWS) -> None:
        """Start an interactive bash.

        Args:
            folder: The working directory.
            environment: The environment variables of bash, except those for the terminal.
            rows: The number of rows of the terminal.
        """
        self._screen = Screen(COLUMNS, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._file, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (rows, COLUMNS))
        self._process = subprocess.Popen(
            ["bash", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env={**environment, **SETTINGS},
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self._lock, self._changed, self._rows = threading.Lock(), time.monotonic(), list[Text]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.until(_ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGHUP)
        self._process.wait(30)
        self._reader.join(30)  # or else it may read from the next terminal, whose file can have the same number
        os.close(self._file)

    def _read(self) -> None:
        """Read the output until bash has ended, because programs wait if nobody reads what they print."""
        with contextlib.suppress(OSError):
            while output := os.read(self._file, 1 << 16):
                with self._lock:
                    self._stream.feed(output)
                    self._changed = time.monotonic()

    def type(self, keys: str) -> None:
        r"""Type keys, such as `ls\n`, `\t` for Tab, or `\x03` for Ctrl-C."""
        os.write(self._file, keys.encode())

    def until(self, shown: Callable[[str], bool], patience: float = 90) -> None:
        """Wait until the screen is complete and its text fulfils a condition.

        Raises:
            TimeoutError: The condition is not fulfilled within `patience` seconds.
        """
        end = time.monotonic() + patience
        while True:
            with self._lock:
                if time.monotonic() - self._changed > SETTLED and shown(self.text()):
                    last = len(self.text().removesuffix(f"\n{PROMPT.rstrip()}").rstrip().splitlines())
                    self._rows = [self._row(number) for number in range(last)]
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"the terminal shows:\n{self.text()}")
            time.sleep(SETTLED / 4)

    def run(self, command: str, patience: float = 90) -> None:
        """Type the only command of this terminal, and wait until it has ended."""
        self.type(f"{command}\n")
        self.finish(patience)

    def finish(self, patience: float = 90) -> None:
        """Wait until bash shows the second prompt."""
        self.until(lambda text: "\n" in text and _ready(text), patience)

    def text(self) -> str:
        """Return the text of the screen without blanks at the ends of lines."""
        return "\n".join(map(str.rstrip, self._screen.display)).rstrip()

    def svg(self, name: str, title: str) -> str:
        """Return a picture of the screen at the end of the last wait, without the prompt and the rows below it.

        Args:
            name: The beginning of the names of the styles in the picture.
            title: The title of the drawn window.
        """
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", highlight=False)
        console.print(Text("\n").join(self._rows), soft_wrap=True)
        return FONTS.sub("", console.export_svg(title=title, unique_id=name))

    def _row(self, number: int) -> Text:
        cells, row = self._screen.buffer[number], Text()
        for style, group in itertools.groupby((cells[column] for column in range(COLUMNS)), _style):
            row.append("".join(cell.data for cell in group), style)
        row.rstrip()
        return row


def _take_terminal() -> None:
    """Make the standard input the terminal of this process, and let Ctrl-C have its effect."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in a script that a shell runs in the background


def _ready(text: str) -> bool:
    return text.splitlines()[-1:] == [PROMPT.rstrip()]


def _style(cell: pyte.screens.Char) -> Style:
    colour, behind = _colour(cell.fg), _colour(cell.bg)
    if cell.reverse:
        colour, behind = behind or "black", colour or "white"
    return Style(color=colour, bgcolor=behind, bold=cell.bold, italic=cell.italics, underline=cell.underscore)


def _colour(name: str) -> str | None:
    """Return Rich's name of a colour of pyte: pyte's yellow is brown, and 24-bit colours lack their sign."""
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return None if name == "default" else name.replace("brown", "yellow").replace("bright", "bright_")
