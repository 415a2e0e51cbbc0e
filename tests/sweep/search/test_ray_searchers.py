"""The samples that Optuna proposes, which depend only on recorded results and not on workers or restarts."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from ray.tune.search import Searcher

from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, SweepStore, TrialPlan
from fedsweep.results.arms import Arm
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.pruning import trial_state
from fedsweep.sweep.search.proposals import Proposals
from fedsweep.sweep.search.ray_searchers import HalvedSamples, PlannedSearch, SampledSearch
from fedsweep.sweep.space.settings import ASHAScheduler
from fedsweep.types import ServerState
from tests.places import without_place
from tests.sweep.helpers import GRID, ROUNDS, SAMPLED, write_space

METRIC = "accuracy/mean"
SEARCH: dict[str, Any] = {"name": "tpe", "samples": 9, "startup": 3, "seed": 0, "in_flight": 3}
TWO = {
    "objective": {"metric": METRIC, "against": {"metric": "megabytes/sent"}},
    "scheduler": {"name": "none"},
}
Value = Callable[[dict[str, Any]], float]


def read(folder: Path, **changes: Any) -> Plan:
    write_space(folder, "tiny", {**SAMPLED, "search": SEARCH, **changes})
    return Plan.read("tiny", {}, {})


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    return read(tmp_path)


def search_in(folder: Path, plan: Plan) -> SampledSearch:
    sweep = SweepStore(folder)
    packing = Packing(0, 1, sweep)
    return SampledSearch(plan, sweep, lambda trial: sweep.trial(trial.key).plan(trial), packing)


def value_of(arm: dict[str, Any]) -> float:
    """Return a simulated accuracy, which is best at a learning rate of 0.05."""
    return 1 - abs(arm["optimizer.lr"] - 0.05)


def fate_of(arm: dict[str, Any]) -> tuple[str, int]:
    """Return the simulated outcome and the last round of a trial, which depend only on its arm."""
    digit = round(1e6 * arm["optimizer.lr"]) % 10
    return ("failed", 0) if digit == 0 else ("pruned", 1) if digit < 4 else ("finished", ROUNDS)


def end(
    folder: Path, suggestion: dict[str, Any], value: Value = value_of, fate: tuple[str, int] = ("finished", ROUNDS)
) -> None:
    """Write the files that a trial and the driver have written when the trial has ended."""
    outcome, rounds = fate
    trial = SweepStore(folder).trial(suggestion["trial"])
    sent = {"bytes/up": 1e6 * suggestion["optimizer.lr"], "bytes/down": 0.0}
    history = [RoundRecord(0, {METRIC: 0.1}, 1.0)]
    history += [
        RoundRecord(one, {METRIC: value(suggestion) * one / ROUNDS, **sent}, 1.0) for one in range(1, rounds + 1)
    ]
    save(trial.checkpoint, Checkpoint(rounds, ServerState({}, (0,)), tuple(history)))
    trial.end(Outcome(outcome=outcome, round=rounds))  # type: ignore[arg-type]


def play(
    folder: Path, plan: Plan, value: Value = value_of, fate: Callable[[dict[str, Any]], tuple[str, int]] = fate_of
) -> list[dict[str, Any]]:
    """Return all samples of a search, which are run one after the other with simulated values and outcomes."""
    search, arms = search_in(folder, plan), []
    while (suggestion := search.suggest(f"t{len(arms)}")) != Searcher.FINISHED:
        assert isinstance(suggestion, dict)
        end(folder, suggestion, value, fate(suggestion))
        search.on_trial_complete(f"t{len(arms)}", {})
        arms.append(suggestion)
    return arms


@pytest.mark.parametrize("changes", [{}, TWO], ids=["one objective", "two objectives"])
def test_proposals_do_not_depend_on_workers_or_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = read(tmp_path, **changes)
    fate = fate_of if not changes else lambda arm: ("finished", ROUNDS)
    expected = play(tmp_path / "expected", plan, fate=fate)
    assert len({one["optimizer.lr"] for one in expected}) == SEARCH["samples"]

    # Each example is a whole sweep, so shrinking a failing example would take minutes.
    @settings(
        max_examples=4,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=9, max_size=9))
    def check(workers: int, ends: list[tuple[int, bool]]) -> None:
        """Start trials on all idle workers, end one trial and possibly restart the driver, for each of `ends`."""
        folder = tmp_path / "any"
        shutil.rmtree(folder, ignore_errors=True)
        search, running, names = search_in(folder, plan), dict[str, Any](), iter(range(10**6))
        for which, killed in ends:
            while len(running) < workers and isinstance(got := search.suggest(name := f"t{next(names)}"), dict):
                running[name] = got
            assert running, "no trial is running and none is proposed"
            name = list(running)[which % len(running)]
            one = running.pop(name)
            end(folder, one, fate=fate(one))
            search.on_trial_complete(name, {})
            if killed:  # the new driver proposes the other running trials again
                search, running = search_in(folder, plan), {}
        assert search.suggest("one more") == Searcher.FINISHED
        assert [trial.plan.arm for trial in SweepStore(folder).trials()] == [arm_of(one) for one in expected]

    check()


def play_halved(folder: Path, plan: Plan, workers: int, chance: random.Random, kills: bool = True) -> list[Any]:
    """Run a search with the scheduler asha on workers of random speed, whose driver is killed and restarted by chance.

    Return the arm and the outcome of each sample.
    """
    scheduler, sweep = plan.space.scheduler, SweepStore(folder)
    assert isinstance(scheduler, ASHAScheduler)
    names, running, search = iter(range(10**6)), dict[str, Any](), None
    while True:
        if search is None or (kills and chance.random() < 0.1):
            state = trial_state.TrialState(plan, scheduler, sweep, [trial.plan for trial in sweep.trials()])
            announce, packing = (lambda trial: sweep.trial(trial.key).plan(trial)), Packing(0, 1, sweep)
            search, running = HalvedSamples(plan, sweep, state, announce, packing), {}
        while len(running) < workers and isinstance(got := search.suggest(name := f"t{next(names)}"), dict):
            running[name] = got
        if not running:
            return [(trial.plan.arm, trial.outcome) for trial in sweep.trials()]
        name = chance.choice(sorted(running))
        trial, one = sweep.trial(running[name]["trial"]), running[name]
        last = len(trial.recorded())  # the next round
        values = [METRIC, value_of(one) + 0.01 * (round(1e6 * one["optimizer.lr"]) % 7)]
        history = [RoundRecord(number, {values[0]: number * values[1]}, 1.0) for number in range(last + 1)]
        save(trial.checkpoint, Checkpoint(last, ServerState({}, (0,)), tuple(history)))
        state.refresh(trial.folder.name)
        for key in state.changed():
            if (outcome := state.outcome(key)) is not None:
                sweep.trial(key).end(outcome)
        if last == ROUNDS or not state.may_continue(trial.folder.name):
            search.on_trial_complete(name, {})
            del running[name]


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_halved_samples_do_not_depend_on_workers_or_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = SEARCH if search == "tpe" else {"name": "random", "samples": SEARCH["samples"], "seed": 0}
    plan = read(tmp_path, search=given)
    expected = play_halved(tmp_path / "expected", plan, 1, random.Random(0), kills=False)
    assert {outcome.outcome for _, outcome in expected} == {"finished", "pruned"}
    for seed, workers in enumerate((1, 2, 3, 5, 9)):
        assert play_halved(tmp_path / str(seed), plan, workers, random.Random(seed)) == expected
    shutil.rmtree(sorted((tmp_path / "0" / "trials").iterdir())[4])
    assert play_halved(tmp_path / "0", plan, 2, random.Random(0)) == expected


def test_a_sample_whose_folder_was_deleted_is_drawn_and_run_again(tmp_path: Path, plan: Plan) -> None:
    expected = play(tmp_path / "sweep", plan)
    before = SweepStore(tmp_path / "sweep").trials()
    shutil.rmtree(SweepStore(tmp_path / "sweep").trial(expected[4]["trial"]).folder)
    assert play(tmp_path / "sweep", plan) == [expected[4]]
    assert SweepStore(tmp_path / "sweep").trials() == before


def arm_of(suggestion: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in suggestion.items() if name not in ("trial", "seed", "until", "gpus")}


@pytest.mark.parametrize("changes", [{}, TWO], ids=["one objective", "two objectives"])
def test_a_sample_is_proposed_from_the_results_of_all_but_those_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """If three samples may be in flight, sample 12 depends on the results of samples 0 to 9 but not of 10 and 11."""
    monkeypatch.chdir(tmp_path)
    sampled = read(tmp_path, **changes)
    proposals = Proposals(sampled.space, sampled.tentative)
    rates = [0.001 * 300 ** (place / 12) for place in range(12)]
    arms: list[Arm] = [
        {"optimizer.lr": rate, "lora.position": ("l0", "both")[place % 2]} for place, rate in enumerate(rates)
    ]

    def proposed(best: int) -> Arm:
        values = [2.0 if place == best else 1 / (place + 1) for place in range(10)]
        results = {
            place: proposals._frozen(arms[place], TrialState.COMPLETE, values=(value, -value) if changes else (value,))
            for place, value in enumerate(values)
        }
        return proposals.arm(12, arms, results)

    assert proposals.needed(12) == range(10)
    found = [proposed(best) for best in range(10)]
    assert len({json.dumps(one) for one in found}) >= 6
    arms[11] = found[9]  # the estimator avoids samples that are still running
    assert proposed(9) != found[9]


def test_at_most_in_flight_samples_run_in_parallel(tmp_path: Path, plan: Plan) -> None:
    search = search_in(tmp_path / "a", plan)
    out: list[Any] = [search.suggest(f"t{number}") for number in range(5)]
    assert [one is None for one in out] == [False, False, False, True, True]
    end(tmp_path / "a", out[1])
    search.on_trial_complete("t1", {})
    assert search.suggest("sample 3 needs the result of sample 0") is None
    end(tmp_path / "a", out[0])
    search.on_trial_complete("t0", {})
    assert isinstance(search.suggest("sample 3"), dict)
    assert isinstance(search.suggest("sample 4"), dict)
    assert search.suggest("sample 5 needs that of sample 2") is None


def test_random_samples_never_wait_and_equal_the_startup_samples_of_tpe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = {"name": "random", "samples": 6, "seed": 0}
    searches = [random, {**random, "name": "tpe", "startup": 6, "in_flight": 1}]
    drawn = []
    for number, one in enumerate(searches):
        search = search_in(tmp_path / str(number), read(tmp_path, search=one))
        drawn.append([arm_of(search.suggest(str(place))) for place in range(6)])  # type: ignore[arg-type]
        assert search.suggest("while all are out") is None
    assert drawn[0] == drawn[1]
    assert len({one["optimizer.lr"] for one in drawn[0]}) == 6


def test_a_search_continues_after_failures(tmp_path: Path, plan: Plan) -> None:
    arms = play(tmp_path / "a", plan, fate=lambda arm: ("failed", 0))
    assert len({one["optimizer.lr"] for one in arms}) == SEARCH["samples"]


def test_a_lost_trial_is_proposed_again(tmp_path: Path, plan: Plan) -> None:
    search = search_in(tmp_path / "a", plan)
    first = search.suggest("t0")
    assert search.suggest("t1") != first
    search.on_trial_complete("t0", error=True)
    assert search.suggest("t2") == first


def test_the_estimator_gets_the_outcome_of_each_trial(tmp_path: Path, plan: Plan) -> None:
    search, folder = search_in(tmp_path / "a", plan), tmp_path / "a"
    fates = [("finished", ROUNDS), ("pruned", 1), ("failed", 0)]
    for number, fate in enumerate(fates):
        suggestion: Any = search.suggest(f"t{number}")
        end(folder, suggestion, fate=fate)
    whole, pruned, failed = (
        Proposals(plan.space, plan.tentative).result(trial) for trial in SweepStore(folder).trials()
    )
    assert [one.state for one in (whole, pruned, failed)] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert whole.value == SweepStore(folder).trials()[0].history[-1].metrics[METRIC]
    assert sorted(pruned.intermediate_values) == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_trial_without_a_finite_objective_counts_as_failed(tmp_path: Path, plan: Plan, value: float) -> None:
    search, folder = search_in(tmp_path / "a", plan), tmp_path / "a"
    suggestion: Any = search.suggest("t")
    end(folder, suggestion, lambda arm: value)
    assert Proposals(plan.space, plan.tentative).result(SweepStore(folder).trials()[0]).state == TrialState.FAIL


def test_a_second_objective_steers_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples have the same first objective, and the second objective grows with the learning rate."""
    monkeypatch.chdir(tmp_path)
    means = {}
    for mode in ("min", "max"):
        objective = {"metric": METRIC, "against": {"metric": "megabytes/sent", "mode": mode}}
        plan = read(tmp_path, **{**TWO, "objective": objective, "search": {**SEARCH, "samples": 20, "in_flight": 1}})
        arms = play(tmp_path / mode, plan, lambda arm: 0.5, lambda arm: ("finished", ROUNDS))
        means[mode] = sum(one["optimizer.lr"] for one in arms[10:]) / 10
    assert 3 * means["min"] < means["max"]


