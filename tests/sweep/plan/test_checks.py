"""The checks of a whole search space, such as its conditions, which run before a sweep starts."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.cli.output import plan_table, result_console
from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, SweepStore
from fedsweep.results.arms import identity
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.resolved_space import WrongArm, causes
from fedsweep.sweep.search.ray_searchers import SampledSearch
from fedsweep.types import ServerState
from tests.places import without_place
from tests.sweep.helpers import GRID, SAMPLED, write_space

METHODS: dict[str, Any] = {
    "lora.dropout": {"uniform": [0.0, 0.5], "step": 0.05},
    "method.missing_layers": {"choice": ["keep_previous", "ensure_cover"], "when": {"method.name": "fedra"}},
    "method": {"choice": ["fedra", {"name": "all_small", "depth": 2}, "inclusivefl"]},
    "method.beta": {"uniform": [0.0, 0.5], "when": {"method.name": "inclusivefl"}},
    "method.depth": {"loginteger": [1, 3], "when": {"method.name": "all_small"}},
}
GRIDDED: dict[str, Any] = {
    "method": {"grid": ["fedra", "all_small", "inclusivefl"]},
    "method.beta": {"grid": [0.1, 0.2], "when": {"method.name": "inclusivefl"}},
    "lora.rank": {"grid": [2, 4]},
}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(file: dict[str, Any], changes: dict[str, Any] | None = None, **options: Any) -> Plan:
        write_space(tmp_path, "mine", file)
        return Plan.read("mine", changes or {}, options)

    return make


def sampled(space: dict[str, Any], **entries: Any) -> dict[str, Any]:
    fixed = {name: value for name, value in GRID["fixed"].items() if name not in space}
    return {**SAMPLED, "fixed": fixed, "space": space, **entries}


def grid(space: dict[str, Any], **entries: Any) -> dict[str, Any]:
    return {**GRID, "space": space, "baseline": None, **entries}


def refusal(read: Any, file: dict[str, Any], **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(file, **options)
    return without_place(str(refused.value))


def test_a_grid_with_conditions_has_no_duplicate_arms(read):
    plan = read(grid(GRIDDED, baseline={"method": "fedra"}))
    shown = [(one["method"], one.get("method.beta"), one["lora.rank"]) for one in plan.arms]
    assert shown == [
        *(("fedra", None, rank) for rank in (2, 4)),
        *(("all_small", None, rank) for rank in (2, 4)),
        *(("inclusivefl", beta, rank) for beta in (0.1, 0.2) for rank in (2, 4)),
    ]
    assert len({trial.key for trial in plan.grid()}) == plan.num_trials == 16
    for arm, config in plan.configs:
        assert flat(config).get("method.beta") == arm.get("method.beta")


def search_in(folder: Path, plan: Plan) -> SampledSearch:
    sweep = SweepStore(folder)
    return SampledSearch(plan, sweep, lambda trial: sweep.trial(trial.key).plan(trial), Packing(0, 1, sweep))


def end(folder: Path, suggested: dict[str, Any]) -> None:
    """Write the files that a finished trial and the driver leave on disk."""
    trial, value = SweepStore(folder).trial(suggested["trial"]), suggested.get("lora.dropout", 0.5)
    history = tuple(RoundRecord(round, {"accuracy/mean": value}, 1.0) for round in range(4))
    save(trial.checkpoint, Checkpoint(3, ServerState({}, (0,)), history))
    trial.end(Outcome(outcome="finished", round=3))


def test_samples_have_only_active_values_and_are_valid(read, tmp_path):
    plan = read(sampled(METHODS, search={"name": "tpe", "samples": 30, "startup": 8, "seed": 0}))
    search = search_in(tmp_path / "sweep", plan)
    arms = []
    for number in range(30):
        suggested: Any = search.suggest(str(number))
        arms.append(
            {name: value for name, value in suggested.items() if name not in ("trial", "seed", "until", "gpus")}
        )
        end(tmp_path / "sweep", suggested)
        search.on_trial_complete(str(number), {})
    own = {"fedra": "method.missing_layers", "all_small": "method.depth", "inclusivefl": "method.beta"}
    for arm in arms:
        name = arm["method"] if isinstance(arm["method"], str) else arm["method"]["name"]
        assert set(arm) == {"lora.dropout", "method", own[name]}
        assert flat(plan.resolve(arm, 0))["method.name"] == name
    assert len({identity(arm["method"]) for arm in arms}) == 3
    assert {arm["lora.dropout"] for arm in arms} <= {round(place * 0.05, 2) for place in range(11)}


def test_a_reopened_search_with_conditions_and_steps_continues_with_the_same_trials(read, tmp_path):
    """Sampled values are rounded to exact steps, and a reopened search finds its trials by these values."""
    plan = read(sampled(METHODS, search={"name": "random", "samples": 12, "seed": 0}))

    def keys(folder: str, stops: set[int]) -> list[str]:
        search, found = search_in(tmp_path / folder, plan), []
        for number in range(12):
            if number in stops:
                search.suggest("left running")
                search = search_in(tmp_path / folder, plan)
            suggested: Any = search.suggest(str(number))
            found.append(suggested["trial"])
            end(tmp_path / folder, suggested)
            search.on_trial_complete(str(number), {})
        return found

    assert keys("stopped", {2, 7}) == keys("whole", set())


def test_conditions_use_the_experiments_value_if_an_axis_is_inactive(read):
    axes = {
        "base_optimizer": {"grid": ["fedavg", "fedprox"]},
        "base_optimizer.mu": {"grid": [0.01, 0.1], "when": {"base_optimizer.name": "fedprox"}},
        "lora.rank": {"grid": [2, 4], "when": {"base_optimizer.mu": 0.1}},
    }
    assert [list(arm.values()) for arm in read(grid(axes)).arms] == [
        ["fedavg"],
        ["fedprox", 0.01],
        ["fedprox", 0.1, 2],
        ["fedprox", 0.1, 4],
    ]
    own = {"grid": [2, 4], "when": {"base_optimizer.mu": 0.01}}  # 0.01 is FedProx's default
    default = {"base_optimizer": axes["base_optimizer"], "lora.rank": own}
    assert [list(arm.values()) for arm in read(grid(default)).arms] == [["fedavg"], ["fedprox", 2], ["fedprox", 4]]


@pytest.mark.parametrize(
    ("when", "sentence"),
    [
        ({"method.name": "fedms"}, "requires that method.name is fedms, which is true in no arm; the values of "
         "method.name are fedra, all_small, inclusivefl."),
        ({"method.name": ["inclusivefl", "fedms"]},
         "requires that method.name is fedms, which is true in no arm; the values of method.name are fedra, "
         "all_small, inclusivefl."),
        ({"method.name": "inclusivefl", "lora.rank": 8}, "requires that lora.rank is 8, which is true in no arm; the "
         "values of lora.rank are grid [2, 4]."),
        ({"method.name": "inclusivefl", "lora.position": "both"}, "requires that lora.position is both, which is "
         "true in every arm; remove this condition."),
        ({"method.name": ["fedra", "all_small", "inclusivefl"]}, "requires that method.name is fedra or all_small or "
         "inclusivefl, which is true in every arm; remove this condition."),
        ({"method": "inclusivefl"}, "names `method`, which is not a hyperparameter of any arm; did you mean "
         "`method.name` or `method.beta` or `method.depth`?"),
        ({"method.nam": "inclusivefl"}, "names `method.nam`, which is not a hyperparameter of any arm; did you mean "
         "`method.name` or `method.beta` or `method.depth`?"),
    ],
)  # fmt: skip
def test_a_condition_that_never_or_always_holds_is_rejected(read, when, sentence):
    axes = {**GRIDDED, "method.beta": {"grid": [0.1, 0.2], "when": when}}
    assert refusal(read, grid(axes)) == f"`when` of `space.method.beta` {sentence}"


def test_a_condition_that_no_sample_meets_is_rejected(read):
    axes = {**METHODS, "local.steps": {"integer": [1, 3], "when": {"lora.dropout": 0.33}}}
    assert refusal(read, sampled(axes)) == (
        "`when` of `space.local.steps` requires that lora.dropout is 0.33, which is true in no arm; the values of "
        "lora.dropout are uniform [0, 0.5], step 0.05."
    )
    met = {**METHODS, "local.steps": {"integer": [1, 3], "when": {"lora.dropout": 0.35}}}
    assert any("local.steps" in arm for arm in read(sampled(met)).probes)


def test_a_baseline_without_a_counterpart_of_each_arm_is_rejected(read):
    assert refusal(read, grid(GRIDDED, baseline={"method": "inclusivefl"})) == (
        "the arm method=fedra, lora.rank=2 has no `method.beta` and cannot be compared with the `baseline` "
        "method=inclusivefl, which leaves `method.beta` open."
    )
    whole = {"method": "inclusivefl", "method.beta": 0.1}
    assert read(grid(GRIDDED, baseline=whole)).space.baseline == whole
    not_there = {"method": "fedra", "method.beta": 0.1}
    assert refusal(read, grid(GRIDDED, baseline=not_there)) == (
        f"`baseline` must be one of the arms, but {not_there} is not; write "
        "`baseline: {method: fedra, lora.rank: 2}` or "
        "`baseline: {method: fedra, lora.rank: 4}` or `baseline: {method: all_small, lora.rank: 2}` or "
        "`baseline: {method: all_small, lora.rank: 4}` or one of 4 other arms."
    )


def test_one_factor_needs_a_baseline_with_all_axes(read):
    whole = {"method": "inclusivefl", "method.beta": 0.1, "lora.rank": 4}
    plan = read(grid(GRIDDED, baseline=whole, design="one_factor"))
    assert plan.arms == [
        whole,
        {"method": "fedra", "lora.rank": 4},
        {"method": "all_small", "lora.rank": 4},
        {**whole, "method.beta": 0.2},
        {**whole, "lora.rank": 2},
    ]
    assert plan.num_trials == len(plan.grid()) == 10
    assert len(read(grid(GRIDDED, baseline=whole), design="one_factor").arms) == 5
    lacking = {"method": "inclusivefl", "lora.rank": 4}
    assert refusal(read, grid(GRIDDED, baseline=lacking, design="one_factor")) == (
        "`design` one_factor needs a `baseline` with a value for every axis, but `method.beta` is missing in "
        "method=inclusivefl, lora.rank=4."
    )
    other = {"method": "fedra", "lora.rank": 4}
    assert refusal(read, grid(GRIDDED, baseline=other, design="one_factor")) == (
        "`design` one_factor needs a `baseline` in which every axis is active, but `space.method.beta` is inactive "
        "in it."
    )
    wrong = {**whole, "lora.rank": 3}
    assert refusal(read, grid(GRIDDED, baseline=wrong, design="one_factor")) == (
        f"`baseline` must be one of the arms, but {wrong} is not; write "
        "`baseline: {method: inclusivefl, method.beta: 0.1, lora.rank: 2}`."
    )


def test_one_factor_also_varies_the_components_of_an_ablation(read):
    file = {
        **GRID,
        "experiment": "fedbrick_digits",
        "fixed": {},
        "ablate": {"method.anneal": "off", "method.parallel": "off"},
        "baseline": {"lora.rank": 4, "without": []},
        "design": "one_factor",
    }
    assert read(file).arms == [
        {"lora.rank": 4, "without": []},
        {"lora.rank": 1, "without": []},
        {"lora.rank": 4, "without": ["method.anneal"]},
        {"lora.rank": 4, "without": ["method.parallel"]},
    ]


def test_the_error_names_two_values_that_do_not_fit_together(read):
    """Each of the two values is valid together with the experiment's value of the other hyperparameter."""
    axes = {
        "method": {"choice": ["fedra", {"name": "fedra", "missing_layers": "ensure_cover"}]},
        "federation.depths": {"choice": [[12, 10, 8, 6, 4, 3], [3, 2, 1, 1, 1, 1]]},
        "optimizer.lr": {"loguniform": [0.01, 0.1]},
    }
    assert refusal(read, sampled(axes, fixed={})) == (
        "2 of 8 arms are invalid: those with method=fedra (missing_layers ensure_cover), "
        "federation.depths=[3, 2, 1, 1, 1, 1], because `method.missing_layers` ensure_cover needs depths that sum to "
        "at least 12 in every cohort, but [3, 2, 1, 1, 1, 1] sum to 9."
    )


