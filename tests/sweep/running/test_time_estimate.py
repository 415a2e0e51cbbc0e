"""The estimated duration of a sweep, from recorded rounds."""

import platform
from pathlib import Path

import pytest

from fedsweep.results import Outcome, Store, SweepStore
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.cluster import Cluster
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.sweep.running.time_estimate import WORKER_START, from_records
from fedsweep.types import ServerState

SPACE = "ablations/lora_rank"


def plan(**changes: object) -> Plan:
    """Return the plan of a sweep of four arms with two rounds and one seed; `changes` are changes to the experiment."""
    return Plan.read(
        SPACE,
        {"federation.rounds": 2, **{name.replace("__", "."): one for name, one in changes.items()}},
        {"seeds": [7]},
    )


def record(sweep: SweepStore, trials: Plan, seconds: float) -> None:
    """Record all trials of a plan: a second for round 0, and `seconds` for each of two other rounds."""
    for one in trials.grid():
        trial = sweep.trial(one.key)
        trial.plan(one)
        records = tuple(RoundRecord(number, {"accuracy/mean": 0.5}, seconds if number else 1.0) for number in range(3))
        save(trial.checkpoint, Checkpoint(2, ServerState({}, (0,)), records))
        trial.end(Outcome(outcome="finished", round=2))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a results folder with a sweep whose rounds took five seconds."""
    store = Store(tmp_path)
    record(new_sweep(plan(), store), plan(), 5.0)
    return store


def test_recorded_rounds_are_used_and_their_sweep_is_named(store: Store) -> None:
    (sweep,) = store.sweeps()
    # Other seeds, numbers of rounds and learning rates do not change the duration of a round.
    asked = Plan.read(SPACE, {"federation.rounds": 10, "optimizer.lr": 0.3}, {"seeds": [0, 1]})
    assert from_records(asked, store, 2) == (WORKER_START + 4 * (1.0 + 10 * 5.0), sweep.folder.name)


def test_the_newest_sweep_counts(store: Store) -> None:
    newest = new_sweep(plan(), store, fresh=True)
    record(newest, plan(), 3.0)
    assert from_records(plan(), store, 4) == (WORKER_START + 7.0, newest.folder.name)


@pytest.mark.parametrize(
    "changes", [{"local__batch_size": 8}, {"local__steps": 3}, {"method": "inclusivefl"}, {"data__test_fraction": 0.1}]
)
def test_rounds_of_other_experiments_do_not_count(store: Store, changes: dict[str, object]) -> None:
    assert from_records(plan(**changes), store, 2) is None


def test_rounds_of_other_machines_threads_and_clusters_do_not_count(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert from_records(plan(), store, 2) is not None
    threads = plan().space.resources.model_copy(update={"cpus_per_trial": 2})
    assert from_records(plan().on(threads), store, 2) is None
    assert from_records(plan(), store, 2, Cluster("10.0.0.1:6379")) is None
    other = Store(tmp_path / "cluster")
    record(new_sweep(plan(), other, cluster=Cluster("10.0.0.1:6379")), plan(), 5.0)
    assert from_records(plan(), other, 2) is None
    monkeypatch.setattr(platform, "node", lambda: "other")
    assert from_records(plan(), store, 2) is None


def test_trials_without_rounds_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    sweep = new_sweep(plan(), store)
    for one in plan().grid():
        sweep.trial(one.key).plan(one)
    assert from_records(plan(), store, 2) is None
