"""The handling of SIGTERM and SIGHUP like Ctrl-C."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from fedsweep import cli
from fedsweep.common.signals import ENDING, SignalInterrupt, ending_signals_interrupt, kept_actions, kept_handlers


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Set the default handlers, because the shell that runs the tests may ignore signals, as `nohup` does."""
    before = {one: signal.signal(one, signal.SIG_DFL) for one in ENDING}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_interrupts_and_determines_the_exit_status(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsweep.common.signals._leave_terminal", lambda: None)
    before = [signal.getsignal(one) for one in ENDING]
    with ending_signals_interrupt() as received:
        assert received.status == 130
        with pytest.raises(SignalInterrupt), ending_signals_interrupt() as inner:
            signal.raise_signal(number)
        assert inner is received
        assert received.status == status
    assert [signal.getsignal(one) for one in ENDING] == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with ending_signals_interrupt() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received.status == 130
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_a_library_call_is_handled_after_the_call() -> None:
    steps: list[str] = []

    def library_call() -> None:
        with kept_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            steps.append("after the signal")

    with ending_signals_interrupt(), pytest.raises(SignalInterrupt):
        library_call()
    assert steps == ["after the signal"]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_another_thread_receives_is_handled_after_the_library_call(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system delivers a signal to any thread that does not block it, and Python handles it in the main thread."""
    monkeypatch.setattr("fedsweep.common.signals._leave_terminal", lambda: None)
    ended, steps = threading.Event(), []
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    other = threading.Thread(target=ended.wait)
    other.start()

    def library_call() -> None:
        with kept_handlers():
            signal.signal(number, lambda *_: sys.exit(15))  # as in `ray.init`
            os.kill(os.getpid(), number)
            receiver.recv(1)  # the signal has arrived in this process
            steps.append("after the signal")

    signal.set_wakeup_fd(sender.fileno())
    try:
        with receiver, sender, ending_signals_interrupt() as received, pytest.raises(SignalInterrupt):
            library_call()
    finally:
        signal.set_wakeup_fd(-1)
        ended.set()
        other.join()
    assert steps == ["after the signal"]
    assert received.number == number


def test_children_of_a_library_call_are_ended_by_sigterm_but_not_by_sighup() -> None:
    show = "import signal; print(*sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    with kept_handlers():
        # Ray passes `preexec_fn` too
        done = subprocess.run([sys.executable, "-c", show], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: None)
    assert done.stdout.split() == [str(int(signal.SIGHUP))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_command_ends_with_128_plus_the_signal(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsweep.common.signals._leave_terminal", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fedsweep", "list"])
    monkeypatch.setattr("fedsweep.cli.listing.available", lambda kind: signal.raise_signal(number))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code


def end_self() -> None:
    """Send SIGTERM to this process, and give the signal time to arrive."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_a_reaction_that_a_library_sets_in_c_does_not_outlast_the_block():
    ignore = ctypes.c_void_p(int(signal.SIG_IGN))
    system = ctypes.CDLL(None)
    system.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def call_library() -> None:
        with kept_actions():
            system.signal(int(signal.SIGTERM), ignore)
            os.kill(os.getpid(), signal.SIGTERM)

    with ending_signals_interrupt() as received:
        library = threading.Thread(target=call_library)
        library.start()
        library.join()
        assert received.number == signal.SIGINT
        with pytest.raises(SignalInterrupt):
            end_self()
    assert received.status == 143


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback():
    body = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fedsweep.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from fedsweep.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
