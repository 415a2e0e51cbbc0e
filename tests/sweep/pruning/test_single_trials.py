"""Schedulers of single trials, which decide like Ray's own schedulers and remember decisions across processes."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler

from fedsweep.sweep.pruning.trial_rules import Medians, Rungs, StoppingScheduler
from fedsweep.sweep.space.settings import AsyncASHAScheduler, Goal, MedianScheduler

ROUNDS = 20


@dataclass(frozen=True)
class RayTrial:
    trial_id: str


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def test_rungs_are_powers_of_eta_below_the_last_round(log: Path) -> None:
    assert Rungs(AsyncASHAScheduler(grace_rounds=3, reduction_factor=3), ROUNDS, log).milestones == [3, 9]
    assert Rungs(AsyncASHAScheduler(grace_rounds=1, reduction_factor=2), 9, log).milestones == [1, 2, 4, 8]
    assert Rungs(AsyncASHAScheduler(grace_rounds=30, reduction_factor=3), ROUNDS, log).milestones == []


@settings(max_examples=20)
@given(
    values=st.lists(st.lists(st.floats(0, 1), min_size=ROUNDS, max_size=ROUNDS), min_size=2, max_size=8),
    eta=st.sampled_from([2, 3, 4]),
    order=st.randoms(use_true_random=False),
)
def test_decisions_equal_those_of_rays_own_scheduler(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[float]], eta: int, order: object
) -> None:
    """Both schedulers stop the same trials at the same rounds, in any order of results."""
    ours = Rungs(AsyncASHAScheduler(grace_rounds=2, reduction_factor=eta), ROUNDS, tmp_path_factory.mktemp("r") / "log")
    rays = AsyncHyperBandScheduler("round", "v", "max", max_t=ROUNDS, grace_period=2, reduction_factor=eta)
    trials = [SimpleNamespace(trial_id=f"t{i}") for i in range(len(values))]
    for trial in trials:
        rays.on_trial_add(None, trial)  # type: ignore[arg-type]
    running = {trial.trial_id: 0 for trial in trials}
    decisions = 0
    while running:
        key = order.choice(sorted(running))  # type: ignore[attr-defined]
        running[key] += 1
        round, value = running[key], values[int(key[1:])][running[key] - 1]
        if round == ROUNDS:
            del running[key]
            continue
        stop = ours.decide(key, round, value)
        action = rays.on_trial_result(None, trials[int(key[1:])], {"round": round, "v": value})  # type: ignore[arg-type]
        assert stop == (action == TrialScheduler.STOP)
        decisions += 1
        if stop:
            del running[key]
    assert decisions >= len(values)


def test_a_new_process_repeats_the_decisions_and_remembers_the_values(log: Path) -> None:
    config = AsyncASHAScheduler(grace_rounds=1, reduction_factor=2)
    first = Rungs(config, ROUNDS, log)
    decisions = [first.decide(key, 1, value) for key, value in [("a", 0.9), ("b", 0.2), ("c", 0.1)]]
    assert decisions == [False, True, True]
    second = Rungs(config, ROUNDS, log)
    # `b` would continue if it were judged again on an empty rung, and `d` is compared with all three.
    assert [second.decide(key, 1, value) for key, value in [("b", 0.2), ("a", 0.9), ("d", 0.15)]] == [True, False, True]
    assert len(log.read_text().splitlines()) == 4


def test_a_line_torn_by_a_crash_is_cut_off(log: Path) -> None:
    config = AsyncASHAScheduler(grace_rounds=1, reduction_factor=2)
    Rungs(config, ROUNDS, log).decide("a", 1, 0.5)
    with log.open("a") as file:
        file.write('{"key": "b", "rou')
    again = Rungs(config, ROUNDS, log)
    assert again.values["", 1] == {"a": 0.5}
    again.decide("c", 1, 0.7)
    assert Rungs(config, ROUNDS, log).values["", 1] == {"a": 0.5, "c": 0.7}


def test_min_mode_stops_trials_with_large_values(log: Path) -> None:
    rungs = Rungs(AsyncASHAScheduler(grace_rounds=1, reduction_factor=2), ROUNDS, log)
    scheduler = StoppingScheduler(rungs, Goal("loss/test", "min", None))
    trial = [SimpleNamespace(config={"trial": key}) for key in "ab"]
    assert scheduler.on_trial_result(None, trial[0], {"round": 1, "loss/test": 0.1}) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(None, trial[1], {"round": 1, "loss/test": 0.9}) == TrialScheduler.STOP


def test_rounds_without_the_objective_are_ignored(log: Path) -> None:
    """Round 0 evaluates the untuned model, which has no training loss."""
    scheduler = StoppingScheduler(
        Rungs(AsyncASHAScheduler(grace_rounds=1), ROUNDS, log), Goal("loss/train", "min", None)
    )
    trial = SimpleNamespace(config={"trial": "a"})
    assert scheduler.on_trial_result(None, trial, {"round": 0, "loss/test": 1.0}) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(None, trial, {"round": 1, "loss/train": 1.0}) == TrialScheduler.CONTINUE
    told = {"round": 1, "loss/train": 1.0, "error": "Traceback", "kind": "diverged"}
    assert scheduler.on_trial_result(None, SimpleNamespace(config={"trial": "b"}), told) == TrialScheduler.CONTINUE
    assert log.read_text().count("\n") == 1


@settings(max_examples=20)
@given(
    values=st.lists(st.lists(st.floats(0, 1), min_size=9, max_size=9), min_size=4, max_size=8),
    order=st.randoms(use_true_random=False),
    rule=st.sampled_from(["asha_async", "median"]),
)
def test_other_strata_have_no_effect_on_a_stratum(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[float]], order: object, rule: str
) -> None:
    """Trials of two strata, which report in turn, are stopped like the trials of one stratum alone."""
    folder = tmp_path_factory.mktemp("strata")

    def new(log: str) -> Rungs | Medians:
        if rule == "asha_async":
            return Rungs(AsyncASHAScheduler(grace_rounds=2, reduction_factor=2), ROUNDS, folder / log)
        return Medians(MedianScheduler(grace_rounds=2, fewest=1), folder / log)

    together, alone = new("together"), [new("even"), new("odd")]
    running = dict.fromkeys(range(len(values)), 0)
    while running:
        place = order.choice(sorted(running))  # type: ignore[attr-defined]
        running[place] += 1
        round = running[place]
        told = str(place), round, values[place][round - 1]
        stop = together.decide(*told, str(place % 2))
        assert stop == alone[place % 2].decide(*told)
        if stop or round == 9:
            del running[place]


@given(values=st.lists(st.lists(st.floats(0, 1), min_size=9, max_size=9), min_size=2, max_size=8))
def test_median_stopping_equals_rays_rule_while_all_trials_are_in_the_same_round(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[float]]
) -> None:
    """The test ends at the first stopped trial, because only Ray's rule includes stopped trials in later medians."""
    ours = Medians(MedianScheduler(grace_rounds=1, fewest=2), tmp_path_factory.mktemp("m") / "log")
    rays = MedianStoppingRule("round", "v", "max", grace_period=1, min_samples_required=2, hard_stop=True)
    trials = [RayTrial(f"t{i}") for i in range(len(values))]
    controller = SimpleNamespace(get_live_trials=list)
    for round in range(1, 10):
        for place, trial in enumerate(trials):
            told = {"round": round, "v": values[place][round - 1]}
            action = rays.on_trial_result(controller, trial, told)  # type: ignore[arg-type]
            stop = ours.decide(trial.trial_id, round, told["v"])
            if place == len(trials) - 1:  # the last trial of a round
                assert stop == (action == TrialScheduler.STOP)
            if stop or action == TrialScheduler.STOP:
                return


def test_the_median_rule_repeats_its_decisions_in_a_new_process(log: Path) -> None:
    config = MedianScheduler(grace_rounds=1, fewest=1)
    first = Medians(config, log)
    made = [first.decide(key, 1, value) for key, value in [("a", 0.9), ("b", 0.2), ("c", 0.5)]]
    assert made == [False, True, True]
    again = Medians(config, log)
    assert [again.decide(key, 1, value) for key, value in [("b", 0.2), ("a", 0.9)]] == [True, False]
    assert again.decide("a", 2, 0.1) is False  # the best round of trial a counts
    assert again.decide("d", 1, 0.45) is True
