"""Properties of HetLoRA, and its weights, averages and regulariser against tests/references/hetlora.py."""

from dataclasses import replace
from itertools import islice, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.federation.rounds import federate
from fedsweep.methods.hetlora import MEAN_RANK, HetLoRA, HetLoRAState, product_norm, rank_of
from fedsweep.models.client_rank import cut, holding
from fedsweep.models.names import names_within
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.local_training import cross_entropy
from fedsweep.types import LayerAllocation
from tests.methods.adapters import HEAD, SHAPES, drawn, factors, layers_of, names, played, product, sent, server
from tests.references import hetlora as reference

PLAIN = {"name": "hetlora", "weights": "samples", "gamma": 1.0}
PRUNING = {"name": "hetlora", "gamma": 0.5, "penalty": 1.0, "least_rank": 2}


def aggregated(method, previous, updates, ranks, full):
    """Return the state after aggregation; `ranks` are the ranks of all clients, keyed by client id."""
    state = HetLoRAState(previous, (0, 1), ranks=dict(ranks))
    return method.aggregate(state, updates, server(full, [full]))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2)), min_size=1, max_size=4),
    st.sampled_from(["products", "samples"]),
    st.integers(0, 2**31),
)
def test_factors_are_padded_with_zeros_and_averaged_with_the_papers_weights(clients, weights, seed):
    """Components that only an absent client reaches keep their values; those that no client reaches become zero."""
    rng = np.random.default_rng(seed)
    full, absent = 6, int(rng.integers(1, 7))
    previous = drawn(rng, full)
    updates = [sent(f"{i}", drawn(rng, *one), int(rng.integers(1, 50))) for i, one in enumerate(clients)]
    known = {"absent": absent, **{one.client: full for one in updates}}
    after = aggregated(HetLoRA(weights=weights, gamma=0.5), previous, updates, known, full)
    assert after.ranks == {"absent": absent, **{f"{i}": rank for i, (rank, _) in enumerate(clients)}}
    largest, sizes = max(after.ranks.values()), [one.num_examples for one in updates]
    norms = [reference.weight([factors(one.adapter, layer) for layer in layers_of(one.adapter)]) for one in updates]
    np.testing.assert_allclose([product_norm(one) for one in updates], norms, rtol=1e-12)
    for layer in SHAPES:
        holders = [i for i, one in enumerate(updates) if layer in layers_of(one.adapter)]
        if not holders:
            assert all(torch.equal(after.adapter[name], previous[name]) for name in names(layer))
            continue
        own, trained = norms if weights == "products" else sizes, [factors(updates[i].adapter, layer) for i in holders]
        mean_a, mean_b = reference.padded_mean([own[i] for i in holders], trained, full)
        reached, (old_a, old_b) = max(len(a) for a, _ in trained), factors(previous, layer)
        mean_a[reached:largest], mean_b[:, reached:largest] = old_a[reached:largest], old_b[:, reached:largest]
        a, b = factors(after.adapter, layer)
        np.testing.assert_allclose(a, mean_a, rtol=0, atol=1e-12)
        np.testing.assert_allclose(b, mean_b, rtol=0, atol=1e-12)
    heads = np.average([one.adapter[HEAD].numpy() for one in updates], axis=0, weights=sizes)
    np.testing.assert_allclose(after.adapter[HEAD].numpy(), heads, rtol=1e-12)
    assert list(after.adapter) == list(previous)


def test_clients_with_products_of_zero_have_equal_weights():
    rng = np.random.default_rng(0)
    updates = [sent(client, drawn(rng, 2), size) for client, size in (("a", 3), ("b", 1))]
    for update in updates:
        for layer in SHAPES:
            update.adapter[names(layer)[1]].zero_()
    after = aggregated(HetLoRA(), drawn(rng, 2), updates, {"a": 2, "b": 2}, 2).adapter
    for layer in SHAPES:
        expected = (factors(updates[0].adapter, layer)[0] + factors(updates[1].adapter, layer)[0]) / 2
        np.testing.assert_allclose(factors(after, layer)[0], expected, rtol=1e-12)


def test_a_cohort_of_one_client_with_the_full_rank_is_local_training():
    rng = np.random.default_rng(0)
    one = drawn(rng, 4)
    for method in (HetLoRA(), HetLoRA(gamma=1.0, weights="samples")):
        after = aggregated(method, drawn(rng, 4), [sent("a", one, 7)], {"a": 4, "b": 2}, 4).adapter
        for layer in SHAPES:
            np.testing.assert_allclose(product(after, layer), product(one, layer), rtol=0, atol=1e-12)


