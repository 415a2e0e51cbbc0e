"""The rules for pruning arms, whose decisions are paired over seeds, do not depend on order and are never revised."""

import math
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.sweep.pruning.arm_rules import Pruned, Verdicts, halve, judge, places
from fedsweep.sweep.space.settings import rungs

Values = dict[int, dict[int, float]]
Histories = dict[int, dict[int, dict[int, float]]]
T = TypeVar("T")
ROUNDS, ETA = 9, 2
MILESTONES = rungs(1, ETA, ROUNDS)


@st.composite
def tables(draw: st.DrawFn, highest: int = 12, seeds: tuple[int, int] = (1, 6)) -> Values:
    """Draw the values of arms by seed as small whole numbers, so that means are exact and ties occur."""
    arms, of_arm = draw(st.integers(2, 9)), draw(st.integers(*seeds))
    value = st.integers(0, highest).map(float)
    return {arm: {seed: draw(value) for seed in range(of_arm)} for arm in range(arms)}


@st.composite
def recordings(draw: st.DrawFn) -> Histories:
    """Draw the values of all rounds of all trials of a sweep."""
    shape = (draw(st.integers(2, 7)), draw(st.integers(1, 4)), ROUNDS)
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = source.integers(0, draw(st.sampled_from([3, 20, 1000])), shape).astype(float)
    return {
        arm: {seed: {step + 1: value for step, value in enumerate(trial)} for seed, trial in enumerate(of_arm)}
        for arm, of_arm in enumerate(values.tolist())
    }


places_of = st.integers(1, 6)
randoms = st.randoms(use_true_random=False)


def shuffled(order: Random, mapping: dict[int, T]) -> dict[int, T]:
    return {key: mapping[key] for key in order.sample(sorted(mapping), len(mapping))}


def verdicts(histories: Histories, **more: object) -> Verdicts[int]:
    return halve(histories, MILESTONES, ROUNDS, ETA, **more)  # type: ignore[arg-type]


def until(histories: Histories, rounds: dict[tuple[int, int], int]) -> Histories:
    """Return the records of a sweep in which each trial has run its number of `rounds`, keyed by (arm, seed)."""
    return {
        arm: {
            seed: {round: value for round, value in trial.items() if round <= rounds[arm, seed]}
            for seed, trial in trials.items()
        }
        for arm, trials in histories.items()
    }


# The decisions at one rung.


def test_an_arm_with_one_unlucky_seed_is_promoted_and_one_behind_with_every_seed_pruned() -> None:
    last = {0: 0.75, 1: 0.5, 2: 0.625}
    unlucky = {0: 0.8125, 1: 0.5625, 2: 0.125}
    worse = {0: 0.6875, 1: 0.4375, 2: 0.5625}  # a higher mean than that of `unlucky`
    pruned = judge({"best": {0: 0.9, 1: 0.9, 2: 0.9}, "last": last, "unlucky": unlucky, "worse": worse}, 2, 3)
    assert pruned == {"worse": Pruned(3, 3, behind=0.0625, behind_with=3)}


def test_from_five_seeds_on_one_lucky_seed_does_not_promote() -> None:
    seeds = range(5)
    lucky = {"best": dict.fromkeys(seeds, 0.5), "lucky": {seed: 0.25 + 0.5 * (seed == 0) for seed in seeds}}
    assert judge(lucky, 1, 3).keys() == {"lucky"}
    four = {arm: {seed: of_arm[seed] for seed in range(4)} for arm, of_arm in lucky.items()}
    assert judge(four, 1, 3) == {}


def test_no_more_tied_arms_are_promoted_than_there_are_places() -> None:
    values = {arm: {0: 1.0 + arm, 1: 9.0 - 2 * arm} for arm in range(4)}  # arm 0 has the best mean
    pruned = judge(values, 1, 3)
    assert pruned == {arm: Pruned(3, 2, behind=arm / 2, behind_with=1, closer=1) for arm in (2, 3)}
    assert pruned[3].sentence("loss/test") == (
        "1.5 below the last promoted arm after round 3 (worse with 1 of 2 seeds; 1 other tied arm was promoted)"
    )


@given(tables(seeds=(1, 1)), places_of)
def test_a_single_seed_gives_successive_halving(values: Values, on: int) -> None:
    """The reference computes the pruned arms by counting better arms instead of sorting."""
    column = np.array([of_seeds[0] for of_seeds in values.values()])
    ahead = (column[None, :] > column[:, None]).sum(axis=1)
    assert judge(values, on, 1).keys() == set(np.flatnonzero(ahead >= on).tolist())


