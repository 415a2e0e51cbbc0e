"""The rungs: Ray's own rule, remembered across processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from fedsweep.sweep.rungs import Rungs, RungScheduler
from fedsweep.sweep.space import ASHAScheduler, Objective

ROUNDS = 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rungs.jsonl"


def test_rungs_are_powers_of_eta_below_the_last_round(log: Path) -> None:
    assert Rungs(ASHAScheduler(grace_rounds=3, reduction_factor=3), ROUNDS, log).milestones == [3, 9]
    assert Rungs(ASHAScheduler(grace_rounds=1, reduction_factor=2), 9, log).milestones == [1, 2, 4, 8]
    assert Rungs(ASHAScheduler(grace_rounds=30, reduction_factor=3), ROUNDS, log).milestones == []


@given(
    values=st.lists(st.lists(st.floats(0, 1), min_size=ROUNDS, max_size=ROUNDS), min_size=2, max_size=8),
    eta=st.sampled_from([2, 3, 4]),
    order=st.randoms(use_true_random=False),
)
def test_decisions_are_those_of_rays_own_scheduler(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[float]], eta: int, order: object
) -> None:
    """Trials interleaved at random; the two schedulers stop the same ones at the same rounds."""
    ours = Rungs(ASHAScheduler(grace_rounds=2, reduction_factor=eta), ROUNDS, tmp_path_factory.mktemp("r") / "log")
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
    config = ASHAScheduler(grace_rounds=1, reduction_factor=2)
    first = Rungs(config, ROUNDS, log)
    decisions = [first.decide(key, 1, value) for key, value in [("a", 0.9), ("b", 0.2), ("c", 0.1)]]
    assert decisions == [False, True, True]
    second = Rungs(config, ROUNDS, log)
    # `b` would survive if it were judged anew against an empty rung; and `d` meets all three.
    assert [second.decide(key, 1, value) for key, value in [("b", 0.2), ("a", 0.9), ("d", 0.15)]] == [True, False, True]
    assert len(log.read_text().splitlines()) == 4


def test_a_line_torn_by_a_crash_is_cut_off(log: Path) -> None:
    config = ASHAScheduler(grace_rounds=1, reduction_factor=2)
    Rungs(config, ROUNDS, log).decide("a", 1, 0.5)
    with log.open("a") as file:
        file.write('{"key": "b", "rou')
    again = Rungs(config, ROUNDS, log)
    assert again.values[1] == {"a": 0.5}
    again.decide("c", 1, 0.7)
    assert Rungs(config, ROUNDS, log).values[1] == {"a": 0.5, "c": 0.7}


def test_min_mode_stops_the_large_ones(log: Path) -> None:
    rungs = Rungs(ASHAScheduler(grace_rounds=1, reduction_factor=2), ROUNDS, log)
    scheduler = RungScheduler(rungs, Objective(metric="loss/test", mode="min"))
    trial = [SimpleNamespace(config={"trial": key}) for key in "ab"]
    assert scheduler.on_trial_result(None, trial[0], {"round": 1, "loss/test": 0.1}) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(None, trial[1], {"round": 1, "loss/test": 0.9}) == TrialScheduler.STOP


def test_rounds_without_the_objective_are_passed_over(log: Path) -> None:
    """The untuned model reports no training loss."""
    scheduler = RungScheduler(
        Rungs(ASHAScheduler(grace_rounds=1), ROUNDS, log), Objective(metric="loss/train", mode="min")
    )
    trial = SimpleNamespace(config={"trial": "a"})
    assert scheduler.on_trial_result(None, trial, {"round": 0, "loss/test": 1.0}) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(None, trial, {"round": 1, "loss/train": 1.0}) == TrialScheduler.CONTINUE
    assert log.read_text().count("\n") == 1
