"""Properties that every aggregation rule must have. The option `--method` tests a method, which uses the mean."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsweep.common.yaml_values import Json
from fedsweep.federation.rounds import federate
from fedsweep.testing.cases import own_changes
from fedsweep.testing.compare import copied, identical, identical_rounds, memory
from fedsweep.testing.fixtures import NewFederation
from fedsweep.testing.rounds import one_round
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import AdapterState, ClientUpdate

Given = tuple[AdapterState, list[ClientUpdate], AggregationConfig]


@pytest.fixture
def changes(aggregation_name: str, pytestconfig: pytest.Config) -> dict[str, Json]:
    """Return the changes that make a small experiment with three clients use the rule."""
    small: dict[str, Json] = {"method": "fedra", "federation.depths": [2, 1, 3], "aggregation.rule": aggregation_name}
    return {**small, **own_changes(pytestconfig, of_method=False)}


@pytest.fixture
def given(federation: NewFederation, changes: dict[str, Json]) -> Given:
    """Return the server's tensors, the updates of three clients of FedRA in a round, and the rule's options."""
    small = federation(changes)
    start, updates = one_round(small)
    return start.state.adapter, updates, small.server.aggregation


def test_the_result_has_the_servers_tensors_and_finite_values(given: Given) -> None:
    previous, updates, config = given
    after = layerwise_mean(previous, updates, config)
    assert {name: (one.shape, one.dtype) for name, one in after.items()} == {
        name: (one.shape, one.dtype) for name, one in previous.items()
    }
    assert all(bool(one.isfinite().all()) for one in after.values())


def test_a_tensor_that_no_client_sent_keeps_its_value(given: Given) -> None:
    previous, updates, config = given
    after = layerwise_mean(previous, updates, config)
    sent = {name for update in updates for name in update.adapter}
    idle = set(previous) - sent
    assert idle
    assert all(torch.equal(after[name], previous[name]) for name in idle)


def test_the_arguments_are_neither_changed_nor_shared(given: Given) -> None:
    previous, updates, config = given
    kept = [copied(one) for one in (previous, *(update.adapter for update in updates))]
    for some in (updates, updates[:1]):
        after: Any = layerwise_mean(previous, some, config)
        assert not memory(after) & memory([previous, *updates])
    assert identical(kept, [previous, *(update.adapter for update in updates)])


def test_a_run_with_the_rule_is_reproducible(federation: NewFederation, changes: dict[str, Json]) -> None:
    before = torch.get_rng_state()
    first = list(federate(federation(changes)))
    other = federation(changes)
    assert identical_rounds(first, federate(replace(other, clients=list(reversed(other.clients)))))
    assert torch.equal(torch.get_rng_state(), before), "the global random generator was used"
