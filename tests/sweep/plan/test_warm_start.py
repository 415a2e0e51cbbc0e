"""The warm start of a search from the trials of an earlier sweep, of which it stores a copy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, Store, SweepStore
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from fedsweep.sweep.search.ray_searchers import SampledSearch
from fedsweep.types import ServerState
from tests.sweep.helpers import ROUNDS, SAMPLED, write_space

METRIC = "accuracy/mean"
SEARCH = {"name": "tpe", "samples": 6, "startup": 4, "seed": 0}
INSIDE: list[dict[str, Any]] = [{"optimizer.lr": 0.01 * (place + 1), "lora.position": "l0"} for place in range(4)]
OUTSIDE: list[dict[str, Any]] = [
    {"optimizer.lr": 0.9, "lora.position": "l0"},
    {"optimizer.lr": 0.1, "lora.position": "l1"},
    {"optimizer.lr": 0.1},
]


def read(folder: Path, name: str = "new", **changes: Any) -> Plan:
    write_space(folder, name, {**SAMPLED, "search": SEARCH, **changes})
    return Plan.read(name, {}, {})


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepStore:
    """Write a sweep of the search space `old`, and return it.

    Four trials are within the axes of the new search space, three are outside, one was pruned, and one has not ended.
    """
    monkeypatch.chdir(tmp_path)
    wide = {"optimizer.lr": {"loguniform": [0.001, 1.0]}, "lora.position": {"choice": ["l0", "l1", "both"]}}
    plan = read(tmp_path, "old", space=wide)
    sweep = new_sweep(plan, Store(tmp_path / "mlruns"))
    arms = [*INSIDE, *OUTSIDE, INSIDE[0], INSIDE[0]]
    for number, arm in enumerate(arms):
        trial = plan.trial(number, arm, 0)
        store = sweep.trial(trial.key)
        store.plan(trial)
        sent = {"bytes/up": 1e6 * number, "bytes/down": 0.0}
        history = tuple(RoundRecord(one, {METRIC: number / 10, **sent}, 1.0) for one in range(ROUNDS + 1))
        save(store.checkpoint, Checkpoint(ROUNDS, ServerState({}, (0,)), history))
        if number < 8:
            store.end(Outcome(outcome="finished" if number < 7 else "pruned", round=ROUNDS))
    return sweep


def opened(folder: Path, **changes: Any) -> tuple[Plan, SweepStore]:
    plan = read(folder, search={**SEARCH, "warm_start": "old"}, **changes)
    return plan, new_sweep(plan, Store(folder / "mlruns"))


def test_finished_trials_within_the_axes_are_used_and_the_others_counted(tmp_path: Path, earlier: SweepStore) -> None:
    _, sweep = opened(tmp_path)
    assert warm_start.known(sweep) == [(arm, (place / 10,)) for place, arm in enumerate(INSIDE)]
    taken = warm_start.read(sweep)
    assert taken is not None
    assert taken.note(ROUNDS) == (
        f"Warm start: 4 trials of old@{earlier.folder.name}; left out: 2 that did not finish, "
        "3 outside the axes of this search space."
    )
    assert f"{earlier.folder.name}, with {ROUNDS} rounds instead of 30;" in taken.note(30)
    assert json.loads((sweep.folder / "warm_start.json").read_text())["known"][3]["arm"] == INSIDE[3]


def test_a_warm_start_accepts_a_sweep_id_and_computes_the_second_objective(tmp_path: Path, earlier: SweepStore) -> None:
    two = {"objective": {"metric": METRIC, "against": {"metric": "megabytes/sent"}}, "scheduler": {"name": "none"}}
    plan = read(tmp_path, search={**SEARCH, "warm_start": f"old@{earlier.folder.name}"}, **two)
    taken = warm_start.collect(plan, Store(tmp_path / "mlruns"))
    assert taken is not None
    assert [one.values for one in taken.known] == [(place / 10, place * (ROUNDS + 1.0)) for place in range(4)]


def test_a_resumed_warm_start_does_not_need_the_earlier_sweep(tmp_path: Path, earlier: SweepStore) -> None:
    def proposed(plan: Plan, sweep: SweepStore) -> Any:
        return SampledSearch(plan, sweep, lambda trial: None, Packing(0, 1, sweep)).suggest("t")

    plan, sweep = opened(tmp_path)
    first = proposed(plan, sweep)
    shutil.rmtree(earlier.folder)
    assert proposed(plan, sweep) == first
    assert resumed_sweep(plan, Store(tmp_path / "mlruns"), sweep).folder == sweep.folder
    (sweep.folder / "warm_start.json").unlink()
    assert proposed(plan, sweep) != first  # a random sample, as in a search without a warm start


@pytest.mark.parametrize(
    ("named", "changes", "sentence"),
    [
        ("odl", {}, "there is no sweep of odl in {root}; did you mean `old`?"),
        ("old@2026", {}, "there is no sweep `2026` of old in {root}."),
        (
            "old",
            {"objective": {"metric": "loss/test", "mode": "min"}},
            "`search.warm_start` old@{id} has the objective accuracy/mean (max), "
            "but search space new has loss/test (min).",
        ),
        (
            "old",
            {"space": {"lora.rank": {"choice": [1, 4]}}},
            "`search.warm_start` old@{id} has no trial that search space new can use: "
            "none of its 7 finished trials is within the axes lora.rank.",
        ),
    ],
)
def test_an_unusable_earlier_sweep_is_rejected_before_a_new_sweep_is_created(
    tmp_path: Path, earlier: SweepStore, named: str, changes: dict[str, Any], sentence: str
) -> None:
    plan = read(tmp_path, search={**SEARCH, "warm_start": named}, **changes)
    store = Store(tmp_path / "mlruns")
    with pytest.raises(UserError) as refusal:
        new_sweep(plan, store)
    assert str(refusal.value) == sentence.format(root=store.root, id=earlier.folder.name)
    assert len(store.sweeps()) == 1


def test_a_sweep_without_finished_trials_is_no_warm_start(tmp_path: Path, earlier: SweepStore) -> None:
    for trial in earlier.trials():
        earlier.trial(trial.plan.key).reopen()
    with pytest.raises(UserError, match=r"none of its 9 trials has finished\."):
        opened(tmp_path)


def test_only_tpe_accepts_a_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "new", {**SAMPLED, "search": {"name": "random"}})
    with pytest.raises(UserError) as refusal:
        Plan.read("new", {}, {"search.warm_start": "old"})
    assert str(refusal.value) == (
        "--warm-start needs `search` tpe, which learns from results, but search space new has `search` random."
    )
