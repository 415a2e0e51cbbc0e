"""The lease, which allows one driver at a time per sweep in an object store."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import MemoryStore
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from fedsweep.common.errors import UserError
from fedsweep.results.remote import lease
from fedsweep.results.remote.conditional_writes import ConditionalObjects, _conditional_store, objects_of
from fedsweep.results.remote.lease import NAME, Found, Lease, UnconditionalObjects, is_dead, process
from tests.sweep.objects import URI, object_store

Objects = ConditionalObjects | UnconditionalObjects
FOLDER = "bucket/s"
PATH = f"{FOLDER}/{NAME}"

client = pytest.fixture(object_store, scope="module")


@pytest.fixture(params=["conditional", "unconditional"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "conditional":
        return ConditionalObjects(MemoryStore())
    return UnconditionalObjects(SubTreeFileSystem(str(tmp_path), LocalFileSystem()))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SETTLES", 0.01)
    monkeypatch.setattr(lease, "RENEWED", 0.02)


def write_foreign_lease(remote: Objects, **more: Any) -> None:
    """Write the lease of a process on another machine, with additional fields in `more`."""
    content = json.dumps({"nonce": "theirs", "host": "worker-7", **more}).encode()
    remote.write(PATH, content, remote.read(PATH).version)


def acquire(remote: Objects) -> None:
    with Lease(remote, FOLDER).acquired("sweep x"):
        pass


@pytest.fixture(scope="module")
def ended_process() -> str:
    """Return the identifier of a process of this machine that has ended."""
    code = "from fedsweep.results.remote.lease import process; print(process())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_lease_is_renewed_while_it_is_held_and_deleted_afterwards(remote: Objects) -> None:
    with Lease(remote, FOLDER).acquired("sweep x"):
        first = remote.read(PATH)
        deadline = time.monotonic() + 10
        while remote.read(PATH).content == first.content and time.monotonic() < deadline:
            time.sleep(0.01)
        assert remote.read(PATH).content != first.content
        with pytest.raises(UserError, match=r"^sweep x is being run by a process on .*; wait until that process "):
            acquire(remote)
    assert remote.read(PATH) == Found()
    acquire(remote)


def test_the_error_names_the_machine_that_holds_the_lease(remote: Objects) -> None:
    write_foreign_lease(remote)
    with pytest.raises(UserError) as error:
        acquire(remote)
    assert str(error.value) == (
        "sweep x is being run by a process on worker-7; wait until that process ends, or stop it. "
        "If it was killed, try again in 2 minutes."
    )


def test_a_lease_that_was_not_renewed_is_replaced(remote: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    write_foreign_lease(remote)
    monkeypatch.setattr(lease, "STALE", 60.0)
    with pytest.raises(UserError):
        acquire(remote)
    time.sleep(0.3)
    monkeypatch.setattr(lease, "STALE", 0.2)
    with Lease(remote, FOLDER).acquired("sweep x"):
        assert b"theirs" not in remote.read(PATH).content


def test_the_lease_of_a_killed_process_of_this_machine_is_replaced_at_once(remote: Objects, ended_process: str) -> None:
    assert is_dead(ended_process)
    assert not is_dead(process())
    boot, *rest = process().split(" ")
    assert not is_dead(" ".join([boot[:-1] + "x", *rest[:-1], "1"])), "processes of another machine may be alive"
    write_foreign_lease(remote, process=ended_process)
    acquire(remote)
    write_foreign_lease(remote, process=process())
    with pytest.raises(UserError):
        acquire(remote)


@pytest.mark.parametrize("torn", [b"", b"[]", b"{}", b"\xff"])
def test_an_invalid_lease_is_replaced(remote: Objects, torn: bytes) -> None:
    remote.write(PATH, torn, None)
    acquire(remote)


def test_a_process_that_lost_the_lease_knows_it_and_does_not_delete_the_new_one(remote: Objects) -> None:
    with Lease(remote, FOLDER).acquired("sweep x") as mine:
        deadline = time.monotonic() + 10
        while not mine.lost and time.monotonic() < deadline:
            write_foreign_lease(remote)
            time.sleep(0.01)
        assert mine.lost
    assert b"theirs" in remote.read(PATH).content


class Slow:
    """A wrapper around remote objects that delays each write for a random time."""

    def __init__(self, real: Objects) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write(self, path: str, content: bytes, version: Any) -> None:
        time.sleep(random.uniform(0, 0.05))
        self.real.write(path, content, version)


def race(remote: Objects, drivers: int) -> Counter[str]:
    """Let several drivers try to acquire the lease after each has seen that it is free, and count the outcomes."""
    fared: list[str] = []
    ready, over = threading.Barrier(drivers), threading.Barrier(drivers)

    def drive() -> None:
        mine = Lease(Slow(remote), FOLDER)  # type: ignore[arg-type]
        look = mine.look

        def looked() -> Any:
            seen = look()
            ready.wait(30)
            return seen

        mine.look = looked  # type: ignore[method-assign]
        try:
            with mine.acquired("sweep x"):
                fared.append("acquired")
                over.wait(30)
        except UserError as error:
            fared.append(str(error).partition(" by a process")[0])
            over.wait(30)

    threads = [threading.Thread(target=drive) for _ in range(drivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(fared)


def race_often(remote: Objects, ended_process: str, drivers: int) -> Iterator[Counter[str]]:
    for _ in range(10):
        yield race(remote, drivers)
        assert remote.read(PATH) == Found()
        write_foreign_lease(remote, process=ended_process)
        yield race(remote, drivers)


ONE_OF_TWO = {"acquired": 1, "sweep x was just started": 1}


def test_one_of_two_drivers_with_slow_writes_acquires_a_free_lease_or_that_of_a_dead_process(
    ended_process: str,
) -> None:
    fared = list(race_often(ConditionalObjects(MemoryStore()), ended_process, 2))
    assert fared == [ONE_OF_TWO] * 20


def test_without_conditional_writes_one_of_several_drivers_acquires_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SETTLES", 0.5)
    remote = UnconditionalObjects(SubTreeFileSystem(str(tmp_path), LocalFileSystem()))
    assert race(remote, 4) == {"acquired": 1, "sweep x was just started": 3}


@pytest.mark.slow
def test_one_of_several_drivers_acquires_the_lease_on_a_real_server(client: Any, ended_process: str) -> None:
    remote = objects_of(URI)
    assert remote.exclusive
    fared = list(race_often(remote, ended_process, 2))
    assert fared == [ONE_OF_TWO] * 20
    assert "Contents" not in client.list_objects_v2(Bucket="bucket")


@pytest.mark.slow
def test_keys_of_a_profile_and_an_endpoint_in_the_uri_open_the_same_store(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = client.meta.endpoint_url.removeprefix("http://")
    (tmp_path / "keys").write_text("[group]\naws_access_key_id = someone\naws_secret_access_key = un%guessable\n")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "group")
    remote = objects_of(f"{URI}?endpoint_override={endpoint}&scheme=http&region=us-east-1")
    assert remote.exclusive
    acquire(remote)


@pytest.mark.parametrize(
    ("uri", "kind", "opened"),
    [
        ("s3://bucket/x", "s3", "S3Store"),
        ("gs://bucket/x", "gcs", "GCSStore"),
        ("abfs://bucket@account.dfs.core.windows.net/x", "abfs", "AzureStore"),
        ("abfs://account.blob.core.windows.net/bucket/x", "abfs", "AzureStore"),
    ],
)
def test_obstore_opens_the_bucket_that_pyarrow_found(uri: str, kind: str, opened: str) -> None:
    store = _conditional_store(uri, SimpleNamespace(type_name=kind, region="us-east-1"), "bucket")
    assert type(store).__name__ == opened
    assert "bucket" in repr(store)


@pytest.mark.parametrize(
    ("uri", "kind"), [("hdfs://host/x", "hdfs"), ("gs://b/x?endpoint_override=h", "gcs"), ("abfs://b/x", "abfs")]
)
def test_uris_that_obstore_interprets_differently_are_not_opened_with_it(uri: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"does not open {kind} stores"):
        _conditional_store(uri, SimpleNamespace(type_name=kind), "b")


def test_a_store_that_obstore_does_not_open_is_written_unconditionally(tmp_path: Path) -> None:
    assert not objects_of(f"file://{tmp_path}").exclusive
    assert not list(tmp_path.iterdir())
