"""Samples from Optuna: repeatable, told the truth, and resumable."""

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from ray.tune.search import Searcher

from fedsweep.checkpoint import Checkpoint, save
from fedsweep.history import RoundRecord
from fedsweep.store import Outcome, SweepStore, TrialPlan
from fedsweep.sweep.plan import Plan
from fedsweep.sweep.search import PlannedSearch, SampledSearch, open_study
from fedsweep.types import ServerState
from tests.sweep.helpers import GRID, ROUNDS, SAMPLED, write_space

METRIC = "accuracy/mean"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", SAMPLED)
    return Plan.read("tiny", {}, {})


def search_in(folder: Path, plan: Plan) -> SampledSearch:
    sweep = SweepStore(folder)
    return SampledSearch(plan, sweep, lambda trial: sweep.trial(trial.key).plan(trial))


def value_of(suggestion: dict[str, Any]) -> float:
    """A stand-in for training that prefers a learning rate."""
    return 1 - abs(suggestion["optimizer.lr"] - 0.05)


def play(search: SampledSearch, trial_id: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """As Ray does: the round after which a trial is stopped is not reported, only told at the end."""
    suggestion: Any = search.suggest(trial_id)
    for round in range(rounds + (rounds == ROUNDS)):
        search.on_trial_result(trial_id, {"round": round, METRIC: value_of(suggestion)})
    search.on_trial_complete(trial_id, {"round": rounds, METRIC: value_of(suggestion)})
    return suggestion


def test_the_sequence_is_repeatable_and_ends_after_the_samples(tmp_path: Path, plan: Plan) -> None:
    sequences = []
    for folder in ("a", "b"):
        search = search_in(tmp_path / folder, plan)
        sequences.append([play(search, f"t{number}") for number in range(6)])
        assert search.suggest("one more") == Searcher.FINISHED
    assert sequences[0] == sequences[1]
    assert len({one["optimizer.lr"] for one in sequences[0]}) == 6


def test_a_search_stopped_and_opened_again_continues_the_same_sequence(tmp_path: Path, plan: Plan) -> None:
    undisturbed = search_in(tmp_path / "a", plan)
    expected = [play(undisturbed, f"t{number}") for number in range(6)]
    first = search_in(tmp_path / "b", plan)
    got = [play(first, f"t{number}") for number in range(3)]
    first.suggest("left running")
    again = search_in(tmp_path / "b", plan)
    got += [play(again, f"u{number}") for number in range(3)]
    assert got == expected
    assert again.suggest("one more") == Searcher.FINISHED


def test_the_study_is_told_how_each_trial_ended(tmp_path: Path, plan: Plan) -> None:
    search = search_in(tmp_path / "a", plan)
    play(search, "whole")
    play(search, "pruned", rounds=1)
    search.suggest("failed")
    search.on_trial_complete("failed", None, error=True)
    study = open_study(tmp_path / "a" / "study.journal", "max")
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert sorted(study.trials[1].intermediate_values) == [0, 1]
    assert study.trials[1].value == study.trials[1].intermediate_values[1]


def test_an_outcome_on_disk_reaches_a_study_that_missed_it(tmp_path: Path, plan: Plan) -> None:
    """The driver died after it wrote the outcome and before it told the study."""
    folder = tmp_path / "a"
    search = search_in(folder, plan)
    suggestion: Any = search.suggest("t")
    trial = SweepStore(folder).trial(suggestion["trial"])
    history = tuple(RoundRecord(round, {METRIC: 0.5 + round / 10}, 1.0) for round in range(ROUNDS + 1))
    save(trial.checkpoint, Checkpoint(ROUNDS, ServerState({}, (0,)), history))
    trial.end(Outcome(outcome="finished", round=ROUNDS))
    next_up: Any = search_in(folder, plan).suggest("u")
    assert next_up["trial"] != suggestion["trial"]
    told = open_study(folder / "study.journal", "max").trials[0]
    assert told.state == TrialState.COMPLETE
    assert told.value == pytest.approx(0.8)
    assert sorted(told.intermediate_values) == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["pruned", "failed"])
def test_a_study_that_knows_more_than_the_disk_tells_it(tmp_path: Path, plan: Plan, end: str) -> None:
    """Ray tells the search how a trial ended before the driver writes the outcome; it may die in between."""
    folder = tmp_path / "a"
    search = search_in(folder, plan)
    suggestion: Any = search.suggest("t")
    trial = SweepStore(folder).trial(suggestion["trial"])
    history = tuple(RoundRecord(round, {METRIC: 0.5}, 1.0) for round in range(2))
    save(trial.checkpoint, Checkpoint(1, ServerState({}, (0,)), history))
    search.on_trial_complete("t", {"round": 1, METRIC: 0.5}, error=end == "failed")
    assert trial.outcome() is None
    search_in(folder, plan)
    outcome = trial.outcome()
    assert outcome is not None
    assert (outcome.outcome, outcome.round) == (end, 1)


def test_choices_may_be_lists_and_whole_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choices = {
        "federation.depths": {"choice": [[12, 10, 8, 6, 4, 3], [6, 6, 6, 6, 6, 6]]},
        "method": {"choice": ["all_small", {"name": "fedra", "missing_layers": "ensure_cover"}]},
        "local.steps": {"choice": [1, "epoch"]},
    }
    search_space = {**SAMPLED, "space": choices, "fixed": {}, "search": {"name": "random", "samples": 12}}
    write_space(tmp_path, "choices", search_space)
    plan = Plan.read("choices", {}, {})
    search = search_in(tmp_path / "a", plan)
    arms = [search.suggest(str(number)) for number in range(12)]
    for name, axis in choices.items():
        seen = {json.dumps(arm[name], sort_keys=True) for arm in arms}  # type: ignore[index]
        assert seen == {json.dumps(value, sort_keys=True) for value in axis["choice"]}


def test_a_round_without_the_objective_is_not_told(tmp_path: Path, plan: Plan) -> None:
    search = search_in(tmp_path / "a", plan)
    search.suggest("t")
    search.on_trial_result("t", {"round": 0, "loss/test": 2.0})
    search.on_trial_result("t", {"round": 1, METRIC: 0.5})
    assert open_study(tmp_path / "a" / "study.journal", "max").trials[0].intermediate_values == {1: 0.5}


def test_nothing_global_is_drawn(tmp_path: Path, plan: Plan) -> None:
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    play(search_in(tmp_path / "a", plan), "t")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_planned_search_replays_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "grid", GRID)
    trials = Plan.read("grid", {}, {}).grid()
    announced: list[TrialPlan] = []
    search = PlannedSearch(trials, announced.append)
    suggestions: list[Any] = [search.suggest(str(number)) for number in range(5)]
    assert suggestions[4] == Searcher.FINISHED
    assert announced == trials
    assert suggestions[0] == {"trial": trials[0].key, "lora.rank": 1, "seed": 0}
    assert optuna.logging.get_verbosity() >= optuna.logging.WARNING
