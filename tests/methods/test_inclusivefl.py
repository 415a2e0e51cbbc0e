"""Properties of InclusiveFL, and its momentum against tests/references/inclusivefl.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.methods import Server
from fedsweep.methods.inclusivefl import InclusiveFL, InclusiveState
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical, identical_rounds, moved
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import ClientUpdate, LayerAllocation
from tests.references import inclusivefl as reference

DEPTHS = [5, 3, 3, 2]
SIZES = [10, 30, 20, 40]


def named(blocks: np.ndarray) -> dict[str, torch.Tensor]:
    """Return each row of `blocks` as the tensor of a LoRA factor in that block."""
    return {
        f"backbone.blocks.{layer}.mlp.fc2.lora_B.default.weight": torch.tensor(one) for layer, one in enumerate(blocks)
    }


def test_the_momentum_equals_the_papers_momentum():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(6, 4))
    changes = [[rng.normal(size=(depth, 4)) for depth in DEPTHS] for _ in range(4)]
    method, server = InclusiveFL(beta=0.2), Server(6, AggregationConfig(), (2, 3, 5))
    state = InclusiveState(named(start), tuple(range(6)))
    for change, expected in zip(changes, reference.play(start, DEPTHS, SIZES, changes, 0.2), strict=True):
        now = np.stack([tensor.numpy() for tensor in state.adapter.values()])
        updates = [
            ClientUpdate(f"{k}", LayerAllocation.of(list(range(depth))), named(now[:depth] + change[k]), SIZES[k], {})
            for k, depth in enumerate(DEPTHS)
        ]
        state = method.aggregate(state, updates, server)
        np.testing.assert_allclose(np.stack([one.numpy() for one in state.adapter.values()]), expected, rtol=1e-9)


def test_clients_hold_the_first_blocks(federation):
    small = federation({"method": "inclusivefl", "federation.depths": [12, 5, 2]})
    rows = small.method.allocate(small.initial_state(), small.clients, small.server, np.random.default_rng(0))
    assert {client: row.held for client, row in rows.items()} == {
        "plain": tuple(range(12)), "inverted": tuple(range(5)), "noisy": (0, 1),
    }  # fmt: skip


def test_without_momentum_inclusivefl_averages_prefixes(federation):
    small = federation({"method": {"name": "inclusivefl", "beta": 0.0}, "federation.depths": [12, 5, 2]})
    start, first, second = federate(small)
    for before, after in ((start, first), (first, second)):
        cohort = small.cohort(after.round)
        rows = small.method.allocate(before.state, cohort, small.server, np.random.default_rng(0))
        updates = small.method.local_updates(before.state, cohort, rows, small.trainer.at(after.round))
        expected = layerwise_mean(before.state.adapter, updates, small.server.aggregation)
        assert identical(after.state.adapter, expected)


def test_momentum_changes_the_last_blocks_of_smaller_clients_from_the_second_round_on(federation):
    depths = {"federation.depths": [8, 5, 2]}
    runs = [
        list(federate(federation({"method": {"name": "inclusivefl", "beta": beta}, **depths}))) for beta in (0.0, 0.2)
    ]
    plain, mixed = ([result.state.adapter for result in run] for run in runs)
    assert not moved(plain[1], mixed[1])
    touched = moved(plain[2], mixed[2])
    assert {layer_of(name) for name in touched} == {
        1,
        4,
    }  # the last blocks of the smaller classes
    assert len(touched) == 2 * 4


def test_with_equal_depths_inclusivefl_equals_all_large(federation):
    """All clients form one size class, so there is no larger class to learn from."""
    methods = [
        list(federate(federation({"method": name, "federation.depths": [12, 12, 12], "local.steps": 1})))
        for name in ("inclusivefl", "all_large")
    ]
    for ours, theirs in zip(*methods, strict=True):
        assert identical(ours.state.adapter, theirs.state.adapter)
        assert ours.metrics == theirs.metrics


def test_only_the_last_round_is_remembered(federation):
    small = federation({"method": "inclusivefl", "federation.depths": "dynamic"})
    _, first, second = federate(small)
    for result in (first, second):
        assert set(result.state.steps) == {client.capacity for client in small.cohort(result.round)}
        for depth, steps in result.state.steps.items():
            assert {layer_of(name) for name in steps} == set(range(depth))


def test_the_order_of_the_clients_is_irrelevant_to_the_memory(federation):
    small = federation({"method": "inclusivefl", "federation.depths": [6, 6, 3], "local.steps": 1})
    start = next(federate(small))
    turned = replace(small, clients=list(reversed(small.clients)))
    runs = [list(federate(one, start)) for one in (small, turned)]
    assert identical_rounds(*runs)
    assert all(set(result.state.steps) == {3, 6} for result in runs[0])


def test_momentum_with_product_svd_is_rejected(tiny):
    with pytest.raises(UserError, match=r"`method\.beta` must be 0 if `aggregation\.lora` is product_svd"):
        tiny.override({"method": "inclusivefl", "aggregation.lora": "product_svd"}, "test")
    tiny.override({"method": {"name": "inclusivefl", "beta": 0.0}, "aggregation.lora": "product_svd"}, "test")
