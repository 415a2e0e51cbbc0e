"""The columns of a table, compared with loops over rounds, and the errors for invalid columns."""

import math
from dataclasses import replace

import pytest

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import ROUND_METRICS
from fedsweep.results import Attempt, Outcome, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.results.table_columns import COLUMNS, check_columns, column, requested
from fedsweep.training.costs import COST_METRICS
from fedsweep.training.evaluation import client_metric_names, metric_names

ROUNDS = [
    RoundRecord(0, {"accuracy/mean": 0.2, "loss/test": 2.0}, 1.0, memory=500_000_000),
    RoundRecord(1, {"accuracy/mean": 0.5, "loss/test": 1.0, "bytes/up": 1e6, "bytes/down": 3e6,
                    "parameters/trained": 10.0, "simulated/seconds": 3600.0}, 4.0, memory=700_000_000),
    RoundRecord(2, {"accuracy/mean": 0.4, "loss/test": math.nan, "bytes/up": 2e6, "bytes/down": 3e6,
                    "parameters/trained": 30.0, "simulated/seconds": 1800.0}, 6.0, memory=600_000_000),
]  # fmt: skip


def trial(*attempts: Attempt) -> TrialRecord:
    plan = TrialPlan(key="k", number=0, arm={}, seed=0, config={})
    return TrialRecord(plan, Outcome(outcome="finished", round=2), ROUNDS, attempts=attempts)


def value(name: str, *attempts: Attempt, metric: str = "accuracy/mean", mode: str = "max") -> float | None:
    return column(name, metric, mode).of(trial(*attempts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean_over_domains", 0.4), ("megabytes", 9.0), ("megabytes_up", 3.0), ("megabytes_down", 6.0),
        ("parameters_trained", 20.0), ("seconds", 11.0), ("peak_memory", 700.0), ("gpu_seconds", None),
        ("gpu_memory", None), ("worst_domain", None), ("loss/test", None), ("accuracy/mean", 0.4),
        ("rounds_to=0.3", 1), ("rounds_to=0.2", 0), ("rounds_to=0.51", None), ("simulated_hours", 1.5),
        ("simulated_hours_to=0.3", 1.0), ("simulated_hours_to=0.2", 0.0), ("simulated_hours_to=0.51", None),
    ],
)  # fmt: skip
def test_each_column_equals_a_calculation_by_hand(name, expected):
    assert value(name) == expected


def test_without_devices_there_is_no_simulated_time():
    history = [replace(one, metrics={"accuracy/mean": one.metrics["accuracy/mean"]}) for one in ROUNDS]
    record = replace(trial(), history=history)
    for name in ("simulated_hours", "simulated_hours_to=0.2", "simulated_hours_to=0.3"):
        assert column(name, "accuracy/mean", "max").of(record) is None


def test_a_target_for_a_loss_is_reached_from_above():
    assert value("rounds_to=1.5", metric="loss/test", mode="min") == 1
    assert value("rounds_to=0.5", metric="loss/test", mode="min") is None


def test_gpu_seconds_use_the_share_with_which_each_round_ran():
    probe, then = Attempt(gpus=1.0, round=1, peak=2_000_000), Attempt(gpus=0.25, round=2, peak=3_000_000)
    assert value("gpu_seconds", probe, then) == 1.0 + 4.0 + 0.25 * 6.0
    assert value("gpu_memory", probe, then) == 3.0


def test_rounds_that_no_attempt_reported_count_for_the_last_attempt():
    """The last attempt reports no rounds if its worker was lost or if it is still running."""
    assert value("gpu_seconds", Attempt(gpus=0.5, round=0), Attempt(gpus=0.25)) == 0.5 + 0.25 * 10.0


def test_all_columns_have_different_headings():
    assert len(COLUMNS) == 17
    assert len({one.heading for one in COLUMNS.values()}) == len(COLUMNS)


