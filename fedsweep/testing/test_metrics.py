"""Properties that every metric in `evaluation.metrics` must have."""

import math
from dataclasses import replace

import pytest
import torch

from fedsweep.common.yaml_values import Json
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.testing.cases import own_changes
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.testing.fixtures import NewFederation
from fedsweep.types import RoundResult


@pytest.fixture
def plain(pytestconfig: pytest.Config) -> dict[str, Json]:
    """Return the changes of a small experiment with three clients, whose models lack blocks."""
    return {"method": "fedra", "federation.depths": [2, 1, 3], **own_changes(pytestconfig, of_method=False)}


@pytest.fixture
def measured(federation: NewFederation, plain: dict[str, Json], metric_name: str) -> list[RoundResult]:
    """Return the rounds of the experiment with the metric."""
    return list(federate(federation({**plain, "evaluation.metrics": [metric_name]})))


def added(config: RunConfig, name: str) -> list[str]:
    """Return the names of the values that a metric adds to each round."""
    with_metric = config.override({"evaluation.metrics": [name]}, "test").metrics()
    assert len(set(with_metric)) == len(with_metric), "a value has the name of another one"
    return [one for one in with_metric if one not in config.metrics()]


def test_the_values_are_finite_numbers_under_the_listed_names(
    measured: list[RoundResult], tiny: RunConfig, plain: dict[str, Json], metric_name: str
) -> None:
    names = added(tiny.override(plain, "test"), metric_name)
    assert names
    assert all(name.startswith(f"{metric_name}/") for name in names)
    untuned, *rounds = measured
    assert not set(names) & set(untuned.metrics)
    assert len(rounds) == 2
    for result in rounds:
        assert set(names) <= set(result.metrics)
        assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())


def test_a_run_is_the_same_apart_from_the_values_of_the_metric(
    federation: NewFederation, measured: list[RoundResult], plain: dict[str, Json], metric_name: str
) -> None:
    for without, with_metric in zip(federate(federation(plain)), measured, strict=True):
        assert identical(without.state, with_metric.state)
        others = {name: one for name, one in with_metric.metrics.items() if not name.startswith(f"{metric_name}/")}
        assert identical(dict(without.metrics), others)


def test_the_values_are_reproducible_and_do_not_depend_on_the_order_of_the_clients(
    federation: NewFederation, measured: list[RoundResult], plain: dict[str, Json], metric_name: str
) -> None:
    before = torch.get_rng_state()
    other = federation({**plain, "evaluation.metrics": [metric_name]})
    assert identical_rounds(measured, federate(replace(other, clients=list(reversed(other.clients)))))
    assert torch.equal(torch.get_rng_state(), before), "the global random generator was used"