def test_the_order_of_updates_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    previous = drawn(rng, 5)
    updates = [sent(f"{i}", drawn(rng, rank, 1 + i % 2), i + 1) for i, rank in enumerate((5, 2, 3))]
    known = {"0": 5, "1": 2, "2": 3}
    found = [aggregated(HetLoRA(), previous, order, known, 5) for order in permutations(updates)]
    assert all(identical(found[0], one) for one in found)


@pytest.mark.parametrize("ranks", [None, [8]])
def test_without_its_weights_and_pruning_equal_ranks_give_fedavg(federation, ranks):
    changes = {"federation.depths": [12], "federation.ranks": ranks, "federation.clients_per_round": 2}
    ours, theirs = (federate(federation({**changes, "method": one})) for one in (PLAIN, "all_large"))
    for left, right in zip(ours, theirs, strict=True):
        assert identical(left.state.adapter, right.state.adapter)
        metrics = dict(left.metrics)
        assert metrics.pop(MEAN_RANK, 8.0) == 8.0
        assert metrics == dict(right.metrics)


@given(st.integers(1, 6), st.sampled_from([0.3, 0.5, 0.99]), st.integers(1, 3), st.integers(0, 2**31))
def test_the_regulariser_and_its_gradients_are_the_papers(rank, gamma, least, seed):
    method, adapter = HetLoRA(gamma=gamma, least_rank=least), drawn(np.random.default_rng(seed), rank)
    leaves = {name: one.requires_grad_() for name, one in adapter.items() if name != HEAD}
    kept = method.pruned(rank)
    layers = [tuple(adapter[name].detach().flatten(1).numpy() for name in names(layer)) for layer in SHAPES]
    value = method.tail(leaves)
    assert value.item() == pytest.approx(reference.tail(layers, kept), rel=1e-12)
    gradients = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    for layer, expected in zip(SHAPES, reference.tail_gradients(layers, kept), strict=True):
        for name, one in zip(names(layer), expected, strict=True):
            np.testing.assert_allclose(gradients[name].flatten(1).numpy(), one, rtol=1e-12, atol=1e-14)


def test_the_regulariser_has_gradients_of_zero_where_b_is_zero():
    """A square root would have a gradient that is not a number."""
    leaves = {name: one for name, one in drawn(np.random.default_rng(0), 3).items() if name != HEAD}
    leaves = {name: (one if "lora_A" in name else 0 * one).requires_grad_() for name, one in leaves.items()}
    gradients = torch.autograd.grad(HetLoRA(gamma=0.5).tail(leaves), list(leaves.values()))
    assert all(torch.equal(one, torch.zeros_like(one)) for one in gradients)


def test_the_objective_is_the_cross_entropy_plus_the_regulariser_of_the_blocks_that_the_client_holds(federation):
    """The model has factors of the client's rank during its training."""
    small = federation({"method": PRUNING, "lora.rank": 6})
    generator, walk = torch.Generator().manual_seed(0), (0, 2, 5)
    state = {name: torch.randn(one.shape, generator=generator) for name, one in small.initial_state().adapter.items()}
    images, labels = small.clients[0].train.take(torch.arange(4))
    for rank in (None, 5):
        small.model.load_adapter(state)
        with holding(small.model, rank, 1.0):
            found, plain = (
                objective(small.model, images, labels, walk).item()
                for objective in (small.method.objective(1, 2), cross_entropy)
            )
        held = {name: state[name] for name in names_within(state, walk) if ".lora_" in name}
        own = cut(held, rank)
        layers = [
            tuple(own[name.replace("lora_A", which)].flatten(1).double().numpy() for which in ("lora_A", "lora_B"))
            for name in own
            if ".lora_A." in name
        ]
        assert len(layers) == 6
        assert found - plain == pytest.approx(reference.tail(layers, 3 if rank is None else 2), rel=1e-4)
    for method in (HetLoRA(gamma=1.0), HetLoRA(penalty=0.0)):
        assert method.objective(1, 2) is cross_entropy  # such clients train together


