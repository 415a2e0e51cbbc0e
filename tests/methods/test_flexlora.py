"""Properties of FlexLoRA, and its aggregation against tests/references/flexlora.py."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.cli import early_check
from fedsweep.federation.rounds import federate
from fedsweep.methods.flexlora import FlexLoRA
from fedsweep.models.names import rank_dim
from fedsweep.results.history import ENERGY
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.aggregation import energy_beyond, lora_residual
from fedsweep.types import ServerState
from tests.methods.adapters import HEAD, SHAPES, drawn, factors, layers_of, names, product, sent, server
from tests.references import flexlora as reference

RUN = {"federation.ranks": [6, 3, 2], "lora.rank": 6, "federation.depths": [12, 6, 3], "local.steps": 1}


def aggregated(previous, updates, rank, ranks=()):
    return FlexLoRA().aggregate(ServerState(previous, (0, 1)), updates, server(rank, ranks)).adapter


def wanted(updates, layer):
    """Return the mean product of a layer according to the reference."""
    holders = [one for one in updates if layer in layers_of(one.adapter)]
    clients = [factors(one.adapter, layer) for one in holders]
    return reference.mean_product([one.num_examples for one in holders], clients)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2)), min_size=1, max_size=4), st.integers(0, 2**31))
def test_every_client_receives_the_best_approximation_at_its_rank(clients, seed):
    """In double precision, also for layers that only some clients hold, and for a convolution."""
    rng = np.random.default_rng(seed)
    ranks, full = [rank for rank, _ in clients], 5
    previous = drawn(rng, full)
    updates = [sent(f"{i}", drawn(rng, *one), int(rng.integers(1, 50))) for i, one in enumerate(clients)]
    after = aggregated(previous, updates, full, ranks)
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in previous.items()}
    for layer in {layer for one in updates for layer in layers_of(one.adapter)}:
        mean = wanted(updates, layer)
        for rank in {*ranks, full}:
            np.testing.assert_allclose(product(after, layer, rank), reference.best(mean, rank), rtol=0, atol=1e-11)
    sizes = [one.num_examples for one in updates]
    heads = np.average([one.adapter[HEAD].numpy() for one in updates], axis=0, weights=sizes)
    np.testing.assert_allclose(after[HEAD].numpy(), heads, rtol=1e-12)


@pytest.mark.parametrize(("ranks", "full"), [((3, 2, 2), 8), ((3, 2, 2), 7), ((8, 4, 8), 8)])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_with_a_large_rank_the_product_is_the_exact_mean_and_the_residual_is_0(ranks, full, dtype, exact):
    """A rank is large if it is at least the sum of the clients' ranks, or the size of the layer."""
    rng = np.random.default_rng(0)
    previous, *adapters = ({name: one.to(dtype) for name, one in drawn(rng, rank).items()} for rank in (full, *ranks))
    updates = [sent(f"{i}", one, i + 1) for i, one in enumerate(adapters)]
    after = aggregated(previous, updates, full, ranks)
    exactly = [layer for layer, (_, (out,)) in SHAPES.items() if full >= sum(ranks) or "attn" in layer]
    for layer in exactly:
        mean = wanted(updates, layer)
        assert np.linalg.norm(product(after, layer) - mean) <= exact * np.linalg.norm(mean)
    kept = {name for layer in exactly for name in names(layer)}
    some = [replace(one, adapter={name: one.adapter[name] for name in kept}) for one in updates]
    residual = lora_residual({name: previous[name] for name in kept}, some, server(full).aggregation, after)
    assert residual <= (1e-6 if dtype == torch.float32 else 1e-7)  # the square root of the rounding of its square


def test_a_cohort_of_one_client_with_the_full_rank_is_local_training():
    rng = np.random.default_rng(0)
    one = drawn(rng, 4)
    after = aggregated(drawn(rng, 4), [sent("a", one, 7)], 4, [4, 2])
    for layer in SHAPES:
        np.testing.assert_allclose(product(after, layer), product(one, layer), rtol=0, atol=1e-12)


def test_components_that_no_product_needs_can_be_trained():
    """A cohort of rank 2 leaves columns of B that are 0. The rows of A are not, so B has a gradient."""
    rng = np.random.default_rng(0)
    one = drawn(rng, 2)
    after = aggregated(drawn(rng, 5), [sent("a", one)], 5, [5, 2])
    for layer in SHAPES:
        a, b = factors(after, layer)
        np.testing.assert_allclose(b @ a, product(one, layer), rtol=0, atol=1e-12)
        np.testing.assert_allclose(b[:, 2:], 0, atol=1e-12)
        assert np.linalg.matrix_rank(a) == 5
        norms = np.linalg.norm(a, axis=1)
        np.testing.assert_allclose(norms, norms[0])


def test_factors_keep_the_scale_and_the_signs_of_the_clients_factors():
    """Otherwise, the decomposition would change the effective learning rate of the next round."""
    rng = np.random.default_rng(0)
    one = drawn(rng, 4)
    previous = drawn(rng, 4)
    for ranks in ([4], [4, 1], [1, 2, 3, 4]):
        after = aggregated(previous, [sent("a", one), sent("b", one)], 4, ranks)
        for layer in SHAPES:
            old, new = factors(one, layer)[0], factors(after, layer)[0]
            np.testing.assert_allclose(np.linalg.norm(new), np.linalg.norm(old))
            for start, end in pairwise([0, *sorted(ranks)]):
                overlap = new[start:end] @ old[start:end].T
                np.testing.assert_allclose(overlap, overlap.T, atol=1e-9)  # Procrustes: symmetric, not negative
                assert np.linalg.eigvalsh(overlap).min() >= -1e-9


