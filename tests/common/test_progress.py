"""The waiting line, the time left, and the announcement of Ctrl-C."""

import io
import signal
import sys
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from fedsweep.common.progress import LeftColumn, TimeLeft, announced_stop, loading, waiting


class Clock:
    """A clock that a test sets by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def played(clock: Clock, rounds: int, seconds: float) -> TimeLeft:
    """Return an estimate after `rounds` rounds of `seconds` seconds each."""
    time = TimeLeft(clock)
    for _ in range(rounds):
        clock.now += seconds
        time.add(seconds)
    return time


def test_the_time_left_is_unknown_before_the_first_round():
    assert TimeLeft(Clock()).left(12) is None


@pytest.mark.parametrize(("rounds", "seconds"), [(1, 3.0), (2, 17.5), (11, 0.25), (5, 3600.0)])
def test_the_time_left_is_the_mean_duration_times_the_rounds_left(rounds, seconds):
    assert played(Clock(), rounds, seconds).left(12 - rounds) == pytest.approx((12 - rounds) * seconds)


def test_the_start_of_the_processes_does_not_count():
    clock = Clock()
    clock.now += 35.0
    assert played(clock, 2, 3.0).left(10) == pytest.approx(30.0)


def test_the_time_left_decreases_within_a_round_but_never_below_the_later_rounds():
    clock = Clock()
    time = played(clock, 4, 10.0)
    left = []
    for _ in range(30):
        left.append(time.left(3))
        clock.now += 1.0
    assert left[:3] == pytest.approx([30.0, 29.0, 28.0])
    assert left[10:] == pytest.approx([20.0] * 20)
    assert time.left(0) == 0


def test_parallel_rounds_divide_the_time_left_but_not_that_of_one_trial():
    time = played(Clock(), 4, 10.0)
    assert time.left(40, parallel=4) == pytest.approx(100.0)
    assert time.left(40, parallel=4, longest=30) == pytest.approx(300.0)


def test_the_column_is_empty_until_the_time_is_known():
    progress = Progress()
    progress.add_task("rounds")
    (task,) = progress.tasks
    assert LeftColumn(lambda _: None).render(task).plain == ""
    assert LeftColumn(lambda _: 7384.4).render(task).plain == "about 2:03:04 left"


def test_a_pipe_gets_one_plain_line_of_a_step_that_always_takes_seconds(capsys):
    text = io.StringIO()
    console = Console(file=text)
    with waiting(console, "Checking the arms"):
        print("row")
    with waiting(console, "Starting Ray", always=True):
        print("row")
    assert (text.getvalue(), capsys.readouterr().out) == ("Starting Ray ...\n", "row\nrow\n")


def test_a_terminal_shows_the_step_at_once_and_leaves_stdout_alone(capsys):
    text = io.StringIO()
    with waiting(Console(file=text, force_terminal=True, width=80), "Checking the arms"):
        assert "Checking the arms" in text.getvalue()
        print("row")
    assert capsys.readouterr().out == "row\n"
    assert "row" not in text.getvalue()


def test_nothing_is_shown_while_an_imported_package_is_imported_again():
    text = io.StringIO()
    with loading(Console(file=text), "sys", "sys"):
        assert text.getvalue() == ""
    assert "not.there" not in sys.modules
    with loading(Console(file=text), "PyTorch", "not.there"):
        assert text.getvalue() == "Loading PyTorch ...\n"


def test_ctrl_c_is_announced_once_and_then_raised_as_usual():
    before, told = signal.getsignal(signal.SIGINT), threading.Event()
    with pytest.raises(KeyboardInterrupt), announced_stop(told.set):
        signal.raise_signal(signal.SIGINT)
    assert told.wait(60)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_ctrl_c_the_handler_is_restored_and_nothing_is_announced():
    before, told = signal.getsignal(signal.SIGINT), []
    with announced_stop(lambda: told.append("stopping")):
        assert signal.getsignal(signal.SIGINT) is not before
    assert (signal.getsignal(signal.SIGINT), told) == (before, [])
