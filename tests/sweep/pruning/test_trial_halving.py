"""Successive halving of single trials, whose decisions do not depend on workers or on the order of results."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.results import Outcome
from fedsweep.sweep.pruning.trial_halving import Recorded, halve_in_order
from fedsweep.sweep.pruning.trial_state import TrialState
from fedsweep.sweep.search.ray_searchers import JointScheduler
from fedsweep.sweep.space.settings import ASHAScheduler, rungs
from tests.sweep.pruning.test_arm_state import Folder, Trial, plans_of, space_of

ROUNDS = 9
Curves = Sequence[Sequence[float]]
curves = st.lists(
    st.lists(
        st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) | st.floats(0, 1), min_size=ROUNDS + 1, max_size=ROUNDS + 1
    ),
    min_size=1,
    max_size=12,
)


def last_rounds(of_trials: Curves, eta: float, strata: Sequence[str], diverges: dict[int, int]) -> list[int]:
    """Return the last round of each trial if one trial runs after the other, as a reference.

    `diverges` contains the round in which a trial diverges, before the round is recorded.
    """
    reached: dict[tuple[str, int], list[float]] = {}
    ends = []
    for number, curve in enumerate(of_trials):
        for round in range(1, ROUNDS + 1):
            if diverges.get(number) == round:
                ends.append(round - 1)
                break
            if round in rungs(1, eta, ROUNDS):
                earlier = reached.setdefault((strata[number], round), [])
                stop = bool(earlier) and curve[round] < np.quantile(earlier, 1 - 1 / eta)
                earlier.append(curve[round])
                if stop:
                    ends.append(round)
                    break
        else:
            ends.append(ROUNDS)
    return ends


def state_over(folder: Folder, eta: float, per: tuple[str, ...] = ()) -> TrialState:
    config = ASHAScheduler(grace_rounds=1, reduction_factor=eta, per=per)
    return TrialState(space_of(ROUNDS), config, folder, plans_of(len(folder.trials), 1))  # type: ignore[arg-type]


def play(state: TrialState, folder: Folder, workers: int, chance: random.Random) -> list[tuple[str, int]]:
    """Run trials on workers of random speed, as Ray does, until none is left or, by chance, all processes are killed.

    Return the rounds in which trials were stopped at a rung.
    """
    running: set[str] = set()
    held = []
    for _ in range(chance.choice([3, 10, 10_000])):
        free = [key for key, _ in state.wanted() if key not in running]
        running |= {*free[: workers - len(running)]}
        if not running:
            break
        key = chance.choice(sorted(running))
        trial = folder.trials[key]
        if trial.diverges == trial.round + 1:
            trial.ended = Outcome(outcome="diverged", round=trial.round)
            state.record_error(key, trial.ended)
            running.remove(key)
            continue
        trial.round += 1
        if trial.round in state.milestones or trial.round == ROUNDS:
            state.refresh(key)
        if trial.round == ROUNDS or not state.may_continue(key):
            held.append((key, trial.round))
            running.remove(key)
    return held


@settings(max_examples=300, deadline=None)
@given(
    of_trials=curves,
    eta=st.sampled_from([2, 3, 4, 2.5]),
    workers=st.integers(1, 6),
    chance=st.randoms(use_true_random=False),
    diverges=st.dictionaries(st.integers(0, 11), st.integers(1, ROUNDS), max_size=3),
    stratified=st.booleans(),
)
def test_the_pruned_trials_are_those_of_a_single_worker(
    of_trials: Curves, eta: float, workers: int, chance: random.Random, diverges: dict[int, int], stratified: bool
) -> None:
    folder = Folder({f"{number}-0": Trial(one, diverges.get(number)) for number, one in enumerate(of_trials)})
    decided: dict[str, Outcome] = {}
    for _ in range(1000):  # a new state after each kill
        state = state_over(folder, eta, ("lora.rank",) if stratified else ())
        play(state, folder, workers, chance)
        for key in folder.trials:
            if (outcome := state.outcome(key)) is not None:
                fields = outcome.outcome, outcome.round
                assert fields == ((before := decided.setdefault(key, outcome)).outcome, before.round), "it has changed"
        if len(decided) == len(folder.trials):
            break
    else:
        pytest.fail("trials wait for each other")
    strata = [str(number) if stratified else "" for number in range(len(of_trials))]
    expected = last_rounds(of_trials, eta, strata, diverges)
    assert [decided[key].round for key in folder.trials] == expected
    assert [trial.round for trial in folder.trials.values()] == expected, "no trial runs more rounds than needed"


@settings(max_examples=200, deadline=None)
@given(of_trials=curves, eta=st.sampled_from([2, 3, 4]), chance=st.randoms(use_true_random=False))
def test_early_decisions_are_those_of_complete_records(of_trials: Curves, eta: float, chance: random.Random) -> None:
    """Each decision from some of the rounds equals the decision after all trials have recorded all of their rounds."""
    milestones = rungs(1, eta, ROUNDS)
    whole = {number: Recorded(dict(enumerate(one)), ROUNDS) for number, one in enumerate(of_trials)}
    some = {}
    for number, one in whole.items():
        if chance.random() < 0.9:  # the folder of another trial was deleted
            last = chance.randint(0, ROUNDS)
            some[number] = Recorded({round: value for round, value in one.values.items() if round <= last}, last)
    final, early = (halve_in_order(one, milestones, ROUNDS, eta) for one in (whole, some))
    assert not final.undecided
    assert {*early.promoted, *early.undecided, *early.pruned} == {*some}
    for number, behind in early.pruned.items():
        assert final.pruned[number].round == behind.round
    for number, until in (early.promoted | early.undecided).items():
        assert number not in final.pruned or final.pruned[number].round >= until


def recorded(*values: float) -> dict[int, Recorded]:
    """Return trials that have recorded a value after round 1."""
    return {number: Recorded({1: value}, 1) for number, value in enumerate(values)}


def test_a_trial_waits_only_for_earlier_trials_that_can_change_the_decision() -> None:
    known = recorded(0.5, 0.6, 0.7, 0.8)
    late, after = Recorded({}, 0), Recorded({1: 0.65}, 1)
    assert halve_in_order({**known, 4: after}, [1], 9, 2).promoted[4] == 9  # the median is 0.65
    assert halve_in_order({**known, 4: late, 5: after}, [1], 9, 2).undecided == {5: 1}
    assert halve_in_order({**known, 4: after, 5: late}, [1], 9, 2).promoted[4] == 9
    for value, kind in ((0.55, "pruned"), (0.75, "promoted")):  # below or above the median whatever trial 4 records
        found = halve_in_order({**known, 4: late, 5: Recorded({1: value}, 1)}, [1], 9, 2)
        assert 5 in getattr(found, kind)
    # Trial 4 is missing, because its folder was deleted, or it belongs to another stratum, or it failed.
    assert halve_in_order({**known, 5: after}, [1], 9, 2).undecided == {5: 1}
    for other in (Recorded({}, 0, stratum="other"), Recorded({}, 0, failed=True)):
        assert halve_in_order({**known, 4: other, 5: after}, [1], 9, 2).promoted[5] == 9


def test_a_waiting_trial_may_still_reach_later_rungs_even_if_it_has_recorded_them() -> None:
    known = {number: Recorded({1: one, 3: one}, 3, failed=True) for number, one in enumerate((0.5, 0.6, 0.7, 0.8))}
    waiting, last = Recorded({1: 0.65, 3: 0.9}, 9), Recorded({1: 0.9, 3: 0.75}, 3)
    found = halve_in_order({**known, 4: Recorded({}, 0), 5: waiting, 6: last}, [1, 3], 9, 2)
    assert found.undecided == {5: 1, 6: 3}


def test_values_that_are_not_finite_are_worse_than_all_others() -> None:
    found = halve_in_order(recorded(math.nan, 0.1, math.nan, 0.2), [1], 9, 2)
    assert found.promoted == {0: 9, 1: 9, 3: 9}
    assert found.pruned[2].sentence() == "1 of 1 earlier trials were better after round 1"


def test_a_trial_is_compared_at_the_rungs_that_it_reaches() -> None:
    """A reused trial has recorded rounds after the rung at which it is pruned, which count for no other trial."""
    trials = {number: Recorded({1: value, 3: value}, 9) for number, value in enumerate((0.5, 0.4, 0.5))}
    trials[3] = Recorded({1: 0.6, 3: 0.45}, 3)
    found = halve_in_order(trials, [1, 3], 9, 2)
    assert (found.pruned[1].round, found.pruned[3].round, found.pruned[3].compared) == (1, 3, 2)


def test_hidden_rounds_and_reasons() -> None:
    folder = Folder({f"{number}-0": Trial([0.0, *[value] * ROUNDS]) for number, value in enumerate((0.5, 0.4, 0.6))})
    for key, round in (("1-0", 5), ("2-0", 1)):
        folder.trials[key].round = round
    state = state_over(folder, 3)
    assert state.verdicts.undecided == {1: 1, 2: 1}
    assert [state.visible(key) for key in folder.trials] == [ROUNDS, 1, 1]
    assert (state.wanted(), state.outcome("1-0")) == ([("0-0", ROUNDS)], None)
    assert sorted(state.changed()) == sorted(folder.trials)
    folder.trials["0-0"].round = 1
    state.refresh("0-0")
    assert state.changed() == ["1-0", "2-0"]
    reason = "1 of 1 earlier trials were better after round 1"
    assert state.outcome("1-0") == Outcome(outcome="pruned", round=1, reason=reason)
    assert state.wanted() == [("0-0", ROUNDS), ("2-0", ROUNDS)]


def test_a_trial_stops_at_a_rung_if_it_was_pruned_or_has_to_wait() -> None:
    folder = Folder({f"{number}-0": Trial([0.0, *[value] * ROUNDS]) for number, value in enumerate((0.5, 0.4, 0.6))})
    state = state_over(folder, 3)
    scheduler = JointScheduler(state)

    def report(key: str, round: int) -> str:
        folder.trials[key].round = round
        return scheduler.on_trial_result(None, SimpleNamespace(config={"trial": key}), {"round": round})

    assert [report("2-0", 0), report("2-0", 1)] == ["CONTINUE", "STOP"]  # trial 0 may still be better
    assert [report("0-0", 0), report("0-0", 1), report("0-0", 2)] == ["CONTINUE"] * 3
    assert [report("1-0", 0), report("1-0", 1)] == ["CONTINUE", "STOP"]
    folder.trials["0-0"].round = ROUNDS
    state.refresh("0-0")
    assert [report("2-0", 1), report("2-0", 2)] == ["CONTINUE", "CONTINUE"]
    assert state.outcome("1-0") is not None


def test_a_failed_trial_that_runs_again_is_compared_as_if_it_had_not_failed() -> None:
    folder = Folder({f"{number}-0": Trial([0.0, *[value] * ROUNDS]) for number, value in enumerate((0.7, 0.5))})
    folder.trials["0-0"].ended = Outcome(outcome="failed", round=0)
    folder.trials["0-0"].round, folder.trials["1-0"].round = 0, ROUNDS
    outcome: Any = state_over(folder, 3).outcome("1-0")
    assert outcome.outcome == "finished"
    folder.trials["0-0"].ended = None  # as in a resumed sweep of a grid
    state = state_over(folder, 3)
    assert state.outcome("1-0") is None
    folder.trials["0-0"].round = 1
    state.refresh("0-0")
    again: Any = state.outcome("1-0")
    assert (again.outcome, again.round) == ("pruned", 1)
