"""The thread that writes to MLflow, which never delays the driver and loses no data."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsweep.results import Outcome, Store
from fedsweep.tracking import Destination, Recorder, deliver_all, recorder
from fedsweep.tracking.parent_and_child_runs import Runs
from fedsweep.tracking.recorder import END
from tests.fixtures import NewStore
from tests.tracking.helpers import MANIFEST, PLAN, finished, sweep_folder, trial


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(recorder, "LONGEST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, new_store: NewStore) -> Store:
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def opened(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(store, request.node.name)
    made.open_sweep(MANIFEST, sweep_folder(tmp_path))
    assert made.deliver()
    yield made
    assert made.deliver()


def steps(runs: Runs, key: str = "k1") -> list[tuple[int, float]]:
    (run,) = runs.client.search_runs([runs.experiment.id], f"tags.`fedsweep.key` = '{key}'")
    return [(one.step, one.value) for one in runs.client.get_metric_history(run.info.run_id, "accuracy/mean")]


def parent(runs: Runs) -> Any:
    (run,) = runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.kind` = 'sweep'")
    return run


class Held:
    """A replacement for a write to MLflow, which does not return until the test releases it."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.reached.set()
        assert self.released.wait(60)
        return self.real(*args, **kwargs)


def test_the_driver_does_not_wait_and_later_rounds_are_one_write(
    opened: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(opened.runs.client.log_batch)
    monkeypatch.setattr(opened.runs.client, "log_batch", held)
    opened.sync(trial(1))
    assert held.reached.wait(60)
    for rounds in range(2, 40):
        opened.sync(trial(rounds))
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "PATIENCE", 0)
        assert not opened.deliver()
    assert opened.unsynced == {"k1": "not written yet"}
    held.released.set()
    assert opened.deliver()
    assert steps(opened.runs) == [(i, i / 7) for i in range(39)]
    assert held.calls == 2