def test_each_column_is_accepted_by_its_heading():
    names = [*COLUMNS, "rounds_to=0.7", "rounds_to=0.123", "simulated_hours_to=0.7", "loss/test"]
    for name in names:
        found = column(column(name, "accuracy/mean", "max").heading, "accuracy/mean", "max")
        assert found.name == name
        check_columns([found.heading], ["loss/test"], "accuracy/mean", "`columns`")
    assert len(names) == 21
    assert column("simulated_hours_to=0.7", "accuracy/mean", "max").heading == "simulated hours to 70%"
    check_columns(["rounds_to=0.7", "simulated_hours_to=0.7"], [], "accuracy/mean", "`columns`")
    assert requested(["mean", "worst domain", "n"]) == ["worst_domain"]


def test_a_domain_is_a_column_with_its_accuracy_in_or_out_of_domain():
    check_columns(["sketch"], ["accuracy/out_of_domain/sketch"], "accuracy/mean", "`columns`")
    rounds = [RoundRecord(1, {"accuracy/domain/photo": 0.5, "accuracy/out_of_domain/sketch": 0.25}, 1.0)]
    plan = TrialPlan(key="k", number=0, arm={}, seed=0, config={})
    found = [column(name, "accuracy/mean", "max") for name in ("photo", "sketch")]
    assert [one.of(TrialRecord(plan, None, rounds)) for one in found] == [0.5, 0.25]
    metrics = metric_names(["photo"], ["sketch"]) + client_metric_names(["photo/0"]) + ROUND_METRICS + COST_METRICS
    assert len(metrics) == 21
    assert all("/" in name and not column(name, "accuracy/mean", "max").of_domain for name in metrics)


def test_a_count_of_seeds_stands_for_its_target():
    names = ["rounds_to=0.7", "rounds_to=0.7_seeds", "lora.rank"]
    for given in (names, names[::-1]):
        check_columns(given, [], "accuracy/mean", "`columns`", ["lora.rank"])
        assert requested(given, ["lora.rank"]) == ["rounds_to=0.7"]


def test_a_short_name_of_a_hyperparameter_does_not_hide_a_column():
    assert requested(["seconds", "rank"], ["local.seconds", "lora.rank"]) == ["seconds"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["worst domain", "worst_domain"], "lists `worst_domain` twice."),
        (["worst_domian"], "lists `worst_domian`, which is not a column; did you mean `worst_domain`"),
        (["acuracy/mean"], "did you mean `accuracy/mean`"),
        (["zzz"], "which is not a column; choose from mean_over_domains, worst_domain"),
        (["seconds", "seconds"], "lists `seconds` twice."),
        (["rounds_to="], "needs a number after `rounds_to=`, as in `rounds_to=0.7`, but it contains `rounds_to=`."),
        (["rounds_to=nan"], "needs a number"),
        (["simulated_hours_to=x"], "needs a number after `simulated_hours_to=`, as in `simulated_hours_to=0.7`"),
        (["simulated_hours_to=0.5", "simulated hours to 50%"], "lists `simulated hours to 50%` twice."),
        (
            ["rounds_to=70"],
            "needs a share from 0 to 1 after `rounds_to=`, because the objective is accuracy/mean, but it contains",
        ),
        (["rounds_to=0.5", "rounds_to=0.50"], "lists `rounds_to=0.50` twice."),
        (["rounds_to=0.5_seeds", "rounds_to=0.50_seeds"], "lists `rounds_to=0.50_seeds` twice."),
    ],
)
def test_invalid_columns_are_rejected(names, words):
    with pytest.raises(UserError, match=r"^`columns` ") as error:
        check_columns(names, ["accuracy/mean"], "accuracy/mean", "`columns`")
    assert words in str(error.value)


def test_columns_and_metrics_are_accepted():
    check_columns([*COLUMNS, "rounds_to=0.7", "accuracy/mean"], ["accuracy/mean"], "accuracy/mean", "`columns`")
    check_columns(["rounds_to=70"], ["accuracy/mean"], "loss/test", "`columns`")
