"""The thread that runs Ray Tune, under interrupts and the loss of Ray. No Ray is started."""

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fedsweep.sweep.cluster.cluster import Cluster
from fedsweep.sweep.running import watched
from fedsweep.sweep.running.watched import RayLostError, Stop, StoppedError, Watch, run_watched


def wait_for(event: threading.Event) -> None:
    """Imitate a call that is blocked in Ray's C++ code until `event` is set."""
    event.wait()


def loop(stop: Stop) -> None:
    """Imitate Ray Tune's loop, which checks for a stop in each step."""
    while True:
        stop.check()
        time.sleep(0.01)


def test_an_error_of_ray_tune_is_raised() -> None:
    def body() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_watched(body, Stop(), lambda: "", lambda: None)


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Return a function that interrupts the main thread, which calls the function while it waits for Ray Tune.

    SIGINT raises KeyboardInterrupt, even if the shell that runs the tests ignores it.
    """
    monkeypatch.setattr(watched, "LOOK_SECONDS", 0.001)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    yield interrupt
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_ends_the_loop_with_a_message(interrupts: Callable[[], str]) -> None:
    stop, said = Stop(), list[str]()
    run_watched(lambda: loop(stop), stop, lambda: "" if stop.asked else interrupts(), lambda: said.append("stopping"))
    assert said == ["stopping"]
    assert stop.asked
    assert not stop.abandoned


@pytest.mark.parametrize("during_announce", [False, True])
def test_the_second_interrupt_waits_until_ray_tune_has_left_ray(
    interrupts: Callable[[], str], during_announce: bool
) -> None:
    """Ray ends the process if a thread calls it after its shutdown."""
    stop, left = Stop(), list[bool]()

    def body() -> None:
        while not stop.abandoned:
            time.sleep(0.001)
        time.sleep(0.2)  # Ray Tune still stops its workers
        left.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_watched(body, stop, interrupts, interrupts if during_announce else lambda: "")
    assert left == [True]
    assert stop.abandoned


@pytest.mark.parametrize("during_announce", [False, True])
def test_the_second_interrupt_does_not_wait_long_for_a_blocked_call(
    interrupts: Callable[[], str], during_announce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LEAVE_SECONDS", 0.01)
    stop, blocked = Stop(), threading.Event()
    announce = interrupts if during_announce else lambda: ""
    with pytest.raises(KeyboardInterrupt):
        run_watched(functools.partial(wait_for, blocked), stop, interrupts, announce)
    assert stop.asked
    assert stop.abandoned
    with pytest.raises(StoppedError):
        stop.check_abandoned()
    blocked.set()


def test_the_third_interrupt_is_raised_at_once(interrupts: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LEAVE_SECONDS", 60.0)
    stop, blocked = Stop(), threading.Event()
    third = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    third.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_watched(functools.partial(wait_for, blocked), stop, interrupts, lambda: "")
    third.cancel()
    assert time.monotonic() - begin < 30
    blocked.set()


@pytest.mark.parametrize("asked", [False, True])
def test_a_lost_process_ends_the_wait_for_a_blocked_call(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, which may have ended Ray as well, the loss is not reported."""
    monkeypatch.setattr(watched, "SIGNAL_SECONDS", 0)
    stop, blocked = Stop(), threading.Event()
    stop.asked = asked
    with contextlib.nullcontext() if asked else pytest.raises(RayLostError, match=r"^the GCS$"):
        run_watched(functools.partial(wait_for, blocked), stop, lambda: "the GCS", lambda: None)
    assert stop.abandoned
    blocked.set()


def test_a_head_node_counts_as_lost_after_several_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(watched, "CONNECT_SECONDS", 0.01)
        watch = Watch(Cluster(address))
        time.sleep(0.02)
        assert watch.lost() == ""
    answers: list[str] = []
    while len(answers) < 50 and not (answers and answers[-1]):
        time.sleep(0.02)
        answers.append(watch.lost())
    assert answers[-1] == f"the head node {address}"
    assert answers.count("") == len(answers) - 1 >= watched.FAILURES - 1