@pytest.mark.parametrize("ranks", [None, [8, 5, 2]])
def test_clients_prune_their_ranks(federation, tmp_path, ranks):
    """Ranks fall to at least `least_rank`, updates have the new ranks, and the next round starts from them."""
    changes = {"federation.ranks": ranks, "federation.rounds": 4, "federation.depths": [4, 2, 3], "optimizer.lr": 0.01}
    small = federation({"method": PRUNING, **changes})
    start, *rounds = federate(small)
    first = dict(zip(["inverted", "noisy", "plain"], [5, 2, 8], strict=True)) if ranks else {}
    assert start.state.ranks == {client.id: first.get(client.id) for client in small.clients}
    before = {client: rank or 8 for client, rank in start.state.ranks.items()}
    assert {client: rank or 8 for client, rank in rounds[0].state.ranks.items()} == before  # B was zero
    for result in rounds:
        after = result.state.ranks
        for client, rank in before.items():
            assert after[client] in (rank, small.method.pruned(rank))
        assert result.metrics[MEAN_RANK] == sum(after.values()) / 3
        before = after
    largest = max(before.values())
    assert 2 <= largest < 8
    sent_down = [result.metrics["bytes/down"] for result in rounds]
    assert sent_down[-1] < sent_down[0]
    rows = small.allocate(rounds[-1].state, small.cohort(4), 4)
    assert {client: row.rank for client, row in rows.items()} == before
    for name, tensor in rounds[-1].state.adapter.items():  # components that no client reaches are gone
        if ".blocks.0." in name:
            assert not tensor.narrow(0 if "lora_A" in name else 1, largest, 8 - largest).any()
    save(tmp_path / "checkpoint", Checkpoint(2, rounds[1].state, ()))
    read = load(tmp_path / "checkpoint", like=small.initial_state()).state
    assert identical(read, rounds[1].state)
    resumed = federate(small, replace(rounds[1], state=read))
    assert identical_rounds(resumed, rounds[2:])


def test_a_client_prunes_only_if_its_last_components_became_smaller(federation):
    small = federation({"method": {"name": "hetlora", "gamma": 0.5}, "lora.rank": 4, "lora.position": "l1"})
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(one.shape, generator=generator) for name, one in small.initial_state().adapter.items()}
    state = replace(small.initial_state(), adapter=given)
    for factor, expected in ((0.9, 2), (1.0, 4), (1.1, 4)):
        own = {name: one * factor for name, one in given.items()}
        update = replace(sent("plain", own), allocation=LayerAllocation.of(list(range(12))))
        found = small.method._cut(state, update)
        assert rank_of(found.adapter) == expected
        assert found.allocation.rank == (None if expected == 4 else 2)
        assert all(torch.equal(one, cut(own, expected)[name]) for name, one in found.adapter.items())


@pytest.mark.parametrize("base", [{"name": "fedprox", "mu": 0.1}, {"name": "feddyn", "alpha": 0.1}])
def test_pruned_clients_combine_with_base_optimizers_and_attacks(federation, base):
    small = federation({
        "method": PRUNING, "base_optimizer": base, "federation.malicious_share": 0.34, "optimizer.lr": 0.01,
        "federation.rounds": 3, "federation.ranks": [8, 5, 4], "federation.depths": [4, 2, 3],
    })  # fmt: skip
    *_, last = federate(small)
    assert last.metrics[MEAN_RANK] < 17 / 3
    assert all(tensor.isfinite().all() for tensor in last.state.adapter.values())


def test_ranks_that_are_drawn_in_each_round_need_a_method_that_does_not_prune(federation):
    small = federation({"method": PLAIN, "federation.ranks": "dynamic"})
    seen = [result.metrics[MEAN_RANK] for result in islice(federate(small), 1, None)]
    ranks = [[client.rank for client in small.cohort(round)] for round in (1, 2)]
    assert seen == [sum(one) / 3 for one in ranks]
    assert ranks[0] != ranks[1]


def test_two_rounds_of_clients_with_unequal_ranks_and_depths(federation):
    """After each round, the server's factors are the papers' weighted means of the padded factors."""
    ranks = {"federation.ranks": [6, 3, 2], "lora.rank": 6, "federation.depths": [12, 6, 12], "local.steps": 1}
    for before, updates, after in played(federation({**ranks, "method": "hetlora"})):
        layers = sorted({name.partition(".lora_A")[0] for name in before.adapter if ".lora_A." in name})
        held = [[layer for layer in layers if names(layer)[0] in one.adapter] for one in updates]
        norms = [
            reference.weight([factors(one.adapter, layer) for layer in own])
            for one, own in zip(updates, held, strict=True)
        ]
        for layer in layers:
            holders = [number for number, own in enumerate(held) if layer in own]
            trained = [factors(updates[number].adapter, layer) for number in holders]
            means = reference.padded_mean([norms[number] for number in holders], trained, 6)
            for ours, expected in zip(factors(after.adapter, layer), means, strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)
