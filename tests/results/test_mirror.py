"""Mirrors of a remote folder, which transfer files between machines even if a process is killed."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem, _MockFileSystem

from fedsweep.common.files import write_atomically
from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.checkpoint import Checkpoint, load_history, save, without_tensors
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import RIGHT
from fedsweep.results.remote import Remote
from fedsweep.results.remote import objects as object_store
from fedsweep.results.remote.mirror import STATE, Mirror, _walked
from fedsweep.results.remote.objects import UnreachableError, persistently, put, read
from fedsweep.types import ServerState

NAMES = ["sweep.json", "trials/a/trial.json", "trials/a/outcome.json", "trials/b/checkpoint.safetensors", "x/y/z.txt"]
HIDDEN = [".lock", "trials/a/.torn", "ray/state.json", ".hidden/x"]


class Failing:
    """A file system that fails after `left` writes and deletions."""

    def __init__(self, real: FileSystem, left: int) -> None:
        self.real, self.left = real, left

    def __getattr__(self, name: str) -> Any:
        if name in ("open_output_stream", "delete_file"):
            self.left -= 1
            if self.left < 0:
                raise OSError("the network is gone")
        return getattr(self.real, name)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileSystem:
    if request.param == "memory":
        return _MockFileSystem()
    (tmp_path / "store").mkdir()
    return SubTreeFileSystem(str(tmp_path / "store"), LocalFileSystem())


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PAUSES", (0.0, 0.0))


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of the mirrored files of a folder, keyed by path."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in (*HIDDEN, STATE)}


def fresh(filesystem: FileSystem, folder: Path, base: str = "b/runs") -> dict[str, bytes]:
    Mirror(filesystem, base, folder).pull()
    return files(folder)


Action = st.tuples(st.sampled_from(["write", "remove", "push", "pull"]), st.sampled_from(NAMES))


@given(st.lists(Action, max_size=25))
def test_a_new_mirror_contains_what_was_pushed(tmp_path_factory: pytest.TempPathFactory, actions: list[Any]) -> None:
    tmp_path = tmp_path_factory.mktemp("mirror")
    store, local = _MockFileSystem(), tmp_path / "local"
    mirror = Mirror(store, "b/runs", local)
    for number, (action, name) in enumerate(actions):
        if action == "write":
            write_atomically(local / name, b"x" * number)
        elif action == "remove":
            (local / name).unlink(missing_ok=True)
        elif action == "push":
            mirror.push()
            assert fresh(store, tmp_path / f"at-{number}") == files(local)
        else:
            before = files(local)
            mirror.pull()
            assert files(local) == before, "a pull must keep files that are not yet sent"
    mirror.push()
    assert fresh(store, tmp_path / "at-the-end") == files(local)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(NAMES)), max_size=25))
@settings(max_examples=25)
def test_mirrors_that_write_in_turns_have_the_same_content(
    tmp_path_factory: pytest.TempPathFactory, actions: list[Any]
) -> None:
    """Each mirror pulls before it writes, as a driver does, and loads the record of its earlier process."""
    tmp_path, store = tmp_path_factory.mktemp("mirror"), _MockFileSystem()
    expected: dict[str, bytes] = {}
    for number, (who, removes, name) in enumerate(actions):
        mirror = Mirror(store, "b/runs", tmp_path / str(who))
        mirror.pull(discard=True)
        assert files(mirror.folder) == expected
        if removes:
            (mirror.folder / name).unlink(missing_ok=True)
            expected.pop(name, None)
        else:
            write_atomically(mirror.folder / name, b"x" * number)
            expected[name] = b"x" * number
        mirror.push()
        mirror.save()
    assert fresh(store, tmp_path / "fresh") == expected


def test_a_prefix_can_be_pulled_and_pushed_alone(store: FileSystem, tmp_path: Path) -> None:
    local = Mirror(store, "b/runs", tmp_path / "local")
    for name in NAMES:
        write_atomically(local.folder / name, name.encode())
    local.push("trials/a")
    assert local.names() == ["trials/a/outcome.json", "trials/a/trial.json"]
    local.push("sweep.json")
    assert local.names() == ["sweep.json", "trials/a/outcome.json", "trials/a/trial.json"]
    other = Mirror(store, "b/runs", tmp_path / "other")
    other.pull("trials/a")
    assert files(other.folder).keys() == {"trials/a/outcome.json", "trials/a/trial.json"}
    other.pull("trials/ab")
    other.pull("nowhere")


def test_hidden_files_and_rays_folder_are_neither_sent_nor_downloaded(store: FileSystem, tmp_path: Path) -> None:
    local = Mirror(store, "b/runs", tmp_path / "local")
    for name in (*NAMES, *HIDDEN):
        write_atomically(local.folder / name, b"x")
    local.push()
    local.save()
    assert local.names() == sorted(NAMES)
    for name in HIDDEN:
        put(store, f"b/runs/{name}", b"x")
    assert fresh(store, tmp_path / "other").keys() == set(NAMES)
    assert not any((tmp_path / "other" / name).exists() for name in HIDDEN)


def test_hidden_folders_are_not_searched(tmp_path: Path) -> None:
    for name in (*NAMES, ".hidden/deep/x", "trials/.torn/x"):
        write_atomically(tmp_path / name, b"x")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in _walked(tmp_path)) == sorted(NAMES)


def test_a_name_that_leads_out_of_the_folder_is_ignored(tmp_path: Path) -> None:
    class Wicked:
        def get_file_info(self, _: object) -> list[Any]:
            from types import SimpleNamespace

            names = ["../outside", "trials/../../outside", "/etc/outside", "a//b", "trials/./x"]
            return [SimpleNamespace(path=f"b/{one}", is_file=True, size=1, mtime_ns=1) for one in names]

    Mirror(Wicked(), "b", tmp_path / "local").pull()  # type: ignore[arg-type]
    assert not list(tmp_path.rglob("*outside*"))


def test_local_changes_are_kept_unless_discard_is_set(store: FileSystem, tmp_path: Path) -> None:
    mirror = Mirror(store, "b/runs", tmp_path / "local")
    for name in ("changed", "removed", "gone"):
        put(store, f"b/runs/{name}", b"theirs")
    mirror.pull()
    (mirror.folder / "changed").write_bytes(b"mine")
    (mirror.folder / "removed").unlink()
    (mirror.folder / "new").write_bytes(b"mine")
    store.delete_file("b/runs/gone")
    mirror.pull()
    assert files(mirror.folder) == {"changed": b"mine", "new": b"mine"}
    mirror.pull(discard=True)
    assert files(mirror.folder) == {"changed": b"theirs", "removed": b"theirs"}


PLAN = TrialPlan(key="k", number=0, arm={}, seed=0, config={})


def state(rounds: int) -> Checkpoint:
    import torch

    history = tuple(RoundRecord(one, {"accuracy/mean": 0.1 * one}, 0.5) for one in range(rounds + 1))
    return Checkpoint(rounds, ServerState({"w": torch.full((64, 64), float(rounds))}, (0,)), history)


@pytest.mark.parametrize("left", range(9))
def test_a_sweep_can_be_resumed_after_a_push_that_was_interrupted_anywhere(
    store: FileSystem, tmp_path: Path, left: int
) -> None:
    """A checkpoint arrives before its outcome and before the plan of a trial that starts from it.

    The correctly predicted images arrive before the checkpoint.
    """
    sweep = SweepStore(tmp_path / "local")
    other = sweep.trial("other")
    save(other.checkpoint, state(2))
    (other.folder / RIGHT).write_text("{}")
    other.plan(PLAN)
    other.end(Outcome(outcome="finished", round=2))
    trial = sweep.trial("k")
    trial.end(Outcome(outcome="pruned", round=1))  # the outcome is written first, at almost the same time
    trial.plan(PLAN)
    trial.begin_from(other, 2)
    mirror = Mirror(Failing(store, left), "b/runs", sweep.folder)  # type: ignore[arg-type]
    with contextlib.suppress(OSError):
        mirror.push()
    arrived = SweepStore(tmp_path / "other")
    fresh(store, arrived.folder)
    for key in ("k", "other"):
        at = arrived.trial(key)
        assert at.checkpoint.exists() or not at.planned
        assert at.planned or at.outcome() is None
        assert (at.folder / RIGHT).exists() or key == "k" or not at.checkpoint.exists()
    mirror.filesystem = store
    mirror.push()
    assert fresh(store, tmp_path / "whole") == files(sweep.folder)


def test_an_outcome_is_deleted_before_its_checkpoint(store: FileSystem, tmp_path: Path) -> None:
    sweep = SweepStore(tmp_path / "local")
    trial = sweep.trial("k")
    save(trial.checkpoint, state(1))
    trial.plan(PLAN)
    trial.end(Outcome(outcome="failed", round=1))
    Mirror(store, "b/runs", sweep.folder).push()
    mirror = Mirror(Failing(store, 1), "b/runs", sweep.folder)  # type: ignore[arg-type]
    mirror.pull(discard=True)
    for path in trial.folder.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="network"):
        mirror.push()
    assert mirror.names() == ["trials/k/checkpoint.safetensors", "trials/k/trial.json"]


def test_only_the_history_of_a_checkpoint_is_downloaded_until_the_tensors_are_needed(
    store: FileSystem, tmp_path: Path
) -> None:
    trial = SweepStore(tmp_path / "local").trial("k")
    save(trial.checkpoint, state(3))
    local = Mirror(store, "b/runs", trial.folder)
    local.push()
    shorten = {trial.checkpoint.name: without_tensors}
    other = Mirror(store, "b/runs", tmp_path / "other", shorten)
    copy = other.folder / trial.checkpoint.name
    other.pull()
    assert list(load_history(copy)) == list(trial.recorded())
    assert copy.stat().st_size < trial.checkpoint.stat().st_size - 64 * 64 * 4
    other.push()
    assert read(store, f"b/runs/{copy.name}") == trial.checkpoint.read_bytes(), "a shortened file must not be sent back"
    other.pull(whole=True)
    assert copy.read_bytes() == trial.checkpoint.read_bytes()
    save(trial.checkpoint, state(4))
    local.push()
    other.save()
    later = Mirror(store, "b/runs", tmp_path / "other", shorten)
    later.pull()
    assert len(load_history(copy)) == 5
    later.pull(whole=True)
    assert copy.read_bytes() == trial.checkpoint.read_bytes()


def test_a_long_history_is_read_with_a_second_request(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedsweep.results.checkpoint.FIRST_BYTES", 64)
    save(tmp_path / "checkpoint", state(3))
    with (tmp_path / "checkpoint").open("rb") as file:
        write_atomically(tmp_path / "short", without_tensors(file))
    assert list(load_history(tmp_path / "short")) == list(state(3).history)


def test_nothing_is_downloaded_twice(tmp_path: Path, store: FileSystem) -> None:
    class Counting:
        reads = 0

        def __getattr__(self, name: str) -> Any:
            self.reads += name == "open_input_file"
            return getattr(store, name)

    counting = Counting()
    for name in NAMES:
        put(store, f"b/{name}", b"1")
    for attempt in range(3):
        mirror = Mirror(counting, "b", tmp_path / "local")  # type: ignore[arg-type]
        mirror.pull(discard=attempt == 2)
        mirror.pull()
        mirror.save()
    assert counting.reads == len(NAMES)
    write_atomically(mirror.folder / NAMES[0], b"2 2")
    mirror.push()
    mirror.pull()
    assert counting.reads == len(NAMES), "a file that this mirror sent must not be downloaded"


@pytest.mark.parametrize("torn", ["", "[1]", "{", '{"x": 1}', '{"x": [[1], 2, 3]}', json.dumps({"x": [[1, 2], None]})])
def test_a_damaged_record_only_causes_further_downloads(store: FileSystem, tmp_path: Path, torn: str) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / STATE).write_text(torn)
    put(store, "b/x", b"1")
    mirror = Mirror(store, "b", tmp_path / "local")
    mirror.pull(discard=True)
    assert files(mirror.folder) == {"x": b"1"}


def test_files_that_could_not_be_sent_are_sent_with_the_next_push(store: FileSystem, tmp_path: Path) -> None:
    mirror = Mirror(Failing(store, 0), "b", tmp_path / "local")  # type: ignore[arg-type]
    remote = Remote(mirror)
    write_atomically(mirror.folder / "trials/a/outcome.json", b"1")
    remote.below("trials", "a").push()
    assert remote.unsent == {"trials/a": "the network is gone"}
    write_atomically(mirror.folder / "trials/b/trial.json", b"1")
    with pytest.raises(UnreachableError, match="the network is gone"):
        remote.below("trials", "b").push(needed=True)
    mirror.filesystem = store
    remote.below("sweep.json").push()
    assert mirror.names() == ["trials/a/outcome.json", "trials/b/trial.json"]
    assert remote.unsent == {}


def test_a_local_folder_has_no_remote_counterpart() -> None:
    Remote().below("x").pull(whole=True)
    Remote().below("x").push(needed=True)


def test_a_full_disk_and_a_missing_file_are_not_retried() -> None:
    for error in (OSError(28, "No space left on device"), FileNotFoundError(2, "No such file")):
        tries = []

        def fail(error: OSError = error, tries: list[int] = tries) -> None:
            tries.append(1)
            raise error

        with pytest.raises(OSError, match="No ") as met:
            persistently(fail)
        assert met.value is error
        assert len(tries) == 1


def test_a_short_network_outage_has_no_effect() -> None:
    answers = iter([OSError("no"), OSError("no"), 7])

    def ask() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert persistently(ask) == 7
