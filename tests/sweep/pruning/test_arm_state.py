"""The state of arms that are pruned together, which does not depend on workers or on the order of arrival."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.results import Outcome, TrialPlan
from fedsweep.results.arms import identity
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.pruning.arm_rules import halve
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.space.settings import ArmsScheduler, Goal, rungs

ROUNDS, ETA = 9, 2
CONFIG = ArmsScheduler(grace_rounds=1, reduction_factor=ETA)


@dataclass
class Trial:
    """The records of a trial in memory, and the values that the trial reaches if it is never stopped."""

    curve: Sequence[float]
    diverges: int | None = None
    round: int = -1
    ended: Outcome | None = None
    broken: Outcome | None = None
    planned = True

    def recorded(self) -> list[RoundRecord]:
        return [RoundRecord(round, {"accuracy/mean": self.curve[round]}, 0.0) for round in range(self.round + 1)]

    def outcome(self) -> Outcome | None:
        return self.ended

    def error(self) -> Outcome | None:
        return self.broken


@dataclass
class Folder:
    """A replacement for a sweep's folder, which keeps the trials in memory."""

    trials: dict[str, Trial] = field(default_factory=dict)

    def trial(self, key: str) -> Trial:
        return self.trials[key]


def plans_of(arms: int, seeds: int) -> list[TrialPlan]:
    return [
        TrialPlan(key=f"{arm}-{seed}", number=seed * arms + arm, arm={"lora.rank": arm}, seed=seed, config={})
        for seed in range(seeds)
        for arm in range(arms)
    ]


def space_of(rounds: int, **changes: Any) -> Any:
    """Return a replacement for a plan, with the settings on which decisions depend."""
    base = SimpleNamespace(federation=SimpleNamespace(rounds=rounds))
    space = SimpleNamespace(**{"goal": Goal("accuracy/mean", "max", None), "baseline": None, **changes})
    return SimpleNamespace(base=base, space=space)


def state_over(plans: list[TrialPlan], folder: Folder, **changes: Any) -> ArmState:
    config = CONFIG.model_copy(update=changes.pop("config", {}))
    return ArmState(space_of(ROUNDS, **changes), config, folder, plans)  # type: ignore[arg-type]


def play(state: ArmState, folder: Folder, workers: int, chance: random.Random, restart: float = 0.0) -> None:
    """Run the trials that `state` requests on workers of random speed, and record the results in `folder`."""
    out: dict[str, int] = {}
    for _ in range(10_000):
        free = [(key, until) for key, until in state.wanted() if key not in out]
        while free and len(out) < workers:
            key, until = free.pop(0)
            out[key] = until
        if not out:
            return
        key = chance.choice(sorted(out))
        trial = folder.trials[key]
        if trial.diverges == trial.round + 1:
            state.record_error(key, Outcome(outcome="diverged", round=max(trial.round, 0)))
            del out[key]
            continue
        trial.round += 1
        state.refresh(key)
        if trial.round >= out[key] or (state.is_pruned(key) and trial.round >= state.visible(key)):
            del out[key]
    raise AssertionError("the sweep did not end within 10,000 rounds")


def play_together(states: Sequence[ArmState], folder: Folder, chance: random.Random) -> None:
    """Run the trials in several processes, which know their own trials, and look at the others now and then."""
    taken: dict[str, ArmState] = {}
    for _ in range(10_000):
        state = chance.choice(states)
        if chance.random() < 0.2 or not any(one is state for one in taken.values()):
            for key in state.plans:
                state.refresh(key)
        free = [(key, until) for key, until in state.wanted() if key not in taken]
        if not free and not taken:
            return
        own = [key for key, one in taken.items() if one is state]
        if not own and free:
            taken[free[0][0]] = state
            own = [free[0][0]]
        for key in own:
            trial = folder.trials[key]
            if trial.broken is not None or (end := dict(state.wanted()).get(key)) is None or trial.round >= end:
                del taken[key]
            elif trial.diverges == trial.round + 1:
                trial.broken = Outcome(outcome="diverged", round=max(trial.round, 0))
                del taken[key]
            else:
                trial.round += 1
            state.refresh(key)
    raise AssertionError("the sweep did not end within 10,000 steps")


