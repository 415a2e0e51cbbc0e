"""Seeds until decided: the trials that run, and the verdicts, for any workers, order of arrival and restart."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.seeds_until_decided import seeds_that_count, sequential_verdicts
from fedsweep.results import Outcome, TrialPlan, TrialRecord
from fedsweep.results.arms import identity
from fedsweep.results.declared_comparisons import Declared, DeclaredComparison, Pair
from fedsweep.results.history import RoundRecord
from fedsweep.results.seeds import UntilDecided
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.space.settings import Goal
from tests.report.conftest import make_manifest

ROUNDS, METRIC = 2, "accuracy/mean"
BASELINE = {"lora.rank": 8}
RANKS = (8, 4, 1)


def pair(rank: int, other: int) -> Pair:
    return Pair(identity({"lora.rank": rank}), identity({"lora.rank": other}), METRIC)


class Trial:
    """A trial on a made-up disk, whose rounds are recorded up to `round`."""

    def __init__(self, key: str, end: float, diverges: bool) -> None:
        self.key, self.end_value, self.diverges, self.round, self.planned = key, end, diverges, -1, False
        self.ended: Outcome | None = None

    def recorded(self) -> list[RoundRecord]:
        values = [0.2, 0.3, self.end_value]
        return [RoundRecord(number, {METRIC: values[number]}, 1.0) for number in range(self.round + 1)]

    def outcome(self) -> Outcome | None:
        return self.ended

    def error(self) -> None:
        return None


class Folder:
    """The made-up results of a sweep: `ends[rank][n]` is the objective of seed `until.first` + n after its last round.

    The trials in `broken`, which are pairs of rank and n, diverge.
    """

    baseline: dict[str, int] | None = BASELINE
    comparisons: Declared = ()

    def __init__(self, ends: dict[int, list[float]], until: UntilDecided, broken: Any = ()) -> None:
        self.plans = [
            TrialPlan(key=f"{rank}-{seed}", number=number, arm={"lora.rank": rank}, seed=seed, config={})
            for number, (seed, rank) in enumerate((seed, rank) for seed in until.seeds for rank in ends)
        ]
        places = {one.key: (one.arm["lora.rank"], one.seed - until.first) for one in self.plans}
        self.trials = {key: Trial(key, ends[rank][at], (rank, at) in broken) for key, (rank, at) in places.items()}

    def trial(self, key: str) -> Trial:
        return self.trials[key]

    def records(self) -> list[TrialRecord]:
        found = ((plan, self.trials[plan.key]) for plan in self.plans)
        return [TrialRecord(plan, one.ended, one.recorded()) for plan, one in found if one.planned]


def state_of(folder: Folder, until: UntilDecided, mode: str = "max") -> SeedState:
    goal = Goal(METRIC, mode, None)  # type: ignore[arg-type]
    space = SimpleNamespace(goal=goal, baseline=folder.baseline, comparisons=folder.comparisons)
    plan: Any = SimpleNamespace(space=space, base=SimpleNamespace(federation=SimpleNamespace(rounds=ROUNDS)))
    return SeedState(plan, until, folder, folder.plans)  # type: ignore[arg-type]


def play(folder: Folder, until: UntilDecided, workers: int, chance: random.Random, restart: float = 0.0) -> SeedState:
    """Run the trials that the state requests on workers of random speed, with restarts of the driver."""
    state, running = state_of(folder, until), list[str]()
    for _ in range(10_000):
        if chance.random() < restart:
            state, running = state_of(folder, until), []
        waiting = [key for key, round in state.wanted() if key not in running and round == ROUNDS]
        while waiting and len(running) < workers:
            running.append(waiting.pop(0))
            folder.trial(running[-1]).planned = True
        if not running:
            return state
        trial = folder.trial(key := chance.choice(running))
        if trial.diverges and trial.round == 0:
            trial.ended = Outcome(outcome="diverged", round=0)
            state.record_error(key, trial.ended)
        else:
            trial.round += 1
            if trial.round == ROUNDS:
                state.refresh(key)
        if trial.ended or trial.round == ROUNDS or state.stops(key, trial.round):
            running.remove(key)
            state.refresh(key)
        for one in folder.trials.values():
            if one.planned and (outcome := state.outcome(one.key)) is not None:
                one.ended = outcome
    raise AssertionError("the sweep did not end")


def table_of(folder: Folder, until: UntilDecided) -> list[tuple[Any, ...]]:
    """Return what the report shows of each arm."""
    own = {"baseline": folder.baseline, "comparisons": folder.comparisons}
    manifest = make_manifest(until_decided=until, seeds=until.seeds, rounds=ROUNDS, trials=None, **own)
    arms = summarise(manifest, folder.records())
    return [(one.key, one.n, one.mean, one.interval, one.comparison, one.declared) for one in arms]


def compare(rank: int, other: int) -> DeclaredComparison:
    return DeclaredComparison(arm={"lora.rank": rank}, against={"lora.rank": other})


FAMILIES = st.sampled_from([
    (BASELINE, ()), (BASELINE, "all"), (BASELINE, (compare(8, 1),)), (BASELINE, (compare(1, 4),)), (None, "all"),
    (None, (compare(1, 4), compare(8, 4))),
])  # fmt: skip
"""Baselines and declared comparisons, so that each arm takes part in a comparison."""
ENDS = st.lists(st.integers(0, 40), min_size=8, max_size=8).map(lambda found: [0.5 + value / 500 for value in found])
UNTIL = st.builds(
    UntilDecided, at_least=st.integers(2, 5), at_most=st.just(8), smallest_effect=st.sampled_from([None, 1.0, 4.0]),
    first=st.sampled_from([0, 0, 5]),
)  # fmt: skip


@given(
    st.tuples(ENDS, ENDS, ENDS), UNTIL, st.integers(1, 5), st.integers(0, 9),
    st.sets(st.tuples(st.sampled_from(RANKS), st.integers(0, 7)), max_size=3), FAMILIES,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_table_does_not_depend_on_workers_order_or_restarts(curves, until, workers, seed, broken, family):
    ends = dict(zip(RANKS, curves, strict=True))
    alone, together = Folder(ends, until, broken), Folder(ends, until, broken)
    for folder in (alone, together):
        folder.baseline, folder.comparisons = family
    first = play(alone, until, 1, random.Random(0))
    second = play(together, until, workers, random.Random(seed), restart=0.05)
    assert first.verdicts == second.verdicts
    assert repr(table_of(alone, until)) == repr(table_of(together, until))  # repr, because NaN is not equal to itself
    assert all(one.verdict != "open" for one in second.verdicts.values())
    assert {trial.round for trial in alone.trials.values() if trial.ended and trial.ended.outcome == "finished"} == {2}
    counted = seeds_that_count(until, second.verdicts)
    for plan in together.plans:
        if (ended := together.trial(plan.key).ended) is not None and ended.outcome in ("finished", "pruned"):
            assert ended.counts == (plan.seed - until.first < counted[identity(plan.arm)])


@given(st.tuples(ENDS, ENDS, ENDS), UNTIL, st.integers(1, 4), FAMILIES)
@settings(max_examples=30, deadline=None)
def test_few_seeds_run_that_are_not_needed(curves, until, workers, family):
    """At most the next seed of each arm runs in advance, and with one worker at most one trial does."""
    folder = Folder(dict(zip(RANKS, curves, strict=True)), until)
    folder.baseline, folder.comparisons = family
    state = play(folder, until, workers, random.Random(1))
    counted = seeds_that_count(until, state.verdicts)
    for plan in folder.plans:
        if folder.trial(plan.key).planned:
            assert plan.seed - until.first <= counted[identity(plan.arm)]
    surplus = [one for one in folder.trials.values() if one.ended and one.ended.outcome == "pruned"]
    assert len(surplus) <= workers
    assert all(one.ended.reason == "its comparison was decided without this seed" for one in surplus)


@given(st.tuples(ENDS, ENDS, ENDS), UNTIL, FAMILIES)
@settings(max_examples=20, deadline=None)
def test_other_seeds_with_the_same_results_give_the_same_table(curves, until, family):
    shifted = until.model_copy(update={"first": until.first + 100})
    tables = []
    for rule in (until, shifted):
        folder = Folder(dict(zip(RANKS, curves, strict=True)), rule)
        folder.baseline, folder.comparisons = family
        play(folder, rule, 2, random.Random(3))
        tables.append([one[:-2] for one in table_of(folder, rule)])
        compared = [
            one for row in table_of(folder, rule) for one in (row[4], *(test.comparison for test in row[5])) if one
        ]
        tables[-1] += [(one.sequential, [seed - rule.first for seed in one.seeds]) for one in compared]
    assert repr(tables[0]) == repr(tables[1])
    assert any(seeds for _, seeds in tables[0][len(RANKS) :])


def test_arms_stop_as_soon_as_they_are_decided_and_the_baseline_goes_on():
    until = UntilDecided(at_least=4, at_most=8)
    noise = [0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002]
    ends = {8: [0.5] * 8, 4: [0.7 + one for one in noise], 1: [0.5 + 20 * one for one in noise]}
    folder = Folder(ends, until)
    state = play(folder, until, 2, random.Random(0))
    rank_4, rank_1 = (state.verdicts[pair(rank, 8)] for rank in (4, 1))
    assert (rank_4.verdict, rank_4.seeds) == ("higher", 4)
    assert rank_1.verdict in ("out of reach", "open at the limit")
    table = {one[0]: one for one in table_of(folder, until)}
    assert table[identity({"lora.rank": 4})][1] == 4
    assert table[identity(BASELINE)][1] == rank_1.seeds
    comparison = table[identity({"lora.rank": 4})][4]
    assert (comparison.verdict, comparison.p, comparison.p_holm) == ("higher", None, None)
    assert comparison.interval == rank_4.judged_interval


def test_arms_with_equal_differences_run_up_to_the_limit():
    until = UntilDecided(at_least=2, at_most=5)
    folder = Folder({8: [0.5] * 5, 4: [0.75] * 5}, until)
    state = play(folder, until, 2, random.Random(0))
    assert {trial.round for trial in folder.trials.values()} == {ROUNDS}
    said = "difference +25.00 points on each of 5 seeds, so no test is possible"
    assert state_of(folder, until).verdicts == state.verdicts
    assert state.news() == [f"Undecided after 5 seeds: rank 4 is open at the limit ({said})."]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_higher_means_a_larger_value_even_if_smaller_values_are_better(mode):
    until = UntilDecided(at_least=3, at_most=4)
    folder = Folder({8: [0.5, 0.51, 0.5, 0.51], 4: [0.9, 0.92, 0.91, 0.93]}, until)
    state = state_of(folder, until, mode)
    assert state.open_comparisons() == ["Open after 0 seeds: rank 4"]
    for trial in (folder.trial(plan.key) for plan in folder.plans if plan.seed == 0):
        trial.planned, trial.round = True, ROUNDS
        state.refresh(trial.key)
    assert state.open_comparisons() == ["Open after 1 seed: rank 4 (difference +40.00 points)"]
    for trial in folder.trials.values():
        trial.planned, trial.round = True, ROUNDS
        state.refresh(trial.key)
    assert state.verdicts[pair(4, 8)].verdict == "higher"
    assert state.news()[0].startswith("Decided after 3 seeds: rank 4 is higher (difference +40.")
    assert state.news() == []
    assert state.wanted() == []
    assert state.open_comparisons() == []
    assert state_of(folder, until, mode).news() == []  # an earlier session has told it


def test_a_seed_counts_only_if_its_trials_have_ended_in_both_arms():
    until = UntilDecided(at_least=2, at_most=5)
    values = {"a": {0: 0.1, 1: 0.2, 3: 0.3}, "b": {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.1}}
    verdicts = sequential_verdicts(until, METRIC, values, [one := Pair("a", "b", METRIC)])
    assert (verdicts[one].verdict, verdicts[one].seeds) == ("open", 2)
    assert seeds_that_count(until, verdicts) == {"a": 5, "b": 5}


NOISE = [0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002]


def test_an_arm_runs_as_long_as_one_of_its_comparisons_is_open():
    """Ranks 4 and 1 are soon far above rank 8. They are alike, so the comparison between the two takes longer."""
    until = UntilDecided(at_least=4, at_most=8)
    folder = Folder({8: [0.5] * 8, 4: [0.7 + one for one in NOISE], 1: [0.7 + 20 * one for one in NOISE]}, until)
    folder.comparisons = (compare(1, 4),)
    state = play(folder, until, 2, random.Random(0))
    seeds = {one[:2]: verdict.seeds for one, verdict in state.verdicts.items()}
    assert [*state.verdicts] == [pair(1, 8), pair(4, 8), pair(1, 4)]
    assert [one.verdict for one in state.verdicts.values()][:2] == ["higher", "higher"]
    assert seeds[pair(4, 8)[:2]] == seeds[pair(1, 8)[:2]] == 4 < seeds[pair(1, 4)[:2]]
    _, _, (*_, comparison, _) = rows = table_of(folder, until)
    assert [row[1] for row in rows] == [seeds[pair(1, 4)[:2]]] * 2 + [4]  # ranks 1, 4 and 8
    assert comparison is None
    for row in rows[:2]:  # each comparison has the seeds up to its own look
        assert row[4].seeds == (0, 1, 2, 3)
        assert row[4].tests == 3
    (declared,) = rows[0][5]
    assert len(declared.comparison.seeds) == seeds[pair(1, 4)[:2]]
    assert declared.comparison.difference == state.verdicts[pair(1, 4)].difference
    assert not declared.with_baseline


def test_news_name_both_arms_of_a_comparison_without_the_baseline():
    until = UntilDecided(at_least=3, at_most=4, smallest_effect=1.0)
    folder = Folder({8: [0.5, 0.51, 0.5, 0.51], 4: [0.9, 0.92, 0.91, 0.93], 1: [0.9001, 0.9199, 0.9102, 0.93]}, until)
    folder.comparisons = "all"
    state = state_of(folder, until)
    assert [f"Open after 0 seeds: rank {one}" for one in ("1", "4", "4 against 1")] == state.open_comparisons()
    for trial in folder.trials.values():
        trial.planned, trial.round = True, ROUNDS
        state.refresh(trial.key)
    *_, last = state.news()
    assert last == "Decided after 3 seeds: rank 4 against 1: within \u00b11 (difference -0.01 points)."
    assert state.verdicts.keys() == {pair(1, 8), pair(4, 8), pair(4, 1)}
