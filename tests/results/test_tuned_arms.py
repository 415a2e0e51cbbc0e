"""The choice of the values of each arm from the recorded metrics of a tuning sweep."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.results import Outcome, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.results.tuned_arms import (
    STAGE,
    Stage,
    TunedArm,
    choose,
    sample_values,
    space_name,
    stage_of,
    sweep_name,
)

METRIC = "validation/accuracy/mean"
RATES = (0.1, 0.02, 0.3)
STAGE_OF_TUNING = Stage(name="tuning", names=("optimizer.lr",), drawn=tuple({"optimizer.lr": one} for one in RATES[1:]))


def record(number, rank, rate, value, outcome="finished", seed=1000):
    arm = {"lora.rank": rank, "optimizer.lr": rate}
    plan = TrialPlan(key=f"k{number}", number=number, arm=arm, seed=seed, config={"optimizer": {"lr": rate}})
    history = [RoundRecord(0, {METRIC: 0.99}, 0.1), RoundRecord(1, {METRIC: value}, 0.1)]
    ended = None if outcome is None else Outcome(outcome=outcome, round=1)
    return TrialRecord(plan, ended, history)


VALUES = st.one_of(st.sampled_from([0.2, 0.5, math.nan, math.inf]), st.floats(0, 1))
OUTCOMES = st.sampled_from(["finished", "finished", "failed", "diverged", None])


@given(st.lists(st.tuples(VALUES, OUTCOMES), min_size=6, max_size=6), st.sampled_from(["max", "min"]), st.randoms())
def test_the_choice_is_the_best_finished_sample_and_the_earliest_of_equal_ones(results, mode, rng: random.Random):
    cells = [(rank, rate) for rank in (1, 4) for rate in RATES]
    trials = [record(i, *cell, *result) for i, (cell, result) in enumerate(zip(cells, results, strict=True))]
    shuffled = rng.sample(trials, len(trials))
    found = choose(STAGE_OF_TUNING, METRIC, mode, shuffled)
    assert [one.arm for one in found] == [{"lora.rank": 1}, {"lora.rank": 4}]
    for one, own in zip(found, (results[:3], results[3:]), strict=True):
        usable = [(v, i) for i, (v, how) in enumerate(own) if how == "finished" and math.isfinite(v)]
        best = min(usable, key=lambda pair: (-pair[0] if mode == "max" else pair[0], pair[1]), default=None)
        if best is None:
            assert (one.sample, one.values, one.score) == (None, {}, None)
        else:
            assert (one.score, one.sample, one.values) == (*best, {"optimizer.lr": RATES[best[1]]})


RESULTS = st.tuples(st.floats(0, 1), st.sampled_from(["finished"] * 5 + ["failed"]))


@given(st.lists(st.lists(RESULTS, min_size=3, max_size=3), min_size=3, max_size=3), st.randoms())
def test_the_value_of_a_sample_is_its_mean_over_seeds_if_all_have_finished(results, rng: random.Random):
    trials = [
        record(3 * seed + place, 1, rate, *results[seed][place], seed=1000 + seed)
        for seed in range(3)
        for place, rate in enumerate(RATES)
    ]
    ((_, samples),) = sample_values(STAGE_OF_TUNING, METRIC, rng.sample(trials, len(trials))).values()
    for place, (values, value) in samples.items():
        own = [results[seed][place] for seed in range(3)]
        expected = sum(one for one, _ in own) / 3 if all(how == "finished" for _, how in own) else None
        assert values == {"optimizer.lr": RATES[place]}
        assert value == (None if expected is None else pytest.approx(expected))
    assert sorted(samples) == [0, 1, 2]


def test_the_last_round_counts_and_not_the_best_one():
    trials = [record(0, 1, 0.1, 0.4), record(1, 1, 0.02, 0.5)]
    (found,) = choose(STAGE_OF_TUNING, METRIC, "max", trials)
    assert (found.sample, found.score) == (1, 0.5)


def test_every_arm_tries_its_untuned_value_and_the_same_samples():
    assert [*STAGE_OF_TUNING.with_samples({"lora.rank": 1}, {"optimizer.lr": 0.1, "seed": 0})] == [
        {"lora.rank": 1, "optimizer.lr": rate} for rate in RATES
    ]
    own = {"optimizer.lr": 0.3}
    tried = [one["optimizer.lr"] for one in STAGE_OF_TUNING.with_samples({"lora.rank": 4}, own)]
    assert tried == [0.3, 0.02]  # the drawn sample that equals the untuned value is not tried twice


@pytest.mark.parametrize("untuned", [1, 1.0])
def test_an_untuned_value_that_was_also_drawn_is_sample_0(untuned):
    stage = Stage(name="tuning", names=("optimizer.lr",), drawn=tuple({"optimizer.lr": one} for one in (0, 1, 2)))
    tried = [one["optimizer.lr"] for one in stage.with_samples({"lora.rank": 1}, {"optimizer.lr": untuned})]
    assert tried == [1, 0, 2]
    trials = [record(i, 1, rate, value) for i, (rate, value) in enumerate(zip(tried, (0.5, 0.5, 0.4), strict=True))]
    ((_, samples),) = sample_values(stage, METRIC, trials).values()
    assert {number: value for number, (_, value) in samples.items()} == {0: 0.5, 1: 0.5, 3: 0.4}
    (found,) = choose(stage, METRIC, "max", trials[::-1])
    assert (found.sample, found.values, found.tried) == (
        0,
        {"optimizer.lr": untuned},
        3,
    )  # not the equally good sample 1


def test_an_arm_is_found_by_equal_values():
    stage = Stage(name="tuned", names=("optimizer.lr",), drawn=(), chosen=(TunedArm(arm={"alpha": 0.0}, sample=2),))
    assert stage.choice({"alpha": 0}).sample == 2
    assert stage.choice({"alpha": False}) is None


@pytest.mark.parametrize("name", ["tuning", "common", "tuned"])
def test_a_stage_is_in_the_options_of_its_sweep_and_in_its_name(name):
    stage = STAGE_OF_TUNING.model_copy(update={"name": name})
    assert stage_of({STAGE: stage.model_dump(mode="json")}) == stage
    assert space_name(sweep_name("a/b", stage), stage) == "a/b"
    assert stage_of({"seeds": [0]}) is None