def result(state: ArmState, folder: Folder) -> dict[str, Any]:
    """Return the results of a sweep that tables and MLflow show."""
    found = {}
    for key, trial in folder.trials.items():
        outcome = state.outcome(key)
        assert outcome is not None
        assert trial.round >= outcome.round  # all shown rounds have been run
        found[key] = (outcome.outcome, outcome.round)
    return found


CURVES = st.lists(
    st.lists(st.lists(st.integers(0, 6), min_size=ROUNDS + 1, max_size=ROUNDS + 1), min_size=2, max_size=2),
    min_size=1,
    max_size=6,
)
DIVERGE = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 1)), st.integers(1, ROUNDS), max_size=2)


def folder_of(curves: Sequence[Sequence[Sequence[int]]], diverge: Mapping[tuple[int, int], int]) -> Folder:
    return Folder(
        {
            f"{arm}-{seed}": Trial([one / 10 for one in curve], diverge.get((arm, seed)))
            for arm, seeds in enumerate(curves)
            for seed, curve in enumerate(seeds)
        }
    )


@settings(max_examples=20)
@given(curves=CURVES, diverge=DIVERGE, workers=st.integers(2, 7), seed=st.integers(0, 1000), kept=st.booleans())
def test_the_result_does_not_depend_on_workers_or_arrival(
    curves: list[list[list[int]]], diverge: dict[tuple[int, int], int], workers: int, seed: int, kept: bool
) -> None:
    plans, baseline = plans_of(len(curves), 2), {"lora.rank": 0} if kept else None
    outcomes = []
    for side_by_side, order in ((1, 0), (workers, seed)):
        folder = folder_of(curves, diverge)
        state = state_over(plans, folder, baseline=baseline)
        play(state, folder, side_by_side, random.Random(order))
        outcomes.append(result(state, folder))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=20)
@given(curves=CURVES, diverge=DIVERGE, processes=st.integers(2, 3), seed=st.integers(0, 1000))
def test_the_result_of_several_processes_is_that_of_one(
    curves: list[list[list[int]]], diverge: dict[tuple[int, int], int], processes: int, seed: int
) -> None:
    plans = plans_of(len(curves), 2)
    alone, shared = folder_of(curves, diverge), folder_of(curves, diverge)
    one = state_over(plans, alone)
    play(one, alone, 1, random.Random(0))
    play_together([state_over(plans, shared) for _ in range(processes)], shared, random.Random(seed))
    assert result(state_over(plans, shared), shared) == result(one, alone)


