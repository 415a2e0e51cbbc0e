"""Budgets in a search space: the clients that a dry run lists, and the arms whose costs differ."""

import io

import pytest
from rich.console import Console

from fedsweep.cli.budget_table import budget_table
from fedsweep.cli.json_sweeps import clients_of
from fedsweep.sweep.plan.client_budgets import fitted_clients, unequal_budgets
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.linked_sweeps import planned_sweeps
from fedsweep.sweep.running.tune import TuneOptions
from tests.sweep.helpers import GRID, write_space

BUDGETS = {
    "lora.rank": 12,
    "federation.depths": None,
    "federation.capacity": [1, 1, 0.51, 0.51, 0.27, 0.27],
    "federation.budget": "bytes_up",
}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return a function that plans a space with pairs of a method and what is reduced."""
    monkeypatch.chdir(tmp_path)

    def make(*pairs, budgets=BUDGETS, baseline=True, **entries):
        space = {key: value for key, value in GRID.items() if key not in ("space", "fixed", "baseline")}
        space |= {"fixed": budgets, "space": {"method, federation.fit": {"grid": [list(pair) for pair in pairs]}}}
        if baseline:
            space["baseline"] = {"method": pairs[0][0], "federation.fit": pairs[0][1]}
        write_space(tmp_path, "tiny", space | entries)
        return Plan.read("tiny", {}, {})

    return make


def test_depth_and_rank_of_equal_bytes_are_not_named(planned):
    plan = planned(("fedra", "depth"), ("all_large", "rank"))
    assert list(unequal_budgets(plan)) == []


@pytest.mark.parametrize("baseline", [True, False])
def test_arms_with_unequal_costs_are_named_before_anything_starts(planned, baseline):
    """The clients of AllSmall hold three blocks, also those whose budgets are larger."""
    plan = planned(("fedra", "depth"), ({"name": "all_small", "depth": 3}, "depth"), baseline=baseline)
    (found,) = unequal_budgets(plan)
    costs = [sum(len(one.clients) * one.costs.bytes_up for one in fitted_clients(config)) for _, config in plan.configs]
    share = 100 * abs(costs[0] - costs[1]) / max(costs)
    assert share > 5
    names = "method=all_small (depth 3), federation.fit=depth and method=fedra, federation.fit=depth"
    assert found == (
        f"The arms {names} differ by {share:.1f}% in their budgeted cost, the bytes sent in a round: "
        f"{costs[1]:,} and {costs[0]:,}, summed over all clients."
    )


def test_unequal_costs_of_a_client_are_named_if_the_sums_are_equal(planned):
    """The same budgets belong to other clients, so the sums are equal."""
    one, other = [1, 1, 1, 0.27, 0.27, 0.27], [0.27, 0.27, 0.27, 1, 1, 1]
    fixed = {"lora.rank": 12, "federation.budget": "bytes_up", "method": "fedra"}
    space = {"federation.depths, federation.capacity": {"grid": [[None, one], [None, other]]}}
    plan = planned(budgets=fixed, space=space, baseline=False)
    (found,) = unequal_budgets(plan)
    large, small = (fitted.costs.bytes_up for fitted in fitted_clients(plan.configs[0][1]))
    assert small < 0.5 * large
    assert f"differ by up to {100 * (1 - small / large):.1f}% in the budgeted cost of a client" in found
    assert f"the bytes sent in a round: {small:,} and {large:,} for the client plain." in found


@pytest.mark.parametrize(("depths", "named"), [([12, 12, 6, 6, 3, 3], False), ([12, 12, 8, 8, 3, 3], True)])
def test_an_arm_with_given_depths_is_compared_with_an_arm_with_budgets(planned, depths, named):
    fixed = {"lora.rank": 12, "federation.budget": "bytes_up", "method": "fedra"}
    pairs = [[None, depths], [BUDGETS["federation.capacity"], None]]
    space = {"federation.capacity, federation.depths": {"grid": pairs}}
    found = list(unequal_budgets(planned(budgets=fixed, space=space, baseline=False)))
    assert bool(found) is named
    if named:
        assert "in their budgeted cost, the bytes sent in a round: " in found[0]


def test_unequal_costs_of_tuned_arms_are_named_once_before_tuning(planned):
    fedra, small = ("fedra", "depth"), ({"name": "all_small", "depth": 3}, "depth")
    tuned = {"data.validation_fraction": 0.2}
    tune_each = {"space": {"optimizer.lr": {"loguniform": [0.01, 0.1]}}, "samples": 3}
    plain = planned(fedra, small, budgets=BUDGETS | tuned)
    planned(fedra, small, budgets=BUDGETS | tuned, tune_each=tune_each)
    tuning, *others = (Plan.of(one.request) for one in planned_sweeps(TuneOptions("tiny")))
    assert len(tuning.arms) == 2 * 3
    assert list(unequal_budgets(tuning)) == list(unequal_budgets(plain)) != []
    assert [list(unequal_budgets(one)) for one in others] == [[], []]


def printed(plan: Plan) -> str:
    console = Console(width=120, record=True, file=io.StringIO(), markup=False)
    console.print(budget_table(plan))
    return console.export_text()


def test_the_table_lists_every_arm_and_client_with_all_costs(planned):
    plan = planned(("fedra", "depth"), ("all_large", "rank"))
    fitted = [found for _, config in plan.configs for found in fitted_clients(config)]
    assert len(fitted) == 6
    assert sum(len(found.clients) for found in fitted) == 2 * 6
    lines = [line.split() for line in printed(plan).splitlines() if line.strip().endswith(tuple("0123456789"))]
    for found, line in zip(fitted, lines, strict=True):
        costs = found.costs
        expected = [
            *", ".join(found.clients).split(),
            str(found.size.depth),
            str(found.rank),
            f"{costs.bytes_up / 1e6:.4g}",
            f"{costs.trained:,}",
            f"{(costs.forward + costs.backward) / 1e9:.4g}",
            f"{costs.memory / 1e6:.4g}",
        ]
        assert line[-len(expected) :] == expected


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}])
def test_the_table_gives_the_reason_for_an_unknown_cost_once(planned, changes):
    plan = planned(("fedra", "depth"), ("all_large", "rank"), budgets=BUDGETS | changes)
    reasons = [line.strip() for line in printed(plan).splitlines() if line.strip().startswith("-:")]
    assert reasons == (
        ["-: The memory of `precision` bfloat16 is not counted, because the meta device has no autocast."]
        if changes
        else []
    )


def test_arms_without_budgets_have_no_table(planned):
    plan = planned(("fedra", "depth"), ("all_large", "depth"), budgets={"federation.depths": [12]})
    assert budget_table(plan) is None
    assert list(unequal_budgets(plan)) == []


def test_the_tags_of_a_trial_list_what_its_budgets_gave(planned):
    """The arm of full rank has only depths."""
    for plan, expected in zip(
        planned(("fedra", "depth"), ("all_large", "rank")).grid()[::3],
        ({"depths": "[2 x 12, 2 x 6, 2 x 3]"}, {"depths": "[6 x 12]", "ranks": "[2 x 12, 2 x 6, 2 x 3]"}),
        strict=True,
    ):
        assert plan.marks == expected


def test_the_plan_of_a_dry_run_lists_the_clients_with_all_costs(planned):
    plan = planned(("fedra", "depth"), ("all_large", "rank"))
    rows = clients_of(plan)["clients"]
    assert [(row["depth"], row["rank"]) for row in rows] == [(12, 12), (6, 12), (3, 12), (12, 12), (12, 6), (12, 3)]
    assert [row["arm"] for row in rows] == [arm for arm in plan.arms for _ in range(3)]
    for row in rows:
        assert {"bytes_up", "trained", "forward", "backward", "memory"} <= row.keys()
    sent = [row["bytes_up"] for row in rows]
    assert sent[:3] == sent[3:], "as many ranks as blocks: a depth and a rank cost equally many bytes"


def test_the_plan_of_a_dry_run_without_budgets_lists_no_clients(planned):
    assert clients_of(planned(("fedra", "depth"), ("all_large", "depth"), budgets={"federation.depths": [12]})) == {}