def test_the_error_lists_several_causes_and_the_number_of_invalid_arms(read):
    axes = {
        "lora.rank": {"grid": [4, 0, 65]},
        "lora.dropout": {"grid": [0.0, 1.5]},
        "optimizer.lr": {"grid": [0.1, 0.0]},
    }
    assert refusal(read, grid(axes)) == (
        "11 of 12 arms are invalid: those with lora.rank=0, because `lora.rank` must be greater than 0, but it is 0; "
        "those with lora.dropout=1.5, because `lora.dropout` must be less than 1, but it is 1.5; "
        "those with optimizer.lr=0, because `optimizer.lr` must be greater than 0, but it is 0.0; other arms have "
        "other errors."
    )


def test_the_error_names_a_single_invalid_value(read):
    wrong = "`lora.rank` must be greater than 0, but it is 0."
    axes = {"lora.rank": {"grid": [4, 0]}, "optimizer.lr": {"grid": [0.1, 0.2]}}
    assert refusal(read, grid(axes)) == f"arm lora.rank=0: {wrong}"
    assert refusal(read, sampled({"lora.rank": {"integer": [0, 4]}, "optimizer.lr": {"choice": [0.1, 0.2]}})) == (
        f"arm lora.rank=0: {wrong}"
    )


def test_an_error_in_the_fixed_values_is_reported_once_for_all_arms(read):
    axes = {"base_optimizer": {"grid": ["feddyn", {"name": "feddyn", "alpha": 0.5}]}, "lora.rank": {"grid": [1, 4]}}
    file = grid(axes, fixed={**GRID["fixed"], "aggregation.lora": "product_svd"})
    assert refusal(read, file) == (
        "all 4 arms: `base_optimizer` feddyn stores gradients of LoRA's A and B and cannot be combined with "
        "`aggregation.lora` product_svd, which replaces A and B in every round."
    )


