"""Sweeps that are extended, lose an arm and are stopped while they run."""

import json
import time
from dataclasses import replace

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked
from fedsweep.results import Outcome, Store, TrialStore
from fedsweep.results.history import RoundRecord
from fedsweep.results.steering import DropRequest, ExtendRequest, Requests, driving, is_running, keep_planned
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.sweep.running.steering import Steering, change_at_rest, changed_plan, plan_of
from tests.sweep.helpers import (
    GRID,
    SAMPLED,
    TUNED,
    fedsweep,
    kill,
    launch,
    newest,
    planned_sweep,
    runs,
    start,
    wait_for_rounds,
    write_space,
)

RANKS = {**GRID, "space": {"lora.rank": {"grid": [1, 4, 8]}}}
DROPPED = DropRequest(arm={"lora.rank": 1})


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Create a sweep over three ranks and two seeds, in which each arm has finished the first seed."""
    write_space(tmp_path, "ranks", RANKS)
    monkeypatch.chdir(tmp_path)
    plan, store, sweep = planned_sweep(tmp_path, "ranks")
    for trial in plan.grid():
        if trial.seed == 0:
            sweep.trial(trial.key).end(Outcome(outcome="failed", round=1, error="a test"))
    return store, sweep


def test_a_changed_sweep_is_the_one_that_was_planned_so(begun):
    store, sweep = begun
    said = change_at_rest(ExtendRequest(seeds=(2, 5)), store, sweep)
    assert said.startswith("The sweep was extended by the seeds 2, 5 on ")
    assert said.endswith(" UTC, when 3 trials had ended.")
    assert change_at_rest(DROPPED, store, sweep).startswith("The arm lora.rank=1 was dropped on ")
    planned = Plan.read("ranks", {}, {"seeds": [0, 1, 2, 5], "exclude": [{"lora.rank": 1}]})
    fresh, changed = new_sweep(planned, store).manifest(), sweep.manifest()
    own = {"id", "created", "changes", "commit"}
    assert changed.model_dump(exclude=own) == fresh.model_dump(exclude=own)
    assert [one.kind for one in changed.changes] == ["extended", "dropped"]
    assert changed.seeds_or_arms_changed
    numbers = {one.key: one.number for one in planned.grid()}
    assert {trial.plan.key: trial.plan.number for trial in sweep.trials()}.items() <= numbers.items()
    assert [trial.plan.arm["lora.rank"] for trial in sweep.trials()] == [4, 8, 4, 8]
    gone = sweep.dropped()
    assert sorted(one.read().plan.seed for one in gone.values()) == [0, 1]
    assert [one.key for one in plan_of(changed).grid()] == [*numbers]


@pytest.mark.parametrize(
    ("space", "request_", "message"),
    [
        (RANKS, ExtendRequest(seeds=(2, 1)), "`--seeds` must list only new seeds besides 0, 1, but it contains 1."),
        (RANKS, ExtendRequest(seeds=(-1,)), "`--seeds` must be distinct and not negative, but they contain -1."),
        (RANKS, DropRequest(arm={"lora.rank": 4}), "must not leave out the `baseline` lora.rank=4."),
        (RANKS, DropRequest(arm={"lora.rank": 5}), "the arm lora.rank=5 does not belong to the sweep, or has been"),
        (SAMPLED, ExtendRequest(seeds=(2,)), "a sweep of ranks cannot be extended, because `search` is tpe, whose"),
        ({**RANKS, "scheduler": {"name": "asha"}}, DROPPED, "cannot be changed, because `scheduler` is asha, whose"),
        (
            {**RANKS, "seeds": {"until": "decided", "at_most": 8}},
            ExtendRequest(seeds=(9,)),
            "the decisions depend on `seeds.at_most` 8; start a new sweep with fresh seeds (`--first-seed 8`)",
        ),
        ({**RANKS, "space": {"lora.rank": {"grid": [1]}}, "baseline": None}, DROPPED, "is the only one of the sweep"),
    ],
    ids=["known seed", "negative seed", "baseline", "unknown arm", "search", "scheduler", "until decided", "only arm"],
)
def test_changes_that_would_alter_what_has_run_are_refused(space, request_, message, tmp_path, monkeypatch):
    write_space(tmp_path, "ranks", space)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        changed_plan(Plan.read("ranks", {}, {}), request_)
    assert message in str(refused.value)


def test_status_knows_the_trials_until_the_next_decision(tmp_path, monkeypatch):
    write_space(tmp_path, "ranks", {**RANKS, "seeds": {"until": "decided", "at_most": 8}})
    monkeypatch.chdir(tmp_path)
    plan, store = Plan.read("ranks", {}, {}), Store(tmp_path / "mlruns")
    sweep = new_sweep(plan, store)
    with locked(sweep.folder / ".lock", "taken"), driving(sweep, parallel=1):
        keep_planned(sweep, 9)
        (one,) = json.loads(fedsweep(tmp_path, "status", "--format", "json").stdout)["sweeps"]
    assert one["trials"] == {"ended": 0, "begun": 0, "planned": 9}
    (one,) = json.loads(fedsweep(tmp_path, "status", "ranks", "--format", "json").stdout)["sweeps"]
    assert one["trials"]["planned"] is None


def test_an_arm_of_a_sweep_with_seeds_until_decided_can_be_dropped(tmp_path, monkeypatch):
    write_space(tmp_path, "ranks", {**RANKS, "seeds": {"until": "decided", "at_most": 8}})
    monkeypatch.chdir(tmp_path)
    changed = changed_plan(Plan.read("ranks", {}, {}), DROPPED)
    assert [arm["lora.rank"] for arm in changed.arms] == [4, 8]


def test_linked_sweeps_are_not_changed(tmp_path, monkeypatch):
    from fedsweep.sweep.running.linked_sweeps import planned_sweeps
    from fedsweep.sweep.running.tune import TuneOptions

    write_space(tmp_path, "tuned", TUNED)
    monkeypatch.chdir(tmp_path)
    plan = Plan.of(planned_sweeps(TuneOptions("tuned"))[1].request)
    with pytest.raises(UserError, match="because its arms are tuned one by one"):
        changed_plan(plan, ExtendRequest(seeds=(5,)))


def test_the_driver_pauses_for_a_valid_request_only(begun):
    _, sweep = begun
    requests, steering = Requests(sweep), Steering(plan_of(sweep.manifest()), sweep)
    wrong = requests.ask(ExtendRequest(seeds=(1,)))
    assert steering.look() is False
    assert steering.paused is False
    assert "only new seeds" in requests.answered(wrong).error
    first, second = requests.ask(ExtendRequest(seeds=(2,))), requests.ask(DROPPED)
    steering.look()
    assert steering.paused
    assert requests.answered(first) is None
    assert len(steering.apply()) == 2
    assert not steering.paused
    assert [requests.answered(one).error for one in (first, second)] == [None, None]
    assert steering.plan.num_trials == sweep.manifest().trials == 6


def test_a_folder_of_requests_that_cannot_be_used_does_not_end_the_sweep(begun):
    _, sweep = begun
    steering, requests = Steering(plan_of(sweep.manifest()), sweep), sweep.folder / ".requests"
    (requests / "20260101.json").mkdir(parents=True)
    asked = Requests(sweep).ask(DROPPED)
    assert steering.look() is False
    assert steering.paused
    (requests / "20260101.json").rmdir()
    Requests(sweep).withdraw(asked)
    requests.rmdir()
    requests.write_text("")
    assert steering.look() is False
    with pytest.raises(UserError, match="cannot be written"):
        Requests(sweep).ask(DROPPED)


def test_a_trial_that_is_dropped_while_it_is_read_is_left_out(begun, monkeypatch):
    _, sweep = begun
    read = TrialStore.read

    def dropping(self, *given):
        if self.folder.exists() and read(self).plan.arm == DROPPED.arm:
            sweep.set_aside(self.folder.name)
        return read(self, *given)

    monkeypatch.setattr(TrialStore, "read", dropping)
    assert {trial.plan.arm["lora.rank"] for trial in sweep.trials()} == {4, 8}


def test_a_defect_in_a_change_does_not_end_the_sweep(begun, monkeypatch):
    _, sweep = begun
    steering = Steering(plan_of(sweep.manifest()), sweep)
    asked = Requests(sweep).ask(DROPPED)
    monkeypatch.setattr("fedsweep.sweep.running.steering.changed_plan", lambda plan, request: 1 / 0)
    assert steering.look() is False
    assert "division by zero" in Requests(sweep).answered(asked).error


def test_the_report_and_mlflow_name_the_changes(begun):
    from fedsweep.report import write_report
    from fedsweep.tracking.sweep_description import description_tags

    store, sweep = begun
    change_at_rest(DROPPED, store, sweep)
    history, outcome = [RoundRecord(3, {"accuracy/mean": 0.5}, 0.1)], Outcome(outcome="finished", round=3)
    trials = [replace(trial, history=history, outcome=outcome) for trial in sweep.trials()]
    write_report(sweep.manifest(), trials, sweep.folder / "report")
    table = (sweep.folder / "report" / "table.md").read_text()
    assert "Changed by hand: The arm lora.rank=1 was dropped on " in table
    assert "Tests and intervals suppose that results had no part in these changes." in table
    assert "lora.rank=1 was dropped" in description_tags(sweep.manifest())["fedsweep.changes"]


def test_commands_say_what_they_cannot_do(begun, tmp_path):
    _, sweep = begun
    name = f"ranks@{sweep.folder.name}"
    for words, message in (
        (("stop", "ranks"), f"no process is running sweep {name}."),
        (("attach", "ranks"), f"no process is running sweep {name}; use `fedsweep report {name}` to see"),
        (("extend", "ranks", "--seeds", "many"), "`--seeds` must be a number of new seeds such as +5, or a list"),
        (("drop", "ranks", "lora.rank=2"), "no arm of ranks is named `lora.rank=2`"),
        (("drop", "rank", "lora.rank=2"), "there is no sweep of rank in"),
    ):
        assert message in fedsweep(tmp_path, *words, code=2).stderr


def test_status_tells_what_runs_and_what_was_changed(begun, tmp_path):
    _, sweep = begun
    assert "No sweep is running here." in fedsweep(tmp_path, "status").stdout
    done = fedsweep(tmp_path, "extend", "ranks", "--seeds", "+1")
    assert "The sweep was extended by the seed 2 on " in done.stdout
    assert f"use `fedsweep tune ranks@{sweep.folder.name} --resume`" in done.stdout
    with locked(sweep.folder / ".lock", "taken"):
        shown = fedsweep(tmp_path, "status").stdout
    assert f"ranks@{sweep.folder.name}: running\n3 of 9 trials have ended, 3 are unfinished\n" in shown
    assert "The sweep was extended by the seed 2" in shown
    said = json.loads(fedsweep(tmp_path, "drop", "ranks", "lora.rank=8", "--format", "json").stdout)
    assert (said["command"], said["id"], said["running"]) == ("drop", sweep.folder.name, False)
    assert said["sentence"].startswith("The arm lora.rank=8 was dropped on ")
    assert (said["status"], said["trials"]) == ("interrupted", {"ended": 2, "begun": 2, "planned": 6})
    change = said["change"]
    assert (change["kind"], change["arm"], change["seeds"]) == ("dropped", {"lora.rank": 8}, [])
    assert change["sentence"] in said["sentence"]
    (one,) = json.loads(fedsweep(tmp_path, "status", "ranks", "--format", "json").stdout)["sweeps"]
    assert [change["kind"] for change in one["changes_made"]] == ["extended", "dropped"]
    assert (one["changes_made"][0]["seeds"], one["changes_made"][1]) == ([2], change)
    assert (one["seeds"], one["changes"]) == ([0, 1, 2], [change["sentence"] for change in one["changes_made"]])
    assert (one["running"], one["trials"]) == (False, {"ended": 2, "begun": 2, "planned": 6})
    assert {(trial["label"], trial["seed"]) for trial in one["trials_begun"]} == {
        ("lora.rank=1", 1),
        ("lora.rank=4", 1),
    }


@pytest.mark.slow
def test_a_sweep_that_is_changed_while_it_runs_and_killed_equals_the_planned_one(tmp_path):
    longer = {**RANKS, "fixed": {**RANKS["fixed"], "federation.rounds": 6, "local.steps": 6}}
    write_space(tmp_path, "changed", longer)
    process = start(tmp_path, "tune", "changed")
    wait_for_rounds(tmp_path, "changed", 2, process)
    dropped = launch(tmp_path, "drop", "changed", "rank 1").stdout
    assert dropped.startswith("The arm lora.rank=1 was dropped on ")
    assert process.poll() is None
    extended = launch(tmp_path, "extend", "changed", "--seeds", "+1").stdout
    assert "The sweep was extended by the seed 2 on " in extended
    sweep = newest(tmp_path, "changed")
    assert "--resume" not in extended
    count = sum(len(trial.history) for trial in sweep.trials())
    wait_for_rounds(tmp_path, "changed", count + 1, process)
    kill(process)
    launch(tmp_path, "tune", "changed", "--resume")
    write_space(tmp_path, "planned", {**longer, "seeds": [0, 1, 2], "exclude": [{"lora.rank": 1}]})
    fedsweep(tmp_path, "tune", "planned", "--fresh")
    one, other = newest(tmp_path, "changed"), newest(tmp_path, "planned")
    assert (one.folder / "report" / "table.csv").read_bytes() == (other.folder / "report" / "table.csv").read_bytes()
    assert [(trial.plan.key, trial.plan.number) for trial in one.trials()] == [
        (trial.plan.key, trial.plan.number) for trial in other.trials()
    ]
    assert "Changed by hand" in (one.folder / "report" / "table.md").read_text()
    (parent,), children, _ = runs(tmp_path, "changed")
    assert parent.data.tags["fedsweep.seeds"] == "0, 1, 2"
    assert "lora.rank=1 was dropped" in parent.data.tags["fedsweep.changes"]
    assert {child.info.status for child in children} <= {"FINISHED", "KILLED"}
    dropped = [child for child in children if child.data.tags.get("arm") == "not counted"]
    assert {child.data.params["lora.rank"] for child in dropped} == {"1"}
    assert len(children) == len(dropped) + 6


@pytest.mark.slow
def test_a_sweep_in_the_background_is_followed_and_stopped(tmp_path):
    write_space(tmp_path, "ranks", {**RANKS, "fixed": {**RANKS["fixed"], "federation.rounds": 40}})
    done = launch(tmp_path, "tune", "ranks", "--detach")
    sweep = newest(tmp_path, "ranks")
    assert f"runs sweep ranks@{sweep.folder.name} in the background" in done.stdout
    assert is_running(sweep)
    follower = start(tmp_path, "attach", "ranks")
    deadline = time.monotonic() + 200
    while not any(trial.last_round > 0 for trial in sweep.trials()) and time.monotonic() < deadline:
        time.sleep(0.1)
    stopped = launch(tmp_path, "stop", "ranks")
    assert f"To continue, run `fedsweep tune ranks@{sweep.folder.name} --resume`." in stopped.stdout
    assert not is_running(sweep)
    assert "Stopping ..." in (sweep.folder / "output.log").read_text()
    out, err = follower.communicate(timeout=60)
    assert "lora.rank" in out, err
    assert [one.kind for one in sweep.manifest().changes] == ["stopped"]
    wrong = launch(tmp_path, "tune", "ranks", "lora.rnk=4", "--detach", code=2)
    assert "lora.rnk" in wrong.stderr
    assert not [*(tmp_path / "mlruns").glob(".detached-*")]
