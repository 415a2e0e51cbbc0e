"""The averages of clients' updates, compared with tests/references/aggregation.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import federate
from fedsweep.models.lora import squared_norm
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean, lora_residual
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


def test_an_update_with_an_unknown_tensor_is_rejected():
    updates = [sent("noisy", {"head": torch.ones(2), "haed": torch.ones(2), "body": torch.ones(2)})]
    with pytest.raises(KeyError, match="client noisy sent unknown tensors: body, haed"):
        layerwise_mean({"head": torch.zeros(2)}, updates, AggregationConfig())


def test_the_weight_of_an_update_is_its_number_of_images_or_one():
    update = sent("a", {}, 40)
    assert AggregationConfig(weights="samples").weight(update) == 40.0
    assert AggregationConfig(weights="uniform").weight(update) == 1.0


A, B = "backbone.blocks.0.mlp.fc2.lora_A.default.weight", "backbone.blocks.0.mlp.fc2.lora_B.default.weight"
RULES = ["factors", "product_svd"]
SVD = AggregationConfig(lora="product_svd")


def lora(rng: np.random.Generator, rank: int = 2, kind: str = "linear") -> dict[str, torch.Tensor]:
    """Return LoRA factors of a layer from 7 to 5 features, or of a convolution with 3 channels and a 2 x 2 kernel."""
    shapes = {"linear": ((rank, 7), (5, rank)), "convolution": ((rank, 3, 2, 2), (5, rank, 1, 1))}[kind]
    a, b = (torch.tensor(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    return {A: a, B: b, "head": torch.tensor(rng.normal(size=4).astype(np.float32))}


def product(adapter: dict[str, torch.Tensor]) -> np.ndarray:
    return adapter[B].flatten(1).double().numpy() @ adapter[A].flatten(1).double().numpy()


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["linear", "convolution"]), st.integers(0, 2**31))
def test_refactored_products_are_the_best_of_their_rank(rank, clients, kind, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, size=clients)
    updates = [sent(f"{i}", lora(rng, rank, kind), int(size)) for i, size in enumerate(sizes)]
    previous = lora(rng, rank, kind)
    mean = layerwise_mean(previous, updates, SVD)
    wanted = sum(size * product(update.adapter) for size, update in zip(sizes, updates, strict=True)) / sizes.sum()
    u, s, v = np.linalg.svd(wanted)
    np.testing.assert_allclose(product(mean), (u[:, :rank] * s[:rank]) @ v[:rank], rtol=1e-4, atol=1e-5)
    assert {name: tensor.shape for name, tensor in mean.items()} == {name: one.shape for name, one in previous.items()}
    factors = layerwise_mean(previous, updates, AggregationConfig())
    torch.testing.assert_close(mean[A].norm(), factors[A].norm(), rtol=1e-4, atol=1e-5)
    assert torch.equal(mean["head"], factors["head"])


@pytest.mark.parametrize("rule", RULES)
def test_copies_of_one_update_keep_its_product(rule):
    rng = np.random.default_rng(0)
    one = lora(rng)
    mean = layerwise_mean(lora(rng), [sent(f"{i}", one, i + 1) for i in range(4)], AggregationConfig(lora=rule))
    np.testing.assert_allclose(product(mean), product(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_updates_does_not_change_a_bit(rule):
    rng = np.random.default_rng(0)
    previous, updates = lora(rng), [sent(f"{i}", lora(rng), i + 1) for i in range(4)]
    config = AggregationConfig(lora=rule)
    assert identical(*(layerwise_mean(previous, order, config) for order in (updates, updates[::-1])))
    assert lora_residual(previous, updates, config) == lora_residual(previous, updates[::-1], config)


def test_refactoring_hardly_changes_an_adapter_near_its_start():
    """Another norm or basis of factor A would act like another learning rate in the following rounds."""
    rng = np.random.default_rng(0)
    start = torch.nn.init.kaiming_uniform_(torch.empty(4, 200), a=5**0.5, generator=torch.Generator().manual_seed(0))
    one = {A: start, B: torch.tensor(0.1 * rng.normal(size=(50, 4)).astype(np.float32))}
    mean = layerwise_mean(one, [sent("a", one), sent("b", one)], SVD)
    assert (mean[A] - start).norm() < 0.2 * start.norm()
    assert (mean[B] - one[B]).norm() < 0.2 * one[B].norm()


def test_with_one_client_per_round_refactoring_has_little_effect(federation):
    changes = {"method": "all_large", "federation.clients_per_round": 1, "federation.rounds": 2}
    losses = [
        [result.metrics["loss/test"] for result in federate(federation({**changes, "aggregation.lora": rule}))]
        for rule in ("factors", "product_svd")
    ]
    np.testing.assert_allclose(*losses, rtol=0.02)
    assert losses[0] != losses[1]


def test_the_residual_of_a_round_is_computed_from_all_updates(federation):
    small = federation({"federation.rounds": 1})
    start, first = federate(small)
    cohort = small.cohort(1)
    rows = small.method.allocate(start.state, cohort, small.server, stream(small.seed, "allocation", 1))
    updates = small.method.local_updates(start.state, cohort, rows, small.trainer.at(1))
    expected = lora_residual(start.state.adapter, updates, small.server.aggregation)
    assert first.metrics["lora/residual"] == expected > lora_residual(start.state.adapter, updates[:1], SVD)


def test_an_adapter_can_still_learn_after_a_zero_product():
    rng = np.random.default_rng(0)
    idle = lora(rng) | {B: torch.zeros(5, 2)}
    mean = layerwise_mean(idle, [sent("a", idle), sent("b", idle)], SVD)
    assert not mean[B].any()
    assert torch.linalg.matrix_rank(mean[A]) == 2


def test_a_layer_that_nobody_trained_is_not_refactored():
    rng = np.random.default_rng(0)
    previous = lora(rng)
    mean = layerwise_mean(previous, [sent("a", {"head": torch.ones(4)})], SVD)
    assert torch.equal(mean[A], previous[A])
    assert torch.equal(mean[B], previous[B])


@given(st.integers(1, 6), st.sampled_from(["samples", "uniform"]), st.integers(0, 2**31))
def test_the_residual_of_averaged_factors_is_their_covariance(clients, weights, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, size=clients)
    updates = [sent(f"{i}", lora(rng), int(size)) for i, size in enumerate(sizes)]
    share = sizes / sizes.sum() if weights == "samples" else np.full(clients, 1 / clients)
    a, b = (np.stack([update.adapter[name].double().numpy() for update in updates]) for name in (A, B))
    centred = [b - np.tensordot(share, b, 1), a - np.tensordot(share, a, 1)]
    covariance = sum(w * left @ right for w, left, right in zip(share, *centred, strict=True))
    whole = sum(w * left @ right for w, left, right in zip(share, b, a, strict=True))
    expected = np.linalg.norm(covariance) / np.linalg.norm(whole)
    assert lora_residual(lora(rng), updates, AggregationConfig(weights=weights)) == pytest.approx(expected, abs=2e-7)


def test_the_residual_of_refactored_products_is_the_truncation_error():
    rng = np.random.default_rng(0)
    updates = [sent(f"{i}", lora(rng)) for i in range(3)]
    s = np.linalg.svd(sum(product(update.adapter) for update in updates), compute_uv=False)
    expected = np.sqrt((s[2:] ** 2).sum() / (s**2).sum())
    assert lora_residual(lora(rng), updates, SVD) == pytest.approx(expected, rel=1e-5)
    assert expected < lora_residual(lora(rng), updates, AggregationConfig())


@pytest.mark.parametrize("rule", RULES)
def test_the_work_of_aggregation_is_linear_in_the_number_of_clients(rule):
    """Beyond a few clients, twice as many of them take at most twice as many floating-point operations."""
    rng, work, previous = np.random.default_rng(0), [], lora(np.random.default_rng(1))
    updates = [sent(f"{i:02}", lora(rng)) for i in range(80)]
    for clients in (40, 80):
        with FlopCounterMode(display=False) as counter:
            layerwise_mean(previous, updates[:clients], AggregationConfig(lora=rule))
            lora_residual(previous, updates[:clients], AggregationConfig(lora=rule))
        work.append(counter.get_total_flops())
    assert 0 < work[1] <= 2 * work[0]


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 50])
def test_the_norm_of_a_product_is_the_same_in_both_orders(columns):
    rng = np.random.default_rng(columns)
    left, right = (torch.tensor(rng.normal(size=shape)) for shape in ((6, columns), (columns, 9)))
    assert squared_norm(left, right) == pytest.approx(float(np.linalg.norm(left.numpy() @ right.numpy()) ** 2))


def test_without_trained_adapters_there_is_no_residual():
    assert lora_residual({"head": torch.zeros(4)}, [sent("a", {"head": torch.ones(4)})], AggregationConfig()) == 0.0


def test_under_a_frozen_a_the_mean_of_products_is_the_product_of_means(federation):
    small = federation({"aggregation.lora": "freeze_a"})
    before = dict(small.model.named_parameters())
    frozen = {name: tensor.detach().clone() for name, tensor in before.items() if ".lora_A." in name}
    start, *rounds = federate(small)
    cohort = small.cohort(2)
    rows = small.method.allocate(rounds[0].state, cohort, small.server, np.random.default_rng(0))
    updates = small.method.local_updates(rounds[0].state, cohort, rows, small.trainer.at(2))
    mean = layerwise_mean(rounds[0].state.adapter, updates, small.server.aggregation)
    for name in (one for one in mean if ".lora_B." in one):
        a, holders = frozen[name.replace("lora_B", "lora_A")], [one for one in updates if name in one.adapter]
        total = sum(one.num_examples for one in holders)
        products = sum(one.num_examples / total * one.adapter[name] @ a for one in holders)
        if holders:
            torch.testing.assert_close(mean[name] @ a, products, rtol=1e-5, atol=1e-6)
    assert len(frozen) == 24
    assert not any(".lora_A." in name for name in start.state.adapter)
    assert identical(frozen, {name: tensor.detach() for name, tensor in before.items() if name in frozen})
    other = federation({"aggregation.lora": "factors"}).initial_state().adapter  # A is the same as with trainable A
    assert all(torch.equal(other[name], tensor) for name, tensor in frozen.items())
    assert [result.metrics["lora/residual"] for result in rounds] == [0.0, 0.0]
    blocks = 12 + 6 + 3
    assert rounds[0].metrics["parameters/trained"] == pytest.approx(650 + blocks / 3 * 2 * 64 * 8)  # two B of 64 x 8


def test_each_aggregation_rule_gives_a_different_and_reproducible_run(federation):
    rules = ("factors", "freeze_a", "product_svd", "product_svd")
    runs = [list(federate(federation({"aggregation.lora": rule, "federation.rounds": 1}))) for rule in rules]
    assert identical_rounds(*runs[2:])
    assert len({run[-1].metrics["loss/test"] for run in runs}) == 3
    assert 0 < runs[0][1].metrics["lora/residual"] < 1
