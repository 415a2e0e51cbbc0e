"""A worker's temporary folder, which no other worker uses and which is deleted even if the worker is killed."""

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
    """Fork a process whose temporary folder contains a checkpoint, and kill it after the block."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forking a process with threads
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


def test_each_worker_has_an_empty_folder_that_is_deleted_at_the_end(temporary):
    with scratch() as one, scratch() as other:
        assert one != other
        (one / "deep").mkdir()
        (one / "deep" / "file").touch()
        assert list(other.iterdir()) == []
        assert one.stat().st_mode & 0o077 == 0
    assert left(temporary) == []


def test_the_next_worker_deletes_the_folder_of_a_killed_worker_but_not_of_a_living_one(temporary):
    with worker() as killed:
        pass
    assert (killed / "checkpoint").exists()
    with worker() as living, scratch():
        assert not killed.exists()
        assert (living / "checkpoint").exists()
    with scratch():
        assert not living.exists()
    assert left(temporary) == []


def test_if_another_worker_locks_a_new_lock_file_first_another_one_is_created(temporary, monkeypatch):
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


def test_links_and_files_of_other_users_are_not_deleted(temporary, monkeypatch):
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
