"""Properties of raFLoRA, and its aggregation against tests/references/raflora.py."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.federation.rounds import federate
from fedsweep.methods.flexlora import FlexLoRA
from fedsweep.methods.raflora import RaFLoRA
from fedsweep.models.client_rank import cut
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.aggregation import energy_beyond
from fedsweep.types import ServerState
from tests.methods.adapters import SHAPES, drawn, factors, layers_of, names, played, product, sent, server
from tests.references import flexlora
from tests.references import raflora as reference

LEVELS = [1, 3, 4]


def aggregated(previous, updates, rank, ranks=(), method=None):
    return (method or RaFLoRA()).aggregate(ServerState(previous, (0, 1)), updates, server(rank, ranks)).adapter


@given(
    st.lists(st.tuples(st.sampled_from(LEVELS), st.integers(1, 2)), min_size=1, max_size=4),
    st.integers(4, 6),
    st.integers(0, 2**31),
)
def test_partitions_are_averaged_over_the_clients_that_reach_them(clients, full, seed):
    """Also if no client of the cohort reaches a partition, and if the server's rank exceeds all ranks of clients."""
    rng = np.random.default_rng(seed)
    previous = drawn(rng, full)
    updates = [sent(f"{i}", drawn(rng, *one), int(rng.integers(1, 50))) for i, one in enumerate(clients)]
    after = aggregated(previous, updates, full, LEVELS)
    for layer in SHAPES:
        holders = [one for one in updates if layer in layers_of(one.adapter)]
        if not holders:
            assert all(torch.equal(after[name], previous[name]) for name in names(layer))
            continue
        sizes, trained = [one.num_examples for one in holders], [factors(one.adapter, layer) for one in holders]
        whole = reference.partitioned(sizes, trained, LEVELS, factors(previous, layer))
        for rank in {*LEVELS, full}:
            expected = flexlora.best(whole, rank)
            np.testing.assert_allclose(product(after, layer, rank), expected, rtol=0, atol=1e-10)


@given(st.integers(1, 4), st.integers(4, 6), st.integers(0, 2**31))
def test_with_equal_ranks_the_method_is_flexlora(rank, full, seed):
    """The factors are bit-identical, also if the server's rank is larger than that of all clients."""
    rng = np.random.default_rng(seed)
    previous = drawn(rng, full)
    updates = [sent(f"{i}", drawn(rng, rank, 1 + i % 2), i + 1) for i in range(3)]
    ours = aggregated(previous, updates, full, [rank])
    assert identical(ours, aggregated(previous, updates, full, [rank], FlexLoRA()))


def test_runs_with_equal_ranks_are_those_of_flexlora(federation):
    changes = {"federation.clients_per_round": 2, "federation.ranks": None}
    runs = (federate(federation({**changes, "method": name})) for name in ("raflora", "flexlora"))
    assert identical_rounds(*runs)
    unequal = {**changes, "federation.ranks": [8, 4, 2]}
    runs = (federate(federation({**unequal, "method": name})) for name in ("raflora", "flexlora"))
    assert not identical_rounds(*runs)


def test_a_cohort_of_one_client_with_the_full_rank_is_local_training():
    rng = np.random.default_rng(0)
    one = drawn(rng, 4)
    after = aggregated(drawn(rng, 4), [sent("a", one, 7)], 4, LEVELS)
    for layer in SHAPES:
        np.testing.assert_allclose(product(after, layer), product(one, layer), rtol=0, atol=1e-12)


def test_the_order_of_updates_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    previous = drawn(rng, 4)
    updates = [sent(f"{i}", drawn(rng, rank, 1 + i % 2), i + 1) for i, rank in enumerate((4, 1, 3))]
    found = [aggregated(previous, order, 4, LEVELS) for order in permutations(updates)]
    assert all(identical(found[0], one) for one in found)


def test_a_cohort_of_small_ranks_keeps_the_larger_components():
    """If the clients send back what they received, the server's products do not change."""
    previous = aggregated(
        drawn(np.random.default_rng(1), 4), [sent("a", drawn(np.random.default_rng(0), 4))], 4, LEVELS
    )
    after = aggregated(previous, [sent("a", cut(previous, 1)), sent("b", cut(previous, 3))], 4, LEVELS)
    for layer in SHAPES:
        np.testing.assert_allclose(product(after, layer), product(previous, layer), rtol=0, atol=1e-12)