@given(tables(), places_of, randoms)
def test_no_order_of_arms_or_seeds_decides(values: Values, on: int, order: Random) -> None:
    again = {arm: shuffled(order, of_seeds) for arm, of_seeds in shuffled(order, values).items()}
    assert judge(again, on, 1) == judge(values, on, 1)


@given(tables(), places_of, randoms)
def test_names_of_arms_and_seeds_do_not_matter(values: Values, on: int, order: Random) -> None:
    names = order.sample(range(100), len(values))
    seeds = order.sample(range(100), len(values[0]))
    renamed = {names[arm]: {seeds[seed]: value for seed, value in of.items()} for arm, of in values.items()}
    assert judge(renamed, on, 1) == {names[arm]: one for arm, one in judge(values, on, 1).items()}


@given(tables(), places_of, st.data())
def test_a_better_value_never_prunes_its_arm(values: Values, on: int, data: st.DataObject) -> None:
    arm = data.draw(st.sampled_from(sorted(values)))
    gains = data.draw(st.lists(st.integers(0, 6), min_size=len(values[arm]), max_size=len(values[arm])))
    better = {seed: value + gain for (seed, value), gain in zip(values[arm].items(), gains, strict=True)}
    if arm not in judge(values, on, 1):
        assert arm not in judge({**values, arm: better}, on, 1)


@given(tables(), places_of)
def test_an_arm_that_is_best_with_every_seed_is_never_pruned(values: Values, on: int) -> None:
    best = {seed: max(of[seed] for of in values.values()) for seed in values[0]}
    assert -1 not in judge({**values, -1: best}, on, 1)


@given(tables(), places_of, st.data())
def test_a_seed_that_is_easier_for_all_arms_changes_nothing(values: Values, on: int, data: st.DataObject) -> None:
    easier = {seed: data.draw(st.integers(-50, 50)) for seed in values[0]}
    moved = {arm: {seed: value + easier[seed] for seed, value in of.items()} for arm, of in values.items()}
    assert judge(moved, on, 1).keys() == judge(values, on, 1).keys()


@given(tables(highest=10**9), places_of)
def test_all_places_are_filled_and_at_most_as_many_tied_arms_are_promoted(values: Values, on: int) -> None:
    means = {arm: sum(of.values()) for arm, of in values.items()}
    if len(set(means.values())) == len(means):
        left = len(values) - len(judge(values, on, 1))
        assert min(on, len(values)) <= left <= 2 * on


def test_arms_of_different_seeds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="common seeds"):
        judge({"a": {0: 1.0}, "b": {1: 1.0}}, 1, 1)


# The decisions over all rungs.


def test_rungs_and_places_follow_the_reduction_factor() -> None:
    assert rungs(1, 2, 9) == [1, 2, 4, 8]
    assert rungs(2, 1.2, 6) == [2, 3, 4, 5]  # 2.4 and 2.88 are both rounded down to 2
    assert [places(20, 3, rung) for rung in range(3)] == [7, 3, 1]


@given(recordings(), randoms)
def test_decisions_are_never_revised(histories: Histories, order: Random) -> None:
    """In any order of arrival, a pruned arm stays pruned, and a promoted arm can only be pruned at a later rung."""
    final = verdicts(histories)
    assert not final.undecided
    for _ in range(5):
        rounds = {(arm, seed): order.randint(0, ROUNDS) for arm, trials in histories.items() for seed in trials}
        stage = verdicts(until(histories, rounds))
        assert stage.promoted.keys() | stage.undecided.keys() | stage.pruned.keys() == histories.keys()
        assert len(stage.promoted) + len(stage.undecided) + len(stage.pruned) == len(histories)
        assert stage.pruned.items() <= final.pruned.items()
        for arm, goal in stage.promoted.items():
            assert arm not in final.pruned or final.pruned[arm].round >= goal


@given(recordings(), randoms)
def test_verdicts_do_not_depend_on_their_order(histories: Histories, order: Random) -> None:
    rounds = {(arm, seed): order.randint(0, 3) for arm, trials in histories.items() for seed in trials}
    part = until(histories, rounds)
    assert verdicts({arm: shuffled(order, trials) for arm, trials in shuffled(order, part).items()}) == verdicts(part)


def test_the_number_of_places_depends_on_all_arms_so_that_tied_arms_are_not_all_promoted() -> None:
    """Each of four arms is far ahead on one of four seeds, so that all four arms are tied at every rung."""
    curve = {arm: {seed: 8.0 + 8 * (arm == seed) - arm / 16 for seed in range(4)} for arm in range(4)}
    histories = {
        arm: {seed: dict.fromkeys(range(1, ROUNDS + 1), v) for seed, v in of.items()} for arm, of in curve.items()
    }
    pruned = verdicts(histories).pruned
    assert {arm: one.round for arm, one in pruned.items()} == {3: 2, 2: 2}


