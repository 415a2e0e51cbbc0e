"""Private temporary folders, which no other process uses and which are deleted even if their process is killed."""

import os
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedsweep.sweep.cluster.temporary_folders as folders
from fedsweep.common.errors import UserError
from fedsweep.common.files import LockedError
from fedsweep.sweep.cluster.temporary_folders import RAY_DIGITS, RAY_PREFIX, longest_parent, private_folder, ray_folder

PREFIX = "fedsweep-test-"


def scratch():
    return private_folder(Path(tempfile.gettempdir()), PREFIX)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
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
    real, names = folders.locked, []

    def locked(lock: Path, taken: str):
        names.append(lock)
        if len(names) == 1:
            raise LockedError(taken)
        return real(lock, taken)

    monkeypatch.setattr(folders, "locked", locked)
    with scratch() as folder:
        assert folder == names[1].with_suffix("")
    assert len({*names}) == 2


def test_an_existing_folder_is_neither_used_nor_deleted(temporary, monkeypatch):
    (temporary / f"{PREFIX}{'a' * 32}").mkdir()
    names = iter(("a" * 64, "b" * 64))
    monkeypatch.setattr(folders.secrets, "token_hex", lambda length: next(names))
    with scratch() as folder:
        assert folder.name == f"{PREFIX}{'b' * 32}"
    assert left(temporary) == [f"{PREFIX}{'a' * 32}"]


def test_a_folder_that_cannot_be_emptied_is_deleted_by_the_next_process(temporary, monkeypatch):
    with monkeypatch.context() as patch, scratch() as folder:
        (folder / "file").touch()
        patch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
    assert (folder / "file").exists()
    with scratch():
        assert not folder.exists()
    assert left(temporary) == []


def test_links_and_files_of_other_users_are_not_deleted(temporary, monkeypatch):
    mine = temporary / "mine"
    mine.write_text("kept")
    link, other = (temporary / f"{PREFIX}{digit * 32}.lock" for digit in "12")
    link.symlink_to(mine)
    other.touch()
    other.with_suffix("").mkdir()
    unlike = temporary / f"{PREFIX}notes.lock"
    unlike.touch()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with scratch():
        pass
    assert mine.read_text() == "kept"
    assert {*left(temporary)} == {link.name, other.name, other.stem, unlike.name}


def longest(parent: Path) -> Path:
    """Return the folder below `parent` whose path is as long as Ray's private folder allows."""
    return parent / ("x" * (longest_parent() - len(str(parent)) - 1))


@pytest.fixture
def short() -> Iterator[Path]:
    """Create a temporary folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as folder:
        yield Path(folder)


def test_rays_folder_is_private_and_one_of_its_sockets_fits_exactly(short, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(longest(short)))
    before = longest(short).parent.stat().st_mode
    with ray_folder() as folder:
        assert folder.parent.parent == longest(short)
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        session = f"session_2026-11-25_16-21-37_396597_{os.getpid()}"
        path = folder / session / "sockets" / "plasma_store"
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
        with ray_folder() as other:  # of another sweep
            assert other != folder
    assert list(longest(short).iterdir()) == []
    assert short.stat().st_mode == before


def test_a_long_tmpdir_is_replaced_and_a_long_ray_tmpdir_is_an_error(temporary, short, monkeypatch):
    deep = temporary / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with ray_folder() as folder:
        assert folder.parent.parent == Path("/tmp")  # noqa: S108
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with ray_folder() as folder:
        assert folder.parent.parent == short
    long = Path(f"{longest(short)}x")
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(UserError) as refused, ray_folder():
        pass
    room = len(str(long)) - 1
    assert str(refused.value) == (
        f"RAY_TMPDIR must be a path of at most {room} bytes, because the paths of Ray's sockets are limited to 107 "
        f"bytes, but {long} has {room + 1} bytes."
    )
    assert not long.exists()


def test_a_ray_tmpdir_that_is_no_folder_is_an_error(short, monkeypatch):
    (short / "f").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(short / "f"))
    with pytest.raises(UserError, match=rf"^Ray needs a folder in {short}/f, but it cannot"), ray_folder():
        pass


def test_rays_folder_of_a_killed_process_is_deleted_and_workers_folders_are_not(short, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    killed, worker = short / f"{RAY_PREFIX}{'0' * RAY_DIGITS}", short / "fedsweep-trial-00"
    for one in (killed, worker):
        one.mkdir()
        one.with_suffix(".lock").touch()
    with ray_folder() as folder:
        there = {one.name for one in short.iterdir() if not one.suffix}
        assert there == {worker.name, folder.parent.name}