def test_two_rounds_of_clients_with_unequal_ranks_and_depths(federation):
    """After each round, the server's factors are the best approximation of the partitions' means."""
    ranks = {"federation.ranks": [2, 3, 6], "lora.rank": 6, "federation.depths": [12, 6, 3], "local.steps": 1}
    for before, updates, after in played(federation({**ranks, "method": "raflora"})):
        assert {len(one.adapter[next(iter(one.adapter))]) for one in updates} == {2, 3, 6}
        for a in (name for name in before.adapter if ".lora_A." in name):
            layer = a.partition(".lora_A")[0]
            holders = [one for one in updates if a in one.adapter]
            trained = [factors(one.adapter, layer) for one in holders]
            sizes = [one.num_examples for one in holders]
            whole = reference.partitioned(sizes, trained, [2, 3, 6], factors(before.adapter, layer))
            for rank in (2, 3, 6):
                error = np.linalg.norm(product(after.adapter, layer, rank) - flexlora.best(whole, rank))
                assert error <= 1e-5 * max(np.linalg.norm(whole), 1e-12)


def collapse(method, rounds, ranks, train):
    """Return the energy beyond the smallest rank after each round; clients of one image each train with `train`."""
    full, rng = max(ranks), np.random.default_rng(0)
    state = aggregated(drawn(rng, full), [sent("a", drawn(rng, full))], full, ranks, method)
    found = [energy_beyond(min(ranks), state, state)]
    for _ in range(rounds):
        updates = [sent(f"{i}", train(cut(state, rank))) for i, rank in enumerate(ranks)]
        state = aggregated(state, updates, full, ranks, method)
        found.append(energy_beyond(min(ranks), state, state))
    return found


def test_without_training_flexlora_loses_the_larger_ranks_and_raflora_keeps_them():
    """One of four clients has rank 4. FlexLoRA multiplies components beyond rank 1 by 1/4 in every round."""
    ranks = [4, 1, 1, 1]
    flex = collapse(FlexLoRA(), 5, ranks, lambda state: state)
    kept = collapse(RaFLoRA(), 5, ranks, lambda state: state)
    odds = [one / (1 - one) for one in flex]
    np.testing.assert_allclose(odds, [odds[0] / 16**round for round in range(6)], rtol=1e-9)
    np.testing.assert_allclose(kept, [flex[0]] * 6, rtol=1e-9)
    assert flex[0] > 0.1


@pytest.mark.parametrize("steps", [1, 5])
def test_the_ranks_collapse_under_flexlora_also_if_clients_train_towards_a_full_target(steps):
    """Clients take gradient steps on ||B A - T||^2 / 2, with the same target T of full rank."""
    rng = np.random.default_rng(3)
    targets = {
        layer: torch.tensor(rng.normal(size=(out, int(np.prod(inside))))) for layer, (inside, (out,)) in SHAPES.items()
    }

    def train(state):
        own = {name: one.clone() for name, one in state.items()}
        for layer, target in targets.items():
            a, b = (own[name] for name in names(layer))
            for _ in range(steps):
                missed = b.flatten(1) @ a.flatten(1) - target
                step_a, step_b = b.flatten(1).T @ missed, missed @ a.flatten(1).T
                a -= 0.01 * step_a.view_as(a)
                b -= 0.01 * step_b.view_as(b)
        return own

    ranks = [4, 2, 1, 1]
    flex, kept = (collapse(method, 20, ranks, train) for method in (FlexLoRA(), RaFLoRA()))
    best = sum((np.linalg.svd(one.numpy(), compute_uv=False)[1:4] ** 2).sum() for one in targets.values())
    best /= sum((np.linalg.svd(one.numpy(), compute_uv=False)[:4] ** 2).sum() for one in targets.values())
    assert flex[-1] < flex[0] / 2
    assert flex[-1] < best / 2 < 0.8 * best < kept[-1]
