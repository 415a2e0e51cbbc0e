"""The reuse of trials from earlier sweeps in the same results folder. No Ray is started."""

from pathlib import Path
from typing import Any

import pytest

from fedsweep.federation.rounds import ServerState
from fedsweep.results import Outcome, OutcomeName, Store, SweepStore, TrialPlan, count_outcomes
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import NOT_NEEDED, TAKEN_FROM
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.reuse import Reuse, all_reusable
from tests.sweep.helpers import GRID, SAMPLED, write_space
from tests.tracking.helpers import MANIFEST

PLAN = TrialPlan(key="k", number=0, arm={"lora.rank": 4}, seed=0, config={})
ALIKE = {"processor": "x86_64, 1 thread", "digests": {"packages": "p"}}


def sweep(root: Path, sweep_id: str, **changes: Any) -> SweepStore:
    made = Store(root).sweep(MANIFEST.name, sweep_id)
    made.create(MANIFEST.model_copy(update={"id": sweep_id, **ALIKE, **changes}), {})
    return made


@pytest.fixture
def earlier(tmp_path: Path) -> SweepStore:
    """Write a sweep with a single trial, which has three rounds and an outcome, and return the sweep."""
    made = sweep(tmp_path, "earlier")
    end(made, "finished")
    return made


def end(made: SweepStore, outcome: OutcomeName, plan: TrialPlan = PLAN) -> None:
    trial = made.trial(plan.key)
    trial.plan(plan)
    history = tuple(RoundRecord(round, {"accuracy/mean": round / 7}, 1.0) for round in range(3))
    save(trial.checkpoint, Checkpoint(2, ServerState({}, (0,)), history))
    trial.end(Outcome(outcome=outcome, round=2))


@pytest.mark.parametrize("outcome", ["finished", "diverged"])
def test_an_ended_trial_is_reused_with_its_outcome_and_tagged_with_its_origin(
    earlier: SweepStore, tmp_path: Path, outcome: OutcomeName
) -> None:
    end(earlier, outcome)
    mine = sweep(tmp_path, "mine")
    taken = Reuse(Store(tmp_path), mine).give(PLAN)
    assert taken.marks[TAKEN_FROM] == "earlier"
    assert mine.trial("k").read().plan == taken
    assert mine.trial("k").outcome() == earlier.trial("k").outcome()
    assert mine.trial("k").checkpoint.read_bytes() == earlier.trial("k").checkpoint.read_bytes()


def test_a_trial_that_its_own_sweep_does_not_count_counts_in_another_sweep(earlier: SweepStore, tmp_path: Path) -> None:
    earlier.trial("k").end(Outcome(outcome="finished", round=2, reason=NOT_NEEDED))
    assert count_outcomes(earlier.trials())["finished"] == 0
    mine = sweep(tmp_path, "mine")
    Reuse(Store(tmp_path), mine).give(PLAN)
    assert mine.trial("k").outcome() == Outcome(outcome="finished", round=2)
    assert count_outcomes(mine.trials())["finished"] == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_trial_without_an_evaluation_at_a_rung_is_run_again(earlier, tmp_path, together):
    trial = earlier.trial("k")
    first, _, last = trial.history()
    skipped = RoundRecord(1, {"loss/train": 1.0}, 1.0)
    save(trial.checkpoint, Checkpoint(2, ServerState({}, (0,)), (first, skipped, last)))
    mine = sweep(tmp_path, "mine")
    assert Reuse(Store(tmp_path), mine, [1, 3]).give(PLAN, together) == PLAN
    assert Reuse(Store(tmp_path), mine, [2, 3]).give(PLAN, together).marks[TAKEN_FROM] == "earlier"


def test_the_outcome_is_not_reused_for_arms_that_are_judged_together(earlier: SweepStore, tmp_path: Path) -> None:
    mine = sweep(tmp_path, "mine")
    Reuse(Store(tmp_path), mine).give(PLAN, together=True)
    assert mine.trial("k").outcome() is None
    assert mine.trial("k").history() == earlier.trial("k").history()


@pytest.mark.parametrize(
    "changes",
    [
        {"fresh": True},
        {"scheduler": "pbt"},  # members continue from intermediate states, which a finished trial no longer has
        {"processor": "x86_64, 2 threads"},
        {"processor": ""},
        {"digests": {"packages": "other"}},
    ],
)
def test_nothing_is_reused_if_results_could_differ_or_the_user_declines(
    earlier: SweepStore, tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert earlier.ended() == ["k"]
    mine = sweep(tmp_path, "mine", **changes)
    assert Reuse(Store(tmp_path), mine).give(PLAN) == PLAN
    assert not mine.trial("k").planned


def test_failed_trials_are_not_reused_and_planned_trials_not_replaced(earlier: SweepStore, tmp_path: Path) -> None:
    mine = sweep(tmp_path, "mine")
    mine.trial("k").plan(PLAN)
    assert Reuse(Store(tmp_path), mine).give(PLAN) == PLAN
    assert mine.trial("k").history() == []
    end(earlier, "failed")
    assert Reuse(Store(tmp_path), sweep(tmp_path, "third")).give(PLAN) == PLAN


@pytest.mark.parametrize(
    ("first", "second", "last_has_rounds", "covered"),
    [
        ("finished", "finished", True, True),
        ("finished", "diverged", True, True),
        ("finished", "pruned", True, False),
        ("finished", "failed", True, False),
        ("finished", None, True, False),
        ("finished", "finished", False, False),
    ],
)
def test_a_sweep_has_nothing_to_run_only_if_all_of_its_trials_have_ended_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: OutcomeName,
    second: OutcomeName | None,
    last_has_rounds: bool,
    covered: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", {**GRID, "seeds": [0]})
    plan, started = Plan.read("tiny", {}, {}), MANIFEST.model_copy(update={"id": "new", **ALIKE})
    assert not all_reusable(plan, Store(tmp_path), started)
    one, two = plan.grid()
    made = sweep(tmp_path, "earlier")
    end(made, first, one)
    if second is not None:
        end(made, second, two)
    if not last_has_rounds:
        made.trial(two.key).checkpoint.unlink()
    assert all_reusable(plan, Store(tmp_path), started) == covered
    assert not all_reusable(plan, Store(tmp_path), started.model_copy(update={"fresh": True}))
    halving = {**GRID, "seeds": [0], "scheduler": {"name": "arms"}}
    for name, space in {"halving": halving, "sampled": SAMPLED}.items():
        write_space(tmp_path, name, space)
        assert not all_reusable(Plan.read(name, {}, {}), Store(tmp_path), started)


def test_a_damaged_trial_is_left_to_run_without_a_second_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", {**GRID, "seeds": [0], "space": {"lora.rank": {"grid": [4]}}})
    plan = Plan.read("tiny", {}, {})
    made = sweep(tmp_path, "earlier")
    end(made, "finished", plan.grid()[0])
    (made.trial(plan.grid()[0].key).folder / "outcome.json").write_text("{")
    assert not all_reusable(plan, Store(tmp_path), MANIFEST.model_copy(update={"id": "new", **ALIKE}))
    assert capsys.readouterr().err == ""