def test_ctrl_c_ends_the_wait_for_mlflow_and_loses_nothing(opened: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All trials have ended when the driver waits, so that an interrupt is no error."""
    held = Held(opened.runs.client.log_batch)
    monkeypatch.setattr(opened.runs.client, "log_batch", held)
    opened.sync(trial(3))
    assert not opened.deliver(tell=lambda left: signal.raise_signal(signal.SIGINT))
    assert opened.unsynced == {"k1": "not written yet"}
    held.released.set()
    assert opened.deliver()
    assert steps(opened.runs) == [(i, i / 7) for i in range(3)]


def test_one_thread_writes_and_ends_when_the_queue_is_empty(opened: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: set[str] = set()
    lock = threading.Lock()
    real = opened.runs.client.log_batch

    def write(*args: Any, **kwargs: Any) -> Any:
        assert lock.acquire(blocking=False)
        writers.add(threading.current_thread().name)
        try:
            return real(*args, **kwargs)
        finally:
            lock.release()

    monkeypatch.setattr(opened.runs.client, "log_batch", write)
    for rounds in range(1, 5):
        opened.sync(trial(rounds))
        opened.sync(trial(rounds, plan=PLAN.model_copy(update={"key": "k2"})))
        time.sleep(0.01)
    assert opened.deliver()
    assert writers == {"mlflow"}
    assert steps(opened.runs) == steps(opened.runs, "k2") == [(i, i / 7) for i in range(4)]


def test_rounds_of_an_outage_are_written_after_it(opened: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def down(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        raise ConnectionError("no route to it")

    with monkeypatch.context() as patch:
        for name in ("create_run", "log_batch", "search_runs", "search_experiments", "set_terminated", "get_run"):
            patch.setattr(opened.runs.client, name, down)
        for rounds in range(5):
            opened.sync(trial(rounds))
        opened.sync(finished(3, PLAN.model_copy(update={"key": "k2"})))
        patch.setattr(recorder, "PATIENCE", 0.2)
        opened.close_sweep("FINISHED", {"trials/finished": 1.0})
        deadline = time.monotonic() + 60
        while asked < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert opened.outage is not None
        assert opened.outage.endswith("cannot be used: no route to it.")
        assert set(opened.unsynced) == {"k1", "k2", END}
    assert opened.deliver()
    assert (opened.unsynced, opened.outage) == ({}, None)
    assert steps(opened.runs) == steps(opened.runs, "k2") == [(i, i / 7) for i in range(4)]
    assert parent(opened.runs).info.status == "FINISHED"


def test_a_rejected_write_blocks_no_others_and_is_repeated_at_the_end(
    opened: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = opened.runs.client.log_batch, 0
    opened.sync(trial(1))
    assert opened.deliver()
    bad = opened.runs._written["k1"].run_id

    def refusing(run_id: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal tries
        if run_id == bad:
            tries += 1
            raise ValueError("no such value")
        return real(run_id, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(opened.runs.client, "log_batch", refusing)
        opened.sync(trial(4))
        opened.sync(finished(3, PLAN.model_copy(update={"key": "k2"})))
        assert not opened.deliver()
        assert set(opened.unsynced) == {"k1"}
        assert "ValueError: no such value" in opened.unsynced["k1"]
        assert (tries, opened.outage) == (recorder.TRIES, None)
        assert steps(opened.runs, "k2") == [(i, i / 7) for i in range(4)]
    assert opened.deliver()
    assert steps(opened.runs) == [(i, i / 7) for i in range(4)]


def test_the_end_of_a_sweep_is_written_after_its_trials(opened: Recorder, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "table.md").write_text("| arm |")
    opened.sync(finished(3))
    left: list[int] = []
    opened.close_sweep("KILLED", {"trials/finished": 4.0}, report, left.append)
    assert opened.unsynced == {}
    assert max(left) <= 2
    run = parent(opened.runs)
    assert (run.info.status, run.data.metrics["trials/finished"]) == ("KILLED", 4.0)
    assert [one.path for one in opened.runs.client.list_artifacts(run.info.run_id, "report")] == ["report/table.md"]


def test_trials_are_below_their_parent_even_if_its_creation_failed_at_first(
    store: Store, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Recorder(store, request.node.name)
    real, failures = made.runs.client.create_run, 2

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError
        return real(*args, **kwargs)

    monkeypatch.setattr(made.runs.client, "create_run", failing)
    made.open_sweep(MANIFEST, sweep_folder(tmp_path))
    made.sync(trial(2))
    assert made.deliver()
    (run,) = made.runs.client.search_runs([made.runs.experiment.id], "tags.`fedsweep.kind` = 'trial'")
    assert run.data.tags["mlflow.parentRunId"] == parent(made.runs).info.run_id


def test_an_unreachable_server_delays_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PATIENCE", 2)
    nowhere = Destination.of(store.root, "http://127.0.0.1:9")
    made = Recorder(store, "nobody", nowhere)
    made.open_sweep(MANIFEST, sweep_folder(tmp_path))
    for rounds in range(30):
        made.sync(trial(rounds))
    assert not made.deliver()
    assert made.outage == "the MLflow server http://127.0.0.1:9 cannot be used: Connection refused."
    assert set(made.unsynced) == {"k1", "the parent run"}
    made._due.clear()  # otherwise, the thread continues its attempts


def test_a_sweep_is_delivered_as_finished_only_if_all_its_trials_have_ended(store: Store, tmp_path: Path) -> None:
    """The folder of an interrupted search contains only the samples that were proposed before the interruption."""
    other, destination = Store(tmp_path / "mlruns"), Destination.of(store.root, None)
    manifest = MANIFEST.model_copy(update={"name": "sampled", "trials": 2})
    sweep = other.sweep(manifest.name, manifest.id)
    sweep.create(manifest, {"search_space.yaml": "seed: 0\n", "experiment.yaml": "seed: 0\n"})
    for number, status in enumerate(("KILLED", "FINISHED")):
        kept = sweep.trial(f"k{number}")
        kept.plan(PLAN.model_copy(update={"key": f"k{number}", "number": number}))
        kept.end(Outcome(outcome="pruned", round=0))
        assert list(deliver_all(other, destination)) == [("sampled s1", {})]
        assert parent(Recorder(other, "sampled", destination).runs).info.status == status
