"""The costs of a model of width 64, MLP width 128, rank 4 and ten classes, compared with counts by hand."""

import pytest
import torch

from fedsweep.federation.rounds import federate
from fedsweep.models.names import names_within
from fedsweep.training.costs import (
    COST_METRICS,
    count,
    held_parameters,
    round_costs,
    size_in_bytes,
    sizes_of,
)
from fedsweep.types import ClientUpdate, LayerAllocation

LORA = 4 * (64 + 64) + 4 * (128 + 64)
NORMS = 4 * 64
ATTENTION = 64 * 192 + 192 + 64 * 64 + 64
MLP = 64 * 128 + 128 + 128 * 64 + 64
BLOCK = NORMS + ATTENTION + MLP + LORA
HEAD = 64 * 10 + 10
STEM = 3 * 4 * 4 * 64 + 64 + 64 + (16 + 1) * 64 + 2 * 64  # patches, class token, positions, final norm


@pytest.fixture
def small(federation):
    return federation({"lora.rank": 4, "federation.depths": [5, 1, 3]})


def test_values_and_bytes_of_all_tensors_are_counted():
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
    assert count(state) == 17
    assert size_in_bytes(state) == 12 * 4 + 5 * 2
    assert count({}) == size_in_bytes({}) == 0


@pytest.mark.parametrize("layers", [[], [0], [1, 10, 11], range(12)])
def test_a_sub_model_holds_stem_head_and_its_blocks(small, layers):
    assert held_parameters(sizes_of(small.model), layers) == STEM + HEAD + len(layers) * BLOCK


def test_a_block_is_counted_with_its_adapters(small):
    sizes = sizes_of(small.model)
    assert {held_parameters(sizes, [layer]) - held_parameters(sizes, []) for layer in range(12)} == {BLOCK}


def test_a_rounds_costs_are_sums_of_bytes_and_means_of_parameters(small):
    adapter = small.initial_state().adapter
    rows = {"plain": LayerAllocation(held=(0, 1, 5), trained=(5,)), "noisy": LayerAllocation.of([2])}
    updates = [
        ClientUpdate(client, row, {name: adapter[name] for name in names_within(adapter, row.trained)}, 1, {})
        for client, row in rows.items()
    ]
    received = [{name: adapter[name] for name in names_within(adapter, row.held)} for row in rows.values()]
    costs = round_costs(small.model, rows, received, updates)
    assert list(costs) == COST_METRICS
    assert costs == {
        "bytes/down": 4.0 * (4 * LORA + 2 * HEAD),
        "bytes/up": 4.0 * (2 * LORA + 2 * HEAD),
        "parameters/held": STEM + HEAD + 2 * BLOCK,
        "parameters/trained": LORA + HEAD,
    }


@pytest.mark.parametrize(("method", "blocks"), [("fedra", 5 + 1 + 3), ("all_large", 36), ("all_small", 3)])
def test_the_costs_of_a_method_follow_from_its_depths(federation, method, blocks):
    changes = {"lora.rank": 4, "federation.depths": [5, 1, 3], "federation.rounds": 1, "local.steps": 1}
    _, result = federate(federation({"method": method, **changes}))
    assert result.metrics["bytes/up"] == result.metrics["bytes/down"] == 4 * (blocks * LORA + 3 * HEAD)
    assert result.metrics["parameters/held"] == pytest.approx(STEM + HEAD + blocks / 3 * BLOCK)
    assert result.metrics["parameters/trained"] == pytest.approx(HEAD + blocks / 3 * LORA)