@given(recordings())
def test_rounds_after_the_rung_at_which_an_arm_was_pruned_change_nothing(histories: Histories) -> None:
    final = verdicts(histories)
    ends = {
        (arm, seed): final.pruned[arm].round if arm in final.pruned else ROUNDS
        for arm, trials in histories.items()
        for seed in trials
    }
    assert verdicts(until(histories, ends)) == final


@given(recordings(), randoms, st.integers(1, 9), st.booleans())
def test_the_pruned_arms_do_not_depend_on_the_workers(
    histories: Histories, order: Random, workers: int, ahead_of_rungs: bool
) -> None:
    """Workers finish rounds in any order, and idle workers may run arms whose rung is not yet decided."""
    reached = {(arm, seed): 0 for arm, trials in histories.items() for seed in trials}
    running: dict[tuple[int, int], int] = {}
    while True:
        stage = verdicts(until(histories, reached))
        offers = [*stage.promoted.items(), *(stage.undecided.items() if ahead_of_rungs else ())]
        for arm, goal in offers:
            for seed in histories[arm]:
                free = (arm, seed) not in running and reached[arm, seed] < goal
                if free and len(running) < workers:
                    running[arm, seed] = goal
        if not running:
            break
        ended = order.choice(sorted(running))
        reached[ended] = running.pop(ended)
    final = verdicts(histories)
    assert stage == final
    for (arm, _), rounds in reached.items():
        assert rounds == ROUNDS or arm in final.pruned
        if arm in final.pruned and not ahead_of_rungs:
            assert rounds == final.pruned[arm].round


@given(recordings(), randoms)
def test_strata_are_judged_as_if_alone(histories: Histories, order: Random) -> None:
    strata = {arm: order.choice("abc") for arm in histories}
    together = verdicts(histories, strata=strata)
    for stratum in "abc":
        alone = verdicts({arm: trials for arm, trials in histories.items() if strata[arm] == stratum})
        assert {arm: one for arm, one in together.pruned.items() if strata[arm] == stratum} == alone.pruned


@given(recordings(), randoms)
def test_a_kept_arm_is_never_pruned_and_does_not_affect_the_others(histories: Histories, order: Random) -> None:
    kept = order.choice(sorted(histories))
    with_it = verdicts(histories, keep={kept})
    without = verdicts({arm: trials for arm, trials in histories.items() if arm != kept})
    assert with_it.pruned == without.pruned
    assert with_it.promoted[kept] == ROUNDS


@given(recordings(), randoms, st.booleans())
def test_an_arm_with_a_failed_seed_is_pruned_at_its_next_rung(histories: Histories, order: Random, nan: bool) -> None:
    arm, end = order.choice(sorted(histories)), order.randint(0, ROUNDS - 1)
    seed = order.choice(sorted(histories[arm]))
    torn = until(histories, {(a, s): end if (a, s) == (arm, seed) else ROUNDS for a in histories for s in histories[a]})
    if nan:
        torn[arm][seed] |= dict.fromkeys(range(end + 1, ROUNDS + 1), math.nan)
    stage = verdicts(torn, failed=() if nan else {(arm, seed)})
    assert not stage.undecided
    rung = next((milestone for milestone in MILESTONES if milestone > end), None)
    before = verdicts(histories).pruned.get(arm)
    if before is not None and (rung is None or before.round < rung):
        assert stage.pruned[arm] == before
    elif rung is not None:
        assert stage.pruned[arm] == Pruned(rung, len(histories[arm]), failed=(seed,))
    else:
        assert arm not in stage.pruned


def test_arms_that_decide_a_rung_run_first_and_promising_arms_run_in_advance() -> None:
    histories: Histories = {arm: {0: {1: float(arm)}, 1: {1: float(arm)}} for arm in range(8)}
    histories[0][1] = {}  # one trial has not yet reported a round
    stage = verdicts(histories, keep={3})
    assert list(stage.promoted.items()) == [(0, 1), (7, 2), (6, 2), (5, 2), (3, ROUNDS)]  # one of 4 places is open
    assert list(stage.undecided.items()) == [(4, 2), (2, 2), (1, 2)]
    histories[7] = {0: {1: 7.0, 2: 7.0}, 1: {1: 7.0, 2: 7.0}}
    assert list(verdicts(histories, keep={3}).undecided.items()) == [(7, 4), (4, 2), (2, 2), (1, 2)]
