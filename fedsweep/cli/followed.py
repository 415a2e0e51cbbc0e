"""The command line as a cluster's head runs it for a terminal elsewhere; where nobody looks any more, it ends."""

from __future__ import annotations

import os
import signal
import threading

from fedsweep import cli


def main() -> None:
    """Run the command line, with Ctrl-C as in a terminal: Ray's processes ignore it, and so would their children."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_input, daemon=True).start()
    cli.main()


def _end_with_input() -> None:
    """Interrupt the command when its standard input, held by who shows it, is closed."""
    while os.read(0, 1):
        pass
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
