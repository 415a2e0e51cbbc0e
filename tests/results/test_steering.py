"""Requests to a running sweep, and the description of its process."""

import os

from fedsweep.common.files import locked
from fedsweep.results import SweepStore
from fedsweep.results.records import Change
from fedsweep.results.steering import (
    REQUESTS,
    DropRequest,
    ExtendRequest,
    Requests,
    StopRequest,
    driver_of,
    driving,
    is_running,
    keep_planned,
)


def test_requests_wait_until_they_are_answered(tmp_path):
    requests, other = Requests(SweepStore(tmp_path)), Requests(SweepStore(tmp_path))
    assert [*requests.waiting()] == []
    asked = [ExtendRequest(seeds=(3, 4)), DropRequest(arm={"lora.rank": 4}), StopRequest()]
    names = [requests.ask(one) for one in asked]
    assert [*other.waiting()] == [*zip(names, asked, strict=True)]
    other.answer(names[0])
    other.answer(names[1], "it has no such arm.")
    assert [name for name, _ in other.waiting()] == [names[2]]
    assert requests.answered(names[2]) is None
    assert requests.answered(names[0]).error is None
    assert requests.answered(names[1]).error == "it has no such arm."
    requests.withdraw(names[2])
    assert [*other.waiting()] == []
    assert [*(tmp_path / REQUESTS).iterdir()] == []


def test_a_request_of_another_version_is_refused(tmp_path):
    requests = Requests(SweepStore(tmp_path))
    name = requests.ask(StopRequest())
    (tmp_path / REQUESTS / f"{name}.json").write_text('{"name": "pause"}')
    assert [*requests.waiting()] == []
    assert requests.answered(name).error == "the request was written by another version of fedsweep."


def test_a_process_runs_a_sweep_as_long_as_it_holds_the_lock(tmp_path):
    sweep = SweepStore(tmp_path)
    assert not is_running(sweep)
    with locked(tmp_path / ".lock", "taken"):
        assert is_running(sweep)
        assert driver_of(sweep) is None
        with driving(sweep, parallel=2):
            assert (driver_of(sweep).pid, driver_of(sweep).parallel) == (os.getpid(), 2)
            keep_planned(sweep, 20)
            assert (driver_of(sweep).planned, driver_of(sweep).parallel) == (20, 2)
        assert driver_of(sweep) is None
    assert not is_running(sweep)
    assert driver_of(sweep) is None


def test_a_change_is_told_in_one_sentence():
    when = {"time": "2026-11-28T05:10:59+00:00", "ended": 1}
    changes = [
        Change(kind="extended", seeds=(3, 4), **when),
        Change(kind="dropped", arm={"lora.rank": 4}, **when),
        Change(kind="stopped", **when),
    ]
    end = "on 2026-11-28 at 05:10 UTC, when 1 trial had ended."
    assert [one.sentence for one in changes] == [
        f"The sweep was extended by the seeds 3, 4 {end}",
        f"The arm lora.rank=4 was dropped {end}",
        f"The sweep was stopped {end}",
    ]
