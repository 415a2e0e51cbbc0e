"""A worker's folder: its own while it lives, and gone after it, however it ended."""

import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedsweep.sweep.running.trainable as scratch_module
from fedsweep.common.errors import UserError
from fedsweep.sweep.running.trainable import PREFIX, scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def worker() -> Iterator[Path]:
    """A copy of this process with a folder that holds a checkpoint; it is killed after the block."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a copy of a process with threads
        number = os.fork()
    if number == 0:
        try:
            with scratch() as folder:
                (folder / "checkpoint").write_bytes(b"rounds")
                os.write(writing, f"{folder}\n".encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        try:
            yield Path(told.readline().strip())
        finally:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def left(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir() if one.name.startswith(PREFIX)]


def test_each_has_an_empty_folder_that_goes_with_it(temporary):
    with scratch() as one, scratch() as other:
        assert one != other
        (one / "deep").mkdir()
        (one / "deep" / "file").touch()
        assert list(other.iterdir()) == []
        assert one.stat().st_mode & 0o077 == 0
    assert left(temporary) == []


def test_what_a_killed_worker_left_goes_with_the_next_one_and_a_living_ones_stays(temporary):
    with worker() as killed:
        pass
    assert (killed / "checkpoint").exists()
    with worker() as living, scratch():
        assert not killed.exists()
        assert (living / "checkpoint").exists()
    with scratch():
        assert not living.exists()
    assert left(temporary) == []


def test_a_lock_that_another_worker_sweeps_up_before_it_is_held_is_followed_by_another_one(temporary, monkeypatch):
    real, names = scratch_module.locked, []

    def locked(lock: Path, taken: str):
        names.append(lock)
        if len(names) == 1:
            raise UserError(taken)
        return real(lock, taken)

    monkeypatch.setattr(scratch_module, "locked", locked)
    with scratch() as folder:
        assert folder == names[1].with_suffix("")
    assert len({*names}) == 2


def test_links_and_what_is_of_others_are_left_alone(temporary, monkeypatch):
    mine = temporary / "mine"
    mine.write_text("kept")
    link = temporary / f"{PREFIX}link.lock"
    link.symlink_to(mine)
    (temporary / f"{PREFIX}other.lock").touch()
    (temporary / f"{PREFIX}other").mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with scratch():
        pass
    assert mine.read_text() == "kept"
    assert {f"{PREFIX}link.lock", f"{PREFIX}other", f"{PREFIX}other.lock"} <= {*left(temporary)}
