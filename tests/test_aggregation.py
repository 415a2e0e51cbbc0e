"""Arithmetic on adapter states, against tests/references/aggregation.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.aggregation import AggregationConfig, layerwise_mean
from fedsweep.types import ClientUpdate, LayerAllocation
from tests.references import aggregation as reference

SHAPES = [(2, 3), (4,), (1, 5), (3, 2)]
NOBODY = LayerAllocation.of([])


def sent(client: str, adapter: dict[str, torch.Tensor], examples: int = 1) -> ClientUpdate:
    return ClientUpdate(client, NOBODY, adapter, examples, {"loss": 0.0})


@given(
    st.lists(st.tuples(*[st.booleans()] * len(SHAPES)), min_size=1, max_size=6),
    st.lists(st.integers(1, 1000), min_size=6, max_size=6),
    st.sampled_from(["samples", "uniform"]),
    st.integers(0, 2**31),
)
def test_the_layerwise_mean_is_equation_3(rows, examples, weights, seed):
    rng = np.random.default_rng(seed)
    matrix = np.array(rows)
    previous = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    clients = [[rng.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in rows]
    updates = [
        sent(f"{i}", {f"r{j}": torch.tensor(clients[i][j]) for j in range(len(SHAPES)) if matrix[i, j]}, examples[i])
        for i in range(len(rows))
    ]
    sizes = [float(size) if weights == "samples" else 1.0 for size in examples[: len(rows)]]

    mean = layerwise_mean(
        {f"r{j}": torch.tensor(old) for j, old in enumerate(previous)}, updates, AggregationConfig(weights=weights)
    )
    for j, expected in enumerate(reference.layerwise_mean(previous, matrix, clients, sizes)):
        np.testing.assert_allclose(mean[f"r{j}"].numpy(), expected, rtol=1e-5, atol=1e-6)
        if not matrix[:, j].any():
            assert np.array_equal(mean[f"r{j}"].numpy(), previous[j])


def test_an_update_with_an_unknown_tensor_is_refused():
    updates = [sent("noisy", {"head": torch.ones(2), "haed": torch.ones(2), "body": torch.ones(2)})]
    with pytest.raises(KeyError, match="client noisy sent unknown tensors: body, haed"):
        layerwise_mean({"head": torch.zeros(2)}, updates, AggregationConfig())


def test_weights_are_images_or_one():
    update = sent("a", {}, 40)
    assert AggregationConfig(weights="samples").weight(update) == 40.0
    assert AggregationConfig(weights="uniform").weight(update) == 1.0