def test_the_order_of_updates_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    previous = drawn(rng, 5)
    updates = [sent(f"{i}", drawn(rng, rank, 1 + i % 2), i + 1) for i, rank in enumerate((5, 2, 3))]
    found = [aggregated(previous, order, 5, [5, 3, 2]) for order in permutations(updates)]
    assert all(identical(found[0], one) for one in found)


def test_a_layer_that_no_client_trained_keeps_its_factors():
    rng = np.random.default_rng(0)
    previous, layer = drawn(rng, 4), "backbone.blocks.1.attn.proj"
    after = aggregated(previous, [sent("a", drawn(rng, 2, depth=1))], 4, [4, 2])
    assert all(torch.equal(after[name], previous[name]) for name in names(layer))


def test_with_equal_ranks_the_method_is_product_svd(federation):
    """Both runs are bit-identical; with `federation.ranks` too."""
    for ranks in (None, [8]):
        changes = {"federation.depths": [12], "federation.ranks": ranks}
        ours = federate(federation({**changes, "method": "flexlora"}))
        theirs = federate(federation({**changes, "method": "all_large", "aggregation.lora": "product_svd"}))
        assert identical_rounds(ours, theirs)


def test_product_svd_gives_clients_of_unequal_rank_the_best_approximations(federation):
    run = {**RUN, "federation.depths": [12]}
    svd = federation({**run, "method": "all_large", "aggregation.lora": "product_svd"})
    assert identical_rounds(federate(svd), federate(federation({**run, "method": "flexlora"})))


def test_two_rounds_of_clients_with_unequal_ranks_and_depths(federation):
    """After each round, the server's factors are the best approximation of the clients' products."""
    small = federation({**RUN, "method": "flexlora"})
    state, sizes = small.initial_state(), {"inverted": 3, "noisy": 2, "plain": 6}
    for round in (1, 2):
        cohort = small.cohort(round)
        rows = small.allocate(state, cohort, round)
        updates = small.method.local_updates(state, cohort, rows, small.trainer.at(round))
        assert sorted(len(row.held) for row in rows.values()) == [3, 6, 12]
        for update in updates:
            ranks = {one.shape[rank_dim(name)] for name, one in update.adapter.items() if rank_dim(name) is not None}
            assert ranks == {rows[update.client].rank}
        assert {rows[one].rank for one in sizes} == {6, 3, 2}
        after = small.method.aggregate(state, updates, small.server)
        for a in (name for name in state.adapter if ".lora_A." in name):
            layer = a.partition(".lora_A")[0]
            holders = [one for one in updates if a in one.adapter]
            clients = [factors(one.adapter, layer) for one in holders]
            share = np.array([one.num_examples for one in holders]) / sum(one.num_examples for one in holders)
            mean = sum(part * b @ a for part, (a, b) in zip(share, clients, strict=True))
            for rank in (2, 3, 6):
                expected = reference.best(mean, rank)
                error = np.linalg.norm(product(after.adapter, layer, rank) - expected)
                assert error <= 1e-5 * max(np.linalg.norm(mean), 1e-12)
        state = after


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_the_energy_beyond_a_rank_is_that_of_numpys_singular_values(rank):
    rng = np.random.default_rng(rank)
    adapter = drawn(rng, 5)
    expected = reference.energy_beyond([product(adapter, layer) for layer in SHAPES], rank)
    assert energy_beyond(rank, adapter, adapter) == pytest.approx(expected, abs=1e-14)
    assert (expected > 0.01) == (rank < 5)


def test_the_energy_includes_changes_that_the_round_folded_into_frozen_weights():
    rng, layer = np.random.default_rng(0), "backbone.blocks.0.mlp.fc2"
    known = {name: one for name, one in drawn(rng, 2).items() if name in names(layer)}
    old, new = (torch.tensor(rng.normal(size=(9, 11))) for _ in range(2))
    name, scaling = f"{layer}.folded", 0.5
    products = [product(known, layer) + (new - old).numpy() / scaling]
    expected = reference.energy_beyond(products, 3)
    found = energy_beyond(3, {**known, name: old}, {**known, name: new}, scaling)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found > 0.1


def test_without_a_product_there_is_no_energy():
    adapter = {name: one if ".lora_A." in name else 0 * one for name, one in drawn(np.random.default_rng(0), 3).items()}
    assert energy_beyond(1, adapter, adapter) == energy_beyond(1, {}, {}) == 0.0


@pytest.mark.parametrize(
    "changes",
    [{"method": "flexlora"}, {"method": "fedra"}, {"method": "all_large", "aggregation.lora": "freeze_a"}],
    ids=["flexlora", "fedra", "freeze_a"],
)
@pytest.mark.parametrize(("ranks", "least"), [([6, 3, 2], 2), ("dynamic", 1), (None, None)])
def test_runs_report_the_energy_if_and_only_if_clients_have_ranks(federation, tiny, changes, ranks, least):
    changes = {**RUN, **changes, "federation.ranks": ranks, "federation.rounds": 1}
    config, small = tiny.override(changes, "test"), federation(changes)
    _, first = federate(small)
    assert list(first.metrics) == config.metrics() == early_check.metrics(config)
    assert (ENERGY in first.metrics) == (ranks is not None)
    if least is None:
        return
    frozen = {name: one.detach() for name, one in small.model.named_parameters() if ".lora_A." in name}
    adapter = {**frozen, **first.state.adapter}
    layers = [name.partition(".lora_A")[0] for name in adapter if ".lora_A." in name]
    expected = reference.energy_beyond([product(adapter, layer) for layer in layers], least)
    assert config.least_rank() == least
    assert first.metrics[ENERGY] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert expected > 1e-4