BAD = st.sets(st.sampled_from([*itertools.product("abc", range(3))]), min_size=1, max_size=2).filter(
    lambda part: len({name for name, _ in part}) == len(part)
)


@given(st.lists(BAD, min_size=1, max_size=4))
def test_the_causes_explain_every_invalid_arm_and_no_valid_arm(parts):
    """An arm has the error message of the first invalid part that the arm contains."""
    arms = [dict(zip("abc", values, strict=True)) for values in itertools.product(range(3), repeat=3)]
    wrong = [
        WrongArm(arm, next(str(number) for number, part in enumerate(parts) if part <= set(arm.items())))
        for arm in arms
        if any(part <= set(arm.items()) for part in parts)
    ]
    found = causes(wrong, arms, most=100)
    explained = [arm for arm in arms if any(one.arm.items() <= arm.items() for one in found)]
    assert explained == [one.arm for one in wrong]
    assert {one.message for one in found} == {one.message for one in wrong}
    for one in found:  # at least one arm with these values has this message
        assert any(each.message == one.message and one.arm.items() <= each.arm.items() for each in wrong)


def shown(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    around = plan.space.baseline if plan.space.design == "one_factor" else None
    arms = None if plan.sampled else plan.arms
    result_console().print(plan_table(plan.name, plan.space.space, arms, around))
    return capsys.readouterr().out


def test_the_plan_shows_steps_and_conditions(read, capsys):
    text = shown(read(sampled(METHODS)), capsys)
    assert "uniform [0, 0.5], step 0.05" in text
    assert "loginteger [1, 3]" in text
    assert "method.depth only if method.name is all_small" in text
    text = shown(read(grid(GRIDDED)), capsys)
    assert "method=fedra, lora.rank=2" in text
    assert "method.beta only if method.name is inclusivefl" in text


def test_the_plan_of_one_factor_shows_the_changed_values(read, capsys):
    whole = {"method": "inclusivefl", "method.beta": 0.1, "lora.rank": 4}
    text = shown(read(grid(GRIDDED, baseline=whole, design="one_factor")), capsys)
    rows = [line.strip("│ ").split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        "method=inclusivefl, method.beta=0.1, lora.rank=4",
        "method=fedra",
        "method=all_small",
        "method.beta=0.2",
        "lora.rank=2",
    ]