def test_first_points_are_tried_first_and_completed_by_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = [{"optimizer.lr": 0.05, "lora.position": "l0"}, {"lora.position": "both"}, {"optimizer.lr": 0.1}]
    plan = read(tmp_path, search={**SEARCH, "first": first})
    arms = [arm_of(one) for one in play(tmp_path / "a", plan)]
    assert len(arms) == SEARCH["samples"]
    assert arms[0] == first[0]
    assert [one["lora.position"] for one in arms[:2]] == ["l0", "both"]
    assert arms[2]["optimizer.lr"] == 0.1
    assert len({one["optimizer.lr"] for one in arms}) == SEARCH["samples"]


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (
            [{"optimizer.lrr": 0.1}],
            "`search.first.0` sets `optimizer.lrr`, which `space` does not vary; did you mean `optimizer.lr`?",
        ),
        (
            [{"optimizer.lr": 0.5}],
            "`optimizer.lr` in `search.first.0` must be a number from 0.001 to 0.3, but it is 0.5.",
        ),
        ([{}], "`search.first.0` must have a value for at least one axis, but it is empty."),
        ([{"lora.position": "l1"}], "`lora.position` in `search.first.0` must be one of l0, both, but it is l1."),
        ([{"lora.position": "l0"}] * 10, "`search.first` has 10 points, but `search.samples` allows only 9."),
    ],
)
def test_first_points_outside_the_axes_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        read(tmp_path, search={**SEARCH, "first": first})
    assert without_place(str(refusal.value)) == sentence


