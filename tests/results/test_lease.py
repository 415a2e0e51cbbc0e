"""One driver at a time on a sweep in an object store."""

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem

from fedsweep.common.errors import UserError
from fedsweep.results.remote import lease
from fedsweep.results.remote.lease import NAME, Lease, is_dead, process
from fedsweep.results.remote.objects import put, read


@pytest.fixture
def elsewhere(tmp_path: Any) -> FileSystem:
    return SubTreeFileSystem(str(tmp_path), LocalFileSystem())


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SETTLES", 0.01)
    monkeypatch.setattr(lease, "RENEWED", 0.02)


def others(elsewhere: FileSystem, seconds_ago: float = 0.0, **more: Any) -> None:
    """The lease of a process on another machine."""
    put(elsewhere, f"s/{NAME}", json.dumps({"nonce": "theirs", "host": "worker-7", **more}).encode())
    then = time.time() - seconds_ago
    os.utime(f"{elsewhere.base_path}/s/{NAME}", (then, then))


def test_it_is_renewed_while_it_is_held_and_gone_afterwards(elsewhere: FileSystem) -> None:
    with Lease(elsewhere, "s").held("sweep x"):
        first = read(elsewhere, f"s/{NAME}")
        deadline = time.monotonic() + 10
        while read(elsewhere, f"s/{NAME}") == first and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read(elsewhere, f"s/{NAME}") != first
        with (
            pytest.raises(UserError, match=r"^sweep x is being run by a process on .*; wait for it or end it\."),
            Lease(elsewhere, "s").held("sweep x"),
        ):
            pass
    assert not os.listdir(f"{elsewhere.base_path}/s")
    with Lease(elsewhere, "s").held("sweep x"):
        pass


def test_the_holder_is_named(elsewhere: FileSystem) -> None:
    others(elsewhere, seconds_ago=100)
    with pytest.raises(UserError) as refused, Lease(elsewhere, "s").held("sweep x"):
        pass
    assert str(refused.value) == (
        "sweep x is being run by a process on worker-7; wait for it or end it. "
        "One that was killed gives way after 2 minutes."
    )
    assert os.listdir(f"{elsewhere.base_path}/s") == [NAME]


def test_one_that_was_not_renewed_for_two_minutes_is_taken_over(elsewhere: FileSystem) -> None:
    others(elsewhere, seconds_ago=121)
    with Lease(elsewhere, "s").held("sweep x"):
        assert "theirs" not in read(elsewhere, f"s/{NAME}").decode()


def test_one_of_a_killed_process_of_this_machine_is_taken_over_at_once(elsewhere: FileSystem) -> None:
    code = "from fedsweep.results.remote.lease import process; print(process())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert is_dead(dead)
    assert not is_dead(process())
    boot, *rest = process().split(" ")
    assert not is_dead(" ".join([boot[:-1] + "x", *rest[:-1], "1"])), "of another machine nothing is known"
    others(elsewhere, process=dead)
    with Lease(elsewhere, "s").held("sweep x"):
        pass
    others(elsewhere, process=process())
    with pytest.raises(UserError), Lease(elsewhere, "s").held("sweep x"):
        pass


@pytest.mark.parametrize("torn", [b"", b"[]", b"{}", b"\xff"])
def test_what_is_no_lease_is_none(elsewhere: FileSystem, torn: bytes) -> None:
    put(elsewhere, f"s/{NAME}", torn)
    with Lease(elsewhere, "s").held("sweep x"):
        pass


def test_of_several_that_ask_at_once_one_gets_it(elsewhere: FileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SETTLES", 0.5)
    leases = [Lease(elsewhere, "s") for _ in range(4)]
    met: list[str] = []
    over = threading.Event()

    def take(one: Lease) -> None:
        try:
            with one.held("sweep x"):
                met.append("held")
                over.wait(10)
        except UserError as error:
            met.append(str(error))
            if len(met) == len(leases):
                over.set()

    for one in leases:  # all have looked before any has written
        monkeypatch.setattr(one, "holder", lambda: None)
    threads = [threading.Thread(target=take, args=(one,)) for one in leases]
    for thread in threads:
        thread.start()
    while len(met) < len(leases) and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join()
    assert met.count("held") == 1
    assert sum("has just been taken by a process on" in one for one in met) == 3


def test_who_lost_it_knows_and_leaves_the_other_one_alone(elsewhere: FileSystem) -> None:
    with Lease(elsewhere, "s").held("sweep x") as mine:
        deadline = time.monotonic() + 10
        while not mine.lost and time.monotonic() < deadline:
            others(elsewhere)
            time.sleep(0.01)
        assert mine.lost
    assert "theirs" in read(elsewhere, f"s/{NAME}").decode()
