"""Sweeps that several processes run together."""

import contextlib
import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.files import LockedError, locked
from fedsweep.results import Outcome, Store, SweepStore
from fedsweep.results.records import Change
from fedsweep.results.steering import joined, parallel_trials, taking_part
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import clear_leftovers
from fedsweep.sweep.running.shared_sweep import Following, OtherTrials, check_shareable
from fedsweep.sweep.running.tune import TuneOptions
from fedsweep.sweep.search.ray_searchers import PlannedSearch
from tests.plugin_packages import write_package
from tests.sweep.helpers import (
    GRID,
    POPULATION,
    SAMPLED,
    TUNED,
    assert_mlflow_equals_store,
    fedsweep,
    kill,
    newest,
    planned_sweep,
    start,
    table,
    wait_for_rounds,
    write_space,
)

LONGER = {
    **GRID,
    "fixed": {**GRID["fixed"], "federation.rounds": 6, "local.steps": 4, "evaluation.metrics": ["who"]},
    "space": {"lora.rank": {"grid": [1, 2, 4]}},
}
WHO = '''
import os
from fedsweep.training.round_metrics import Quantity, RoundMetric

class Who(RoundMetric):
    """The process that has trained a round, written to a file, and a constant as its value."""

    name = "who"
    quantities = {"who/one": Quantity("one")}

    def measure(self, measured):
        rank = min(min(one.shape) for one in measured.after.adapter.values())
        with open(os.environ["WHO"], "a") as file:
            print(os.getppid(), rank, measured.seed, measured.round, file=file)
        return {"who/one": 1.0}
'''


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Create a sweep over two ranks and two seeds, whose trials have plans only."""
    write_space(tmp_path, "ranks", GRID)
    monkeypatch.chdir(tmp_path)
    plan, _, sweep = planned_sweep(tmp_path, "ranks")
    return plan, sweep, [trial.key for trial in plan.grid()]


def test_one_process_at_a_time_takes_a_trial(begun):
    _, sweep, keys = begun
    trial, same = sweep.trial(keys[0]), SweepStore(sweep.folder).trial(keys[0])
    assert not trial.is_taken
    with trial.take() as mine:
        assert mine is not None
        assert same.is_taken
        with same.take(seconds=0) as also:
            assert also is None
        assert same.is_taken
        with mine.paused():
            assert not same.is_taken
        assert same.is_taken
        with contextlib.ExitStack() as other, pytest.raises(LockedError), mine.paused():
            assert other.enter_context(same.take()) is not None
        with pytest.raises(SystemExit), mine.paused():  # as Ray ends the thread of a trial that is stopped
            raise SystemExit
        assert not same.is_taken
    with same.take() as now:
        assert now is not None


def test_a_trial_without_a_plan_cannot_be_taken(begun):
    _, sweep, keys = begun
    sweep.set_aside(keys[0])
    with sweep.trial(keys[0]).take() as mine:
        assert mine is None
    assert keys[0] not in {trial.plan.key for trial in sweep.trials()}


def test_the_trials_of_other_processes_are_noticed(begun):
    _, sweep, keys = begun
    alone = OtherTrials(sweep)
    assert alone.news(()) == []
    assert not alone.present
    with taking_part(sweep, parallel=3):
        assert [one.parallel for one in joined(sweep)] == [3]
        assert parallel_trials(sweep) == 3
        others = OtherTrials(sweep)
        with sweep.trial(keys[1]).take(), sweep.trial(keys[3]).take():
            assert sorted(others.news(own=keys[:1])) == sorted(keys[1:])
            assert others.news(own=()) == []  # too early for another look
        assert others.taken == {keys[1], keys[3]}
        for key in (keys[2], keys[0], keys[3]):
            sweep.trial(key).end(Outcome(outcome="failed", round=1, error="a test"))
        others._next = 0.0
        assert sorted(others.news(own=keys[:1])) == sorted(keys[2:])
        assert others.taken == {keys[1]}  # its worker may have unlocked it for a moment; the other one has ended
        others._next = 0.0
        assert others.news(own=()) == []
        assert others.taken == set()
    assert joined(sweep) == []


def test_an_idle_process_waits_for_unfinished_trials_of_others_only(begun):
    plan, sweep, keys = begun
    search = PlannedSearch(sweep, [*plan.grid()], 3, lambda one: None, Packing(0, 1, sweep))
    search.taken = {*keys}
    assert search.suggest("t") is None
    for key in keys[1:]:
        sweep.trial(key).end(Outcome(outcome="finished", round=3))
        search.notice(sweep.trial(key).read(None).plan)
    assert search.suggest("t") is None
    search.taken = set()
    found = search.suggest("t")
    assert isinstance(found, dict)
    assert found["trial"] == keys[0]
    sweep.trial(keys[0]).end(Outcome(outcome="finished", round=3))
    search.on_trial_complete("t", {"round": 3})
    assert search.suggest("t") == search.FINISHED


def test_a_process_that_takes_part_follows_the_driver(begun, monkeypatch):
    plan, sweep, _ = begun
    monkeypatch.setattr("fedsweep.sweep.running.shared_sweep.LOOK_SECONDS", 0.0)
    with locked(sweep.folder / ".lock", "taken"):
        following = Following(plan, sweep, known=0)
        assert following.look() is following.paused is False
        with following.planning() as is_current:
            assert is_current
        manifest, when = sweep.manifest(), {"time": "2026-11-28T05:10:59+00:00", "ended": 1}
        sweep.change(manifest.model_copy(update={"changes": (Change(kind="extended", seeds=(2,), **when),)}))
        assert following.look() is False
        assert following.paused
        with following.planning() as is_current:
            assert not is_current
        following = Following(plan, sweep, known=1)
        assert following.look() is following.paused is False
        changes = (*sweep.manifest().changes, Change(kind="stopped", **when))
        sweep.change(manifest.model_copy(update={"changes": changes}))
        assert following.look() is True
    following = Following(plan, sweep, known=2)
    assert following.look() is False
    assert following.paused


def test_a_process_whose_plan_is_outdated_plans_no_trial(begun):
    plan, sweep, _ = begun
    manifest = sweep.manifest()
    sweep.change(manifest.model_copy(update={"digests": {**manifest.digests, "definition": "another"}}))
    with locked(sweep.folder / ".lock", "taken"):
        following = Following(plan, sweep, known=0)
        assert following.paused
        with following.planning() as is_current:
            assert not is_current


def test_the_trials_of_other_processes_are_not_cleared(begun):
    _, sweep, keys = begun
    for key in keys:
        sweep.trial(key).keep_error(Outcome(outcome="failed", round=0, error="a test"))
        (sweep.trial(key).folder / ".checkpoint.safetensors.1").touch()
    with taking_part(sweep, parallel=1), sweep.trial(keys[0]).take():
        clear_leftovers(sweep, rounds=3, retry=True)
    assert all(sweep.trial(key).error() is not None for key in keys)
    assert len([*sweep.folder.glob("trials/*/.checkpoint*")]) == 4
    with sweep.trial(keys[0]).take():  # a worker of a process that was killed a moment ago
        clear_leftovers(sweep, rounds=3, retry=True)
        assert sweep.trial(keys[0]).is_taken
    assert [sweep.trial(key).error() is not None for key in keys] == [True, False, False, False]
    assert [*sweep.folder.glob("trials/*/.checkpoint*")] == []


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (
            {**SAMPLED, "scheduler": {"name": "asha_async"}},
            "`scheduler` asha_async decides in the order in which trials",
        ),
        (
            {**SAMPLED, "scheduler": {"name": "median"}},
            "`scheduler` median decides in the order in which trials report",
        ),
        (POPULATION, "`scheduler` pbt copies trials; this needs `scheduler` none, arms or asha."),
    ],
    ids=["asha_async", "median", "pbt"],
)
def test_sweeps_that_cannot_be_shared(space, reason, tmp_path, monkeypatch):
    write_space(tmp_path, "mine", space)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        check_shareable(Plan.read("mine", {}, {}))


def test_options_that_do_not_fit_to_join(tmp_path, monkeypatch):
    write_space(tmp_path, "mine", GRID)
    write_space(tmp_path, "tuned", TUNED)
    for words, message in (
        (("mine", "--join", "--resume"), "`--join` also resumes a sweep and cannot be combined with `--resume`."),
        (("mine", "--join", "--fresh"), "`--fresh` applies to new sweeps and cannot be combined with `--join`."),
        (("mine", "--sweep", "one"), "`--sweep` selects the sweep to resume or join and needs `--resume` or `--join`."),
        (("tuned", "--join"), "tuned cannot be joined, because its arms are tuned one by one (`tune_each`)."),
        (("mine", "--join", "--sweep", "one"), "there is no sweep `one` of mine"),
    ):
        assert message in fedsweep(tmp_path, "tune", *words, code=2, trains=False).stderr
    monkeypatch.chdir(tmp_path)
    assert TuneOptions("mine", join=True).resumed is None


def ended(process, code=0):
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, out + err
    return out + err


def drivers(folder: Path, name: str, number: int, *words: str):
    return [start(folder, "tune", name, "--join", "--at-once", "1", *words) for _ in range(number)]


def driver(folder: Path, name: str) -> int:
    return json.loads((newest(folder, name).folder / ".driver.json").read_text())["pid"]


@pytest.fixture
def who(tmp_path, monkeypatch):
    """Install a metric that writes down which worker has trained which round, and return the file."""
    write_package(tmp_path / "site", WHO, {"metrics": {"who": "who_metric:Who"}}, package="who-metric")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("WHO", str(tmp_path / "who.txt"))
    write_space(tmp_path, "ranks", LONGER)
    return tmp_path / "who.txt"


def lines(who: Path) -> Counter[str]:
    """Return how often each round of each trial was trained."""
    return Counter(line.partition(" ")[2] for line in who.read_text().splitlines())


def parents(who: Path) -> set[str]:
    """Return the numbers of the processes that have started the workers."""
    return {line.partition(" ")[0] for line in who.read_text().splitlines()}


@pytest.mark.slow
def test_two_processes_share_the_trials_and_no_trial_runs_twice(who, tmp_path):
    first = drivers(tmp_path, "ranks", 1)[0]
    wait_for_rounds(tmp_path, "ranks", 1, first)
    first.send_signal(signal.SIGSTOP)  # or else it may train everything before the other process is ready
    second = drivers(tmp_path, "ranks", 1)[0]
    while len(parents(who)) < 2:
        assert second.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGCONT)
    assert all("Sweep:  " + newest(tmp_path, "ranks").folder.name in ended(one) for one in (first, second))
    assert set(lines(who).values()) == {1}
    assert len(lines(who)) == 6 * 6
    assert_mlflow_equals_store(tmp_path, "ranks")
    together = table(tmp_path, "ranks")
    ended(start(tmp_path, "tune", "ranks", "--fresh"))
    assert len(Store(tmp_path / "mlruns").sweeps()) == 2
    assert table(tmp_path, "ranks") == together


@pytest.mark.slow
def test_killing_one_process_after_the_other_changes_nothing(who, tmp_path):
    ranks = {**LONGER, "scheduler": {"name": "arms", "grace_rounds": 2, "reduction_factor": 2}, "seeds": [0, 1, 2]}
    write_space(tmp_path, "ranks", ranks)
    first = drivers(tmp_path, "ranks", 1)[0]
    wait_for_rounds(tmp_path, "ranks", 1, first)
    second, third = drivers(tmp_path, "ranks", 2)
    deadline = time.monotonic() + 200
    while len(joined(newest(tmp_path, "ranks"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(first)
    deadline = time.monotonic() + 60
    while not (newest(tmp_path, "ranks").folder / ".driver.json").exists() or driver(tmp_path, "ranks") == first.pid:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    follower, leader = (third, second) if driver(tmp_path, "ranks") == second.pid else (second, third)
    kill(follower)
    assert "The process that ran the sweep has ended, so this process continues." in ended(leader)
    assert sum(count - 1 for count in lines(who).values()) <= 2  # the rounds that were under way
    assert_mlflow_equals_store(tmp_path, "ranks")
    together = table(tmp_path, "ranks")
    ended(start(tmp_path, "tune", "ranks", "--fresh"))
    assert table(tmp_path, "ranks") == together


@pytest.mark.slow
@pytest.mark.parametrize(
    "space", [SAMPLED, {**GRID, "seeds": {"until": "decided", "at_most": 5}}], ids=["tpe", "seeds"]
)
def test_the_trials_of_a_shared_search_are_those_of_one_process(space, tmp_path):
    write_space(tmp_path, "shared", space)
    for one in drivers(tmp_path, "shared", 2):
        ended(one)
    together = table(tmp_path, "shared")
    fedsweep(tmp_path, "tune", "shared", "--fresh")
    assert table(tmp_path, "shared") == together


@pytest.mark.slow
def test_a_shared_sweep_is_changed_and_stopped_as_a_whole(who, tmp_path):
    longer = {**LONGER, "fixed": {**LONGER["fixed"], "federation.rounds": 8, "local.steps": 8}}
    write_space(tmp_path, "changed", longer)
    first = drivers(tmp_path, "changed", 1)[0]
    wait_for_rounds(tmp_path, "changed", 1, first)
    second = drivers(tmp_path, "changed", 1)[0]
    while not joined(newest(tmp_path, "changed")):
        assert second.poll() is None
        time.sleep(0.1)
    assert "was dropped on" in ended(start(tmp_path, "drop", "changed", "rank 1"))
    assert "was extended by the seed 2 on" in ended(start(tmp_path, "extend", "changed", "--seeds", "+1"))
    before = sum(lines(who).values())
    while sum(lines(who).values()) < before + 4:
        assert first.poll() is second.poll() is None
        time.sleep(0.1)
    assert "To continue, run" in ended(start(tmp_path, "stop", "changed"))
    ended(first, 130)
    assert "This process has left sweep changed@" in ended(second, 130)
    for one in drivers(tmp_path, "changed", 2):
        ended(one)
    planned = {**longer, "seeds": [0, 1, 2], "exclude": [{"lora.rank": 1}]}
    write_space(tmp_path, "planned", planned)
    ended(start(tmp_path, "tune", "planned", "--fresh"))
    assert table(tmp_path, "changed") == table(tmp_path, "planned")