def test_a_first_point_with_an_invalid_run_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two values is within its axis, but the two values are invalid together."""
    monkeypatch.chdir(tmp_path)
    space = {"lora.rank": {"integer": [1, 8]}, "method": {"choice": ["fedra", "inclusivefl"]},
             "aggregation.lora": {"choice": ["factors", "product_svd"]}}  # fmt: skip
    first = [{"method": "inclusivefl", "aggregation.lora": "product_svd"}]
    with pytest.raises(UserError, match=r"`method\.beta` must be 0 if `aggregation\.lora` is product_svd"):
        read(tmp_path, space=space, search={**SEARCH, "first": first})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {**TWO, "scheduler": SAMPLED["scheduler"]},
            "`objective.against` megabytes/sent needs `scheduler` none, but it is asha, which prunes by a single "
            "objective.",
        ),
        (
            {**TWO, "objective": {"metric": METRIC, "against": {"metric": METRIC}}},
            "`objective.against.metric` must differ from `objective.metric`, but both are accuracy/mean.",
        ),
        (
            {**TWO, "objective": {"metric": METRIC, "against": {"metric": "megabytes/snt"}}},
            "`objective.against.metric` megabytes/snt is not reported by this run; "
            "did you mean `megabytes/sent` or `bytes/down`?",
        ),
    ],
)
def test_invalid_pairs_of_objectives_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        read(tmp_path, **changes)
    assert without_place(str(refusal.value)) == sentence


def test_choices_may_be_lists_and_whole_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choices = {
        "federation.depths": {"choice": [[12, 10, 8, 6, 4, 3], [6, 6, 6, 6, 6, 6]]},
        "method": {"choice": ["all_small", {"name": "fedra", "missing_layers": "ensure_cover"}]},
        "local.steps": {"choice": [1, "epoch"]},
    }
    plan = read(tmp_path, space=choices, fixed={}, search={"name": "random", "samples": 12})
    search = search_in(tmp_path / "a", plan)
    arms = [search.suggest(str(number)) for number in range(12)]
    for name, axis in choices.items():
        seen = {json.dumps(arm[name], sort_keys=True) for arm in arms}  # type: ignore[index]
        assert seen == {json.dumps(value, sort_keys=True) for value in axis["choice"]}


def test_global_random_generators_are_not_used(tmp_path: Path, plan: Plan) -> None:
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    play(tmp_path / "a", plan)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_samples_wait_for_the_memory_measurement_and_do_not_change(plan: Plan, tmp_path: Path) -> None:
    expected = play(tmp_path / "expected", plan)
    sweep = SweepStore(tmp_path / "packed")
    packing = Packing("auto", 4, sweep, apart=False)
    search = SampledSearch(plan, sweep, lambda trial: sweep.trial(trial.key).plan(trial), packing)
    probe: Any = search.suggest("probe")
    assert (arm_of(probe), probe["until"], probe["gpus"]) == (arm_of(expected[0]), 1, 1.0)
    assert search.suggest("too early") is None
    search.on_trial_complete("probe", {"round": 1, "memory/peak": 400, "memory/total": 1000})
    arms: list[Any] = []
    while (suggestion := search.suggest(f"t{len(arms)}")) != Searcher.FINISHED:
        assert isinstance(suggestion, dict)
        assert (suggestion["until"], suggestion["gpus"]) == (ROUNDS, 0.5)
        end(sweep.folder, suggestion, fate=fate_of(suggestion))
        search.on_trial_complete(f"t{len(arms)}", {"round": ROUNDS, "memory/peak": 400, "memory/total": 1000})
        arms.append(suggestion)
    assert [arm_of(one) for one in arms] == [arm_of(one) for one in expected]


def test_a_planned_search_proposes_its_trials_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "grid", GRID)
    trials = Plan.read("grid", {}, {}).grid()
    announced: list[TrialPlan] = []
    sweep = SweepStore(tmp_path / "sweep")
    search = PlannedSearch(sweep, trials, ROUNDS, announced.append, Packing(0, 1, sweep))
    suggestions: list[Any] = [search.suggest(str(number)) for number in range(5)]
    assert suggestions[4] is None  # running trials may be lost and proposed again
    for number in (3, 2, 0, 1):
        if number in (0, 3):  # the workers of the other trials were lost
            sweep.trial(trials[number].key).end(Outcome(outcome="finished", round=ROUNDS))
        search.on_trial_complete(str(number), {"round": ROUNDS}, error=number in (1, 2))
    assert [search.suggest("4"), search.suggest("5")] == suggestions[1:3]
    for number in (1, 2):
        sweep.trial(trials[number].key).end(Outcome(outcome="finished", round=ROUNDS))
        search.on_trial_complete(str(number + 3), {"round": ROUNDS})
    assert search.suggest("6") == Searcher.FINISHED
    assert announced == [*trials, *trials[1:3]]
    assert suggestions[0] == {"trial": trials[0].key, "lora.rank": 1, "seed": 0, "until": ROUNDS, "gpus": 0.0}
    assert optuna.logging.get_verbosity() >= optuna.logging.WARNING