@settings(max_examples=20)
@given(curves=CURVES, workers=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_pruned_arms_are_those_that_complete_curves_would_prune(
    curves: list[list[list[int]]], workers: int, seed: int
) -> None:
    folder = folder_of(curves, {})
    state = state_over(plans_of(len(curves), 2), folder)
    play(state, folder, workers, random.Random(seed))
    whole = {
        identity({"lora.rank": arm}): {number: {r: v / 10 for r, v in enumerate(one)} for number, one in enumerate(two)}
        for arm, two in enumerate(curves)
    }
    expected = halve(whole, rungs(1, ETA, ROUNDS), ROUNDS, ETA).pruned
    assert {arm: one.round for arm, one in state.verdicts.pruned.items()} == {
        arm: one.round for arm, one in expected.items()
    }


@settings(max_examples=20)
@given(curves=CURVES, diverge=DIVERGE, kill=st.integers(0, 40), seed=st.integers(0, 1000))
def test_a_new_process_has_the_same_result(
    curves: list[list[list[int]]], diverge: dict[tuple[int, int], int], kill: int, seed: int
) -> None:
    """The process is killed after some rounds, and the next process reads only the records on disk."""
    plans = plans_of(len(curves), 2)
    undisturbed = folder_of(curves, diverge)
    state = state_over(plans, undisturbed)
    play(state, undisturbed, 1, random.Random(0))
    broken, chance = folder_of(curves, diverge), random.Random(seed)
    for trial in broken.trials.values():  # rounds that two workers may have finished before the kill
        until = undisturbed.trials[next(key for key, one in broken.trials.items() if one is trial)].round
        trial.round = min(until, chance.randint(-1, max(kill, 0)))
    again = state_over(plans, broken)
    play(again, broken, 2, chance)
    assert result(again, broken) == result(state, undisturbed)


def test_rounds_that_ran_in_advance_are_shown_once_the_arm_is_promoted() -> None:
    folder = folder_of([[[1] * 10], [[2] * 10], [[3] * 10], [[4] * 10]], {})
    state = state_over(plans_of(4, 1), folder)
    for key, round in (("3-0", 2), ("2-0", 1), ("1-0", 1)):
        folder.trials[key].round = round
        state.refresh(key)
    assert state.visible("2-0") == 1  # arm 0 may still turn out to be better
    folder.trials["0-0"].round = 1
    state.refresh("0-0")
    assert state.visible("2-0") == 2
    ends = [state.outcome(f"{arm}-0") for arm in (0, 1)]
    assert [end and (end.outcome, end.round) for end in ends] == [("pruned", 1)] * 2


def test_the_baseline_is_never_pruned_even_if_it_diverges() -> None:
    folder = folder_of([[[0] * 10, [0] * 10], [[5] * 10, [5] * 10], [[6] * 10, [6] * 10]], {(0, 1): 4})
    state = state_over(plans_of(3, 2), folder, baseline={"lora.rank": 0})
    play(state, folder, 2, random.Random(1))
    shown = result(state, folder)
    assert (shown["0-0"], shown["0-1"]) == (("finished", ROUNDS), ("diverged", 3))


def test_strata_are_judged_separately() -> None:
    curves = [[[value] * 10] for value in (1, 2, 8, 9)]
    plans = [
        TrialPlan(key=f"{arm}-0", number=arm, arm={"data.alpha": arm // 2, "lora.rank": arm % 2}, seed=0, config={})
        for arm in range(4)
    ]
    pruned = {}
    for per in ((), ("data.alpha",)):
        folder = folder_of(curves, {})
        state = state_over(plans, folder, config={"per": per})
        play(state, folder, 2, random.Random(0))
        pruned[per] = sorted(key for key, (how, _) in result(state, folder).items() if how == "pruned")
    assert pruned == {(): ["0-0", "1-0", "2-0"], ("data.alpha",): ["0-0", "2-0"]}


def test_a_smaller_value_of_the_metric_may_be_better() -> None:
    folder = folder_of([[[1] * 10], [[9] * 10]], {})
    state = state_over(plans_of(2, 1), folder, goal=Goal("accuracy/mean", "min", None))
    play(state, folder, 1, random.Random(0))
    assert result(state, folder) == {"0-0": ("finished", ROUNDS), "1-0": ("pruned", 1)}


def test_the_outcome_of_a_pruned_arm_contains_the_reason() -> None:
    folder = folder_of([[[5] * 10], [[1] * 10]], {})
    state = state_over(plans_of(2, 1), folder)
    play(state, folder, 1, random.Random(0))
    outcome = state.outcome("1-0")
    assert outcome is not None
    assert outcome.reason == "40.0 points below the last promoted arm after round 1 (worse with 1 of 1 seeds)"
    assert math.isfinite(state.verdicts.pruned[identity({"lora.rank": 1})].behind)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_never_wait_while_any_arm_may_run(workers: int) -> None:
    """One of three arms is slow, so an idle worker runs another arm beyond the undecided rung."""
    folder = folder_of([[[3] * 10], [[2] * 10], [[1] * 10]], {})
    state = state_over(plans_of(3, 1), folder)
    for key in ("0-0", "1-0"):
        folder.trials[key].round = 1
        state.refresh(key)
    assert [key for key, _ in state.wanted()] == ["2-0", "0-0", "1-0"]
