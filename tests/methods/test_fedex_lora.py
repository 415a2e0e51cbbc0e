"""Properties of FedEx-LoRA, and its runs against tests/references/folding.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.methods.fedex_lora import FedExLoRA, FedExState
from fedsweep.training.aggregation import layerwise_mean, lora_residual
from fedsweep.training.folding import residual_factors
from tests.federation.test_whole_runs import BASES, COMMON, compare, doubled, world_of
from tests.methods.one_layer import (
    FOLDED,
    HEAD,
    OUT,
    ROW,
    WIDTH,
    A,
    B,
    Replica,
    learners,
    mean_of_products,
    random_updates,
    sent,
    server_of,
    start_of,
    trainer_at,
    weight_of,
)
from tests.methods.test_flora import RANKED
from tests.references import folding as reference

METHOD, FROZEN = FedExLoRA(), np.random.default_rng(8).normal(size=(OUT, WIDTH))
SMALL = {"method": "fedex_lora", "federation.depths": [12], "lora.dropout": 0.0}


def begun(dtype=torch.float64) -> FedExState:
    """Return a state with factors B that are not zero, as in a later round."""
    drawn = torch.randn(OUT, 3, generator=torch.Generator().manual_seed(5))
    return FedExState(start_of(dtype) | {B: drawn.to(dtype)}, (0,))


@pytest.mark.parametrize("rule", ["held", "over_rank", "over_sqrt_rank"])
@pytest.mark.parametrize("ranks", [[3, 3], [1, 3], [2, 1]])
def test_rounds_equal_the_numpy_reference_and_the_weights_of_every_client(rule, ranks):
    """Clients know only what they receive: their factors, and all residuals, also those of rounds without them."""
    server = server_of(rule)
    scaling, everyone = server.lora.effective_scaling, learners(server, [*ranks, 2], [0.25, 0.75, 0.25])
    state, cohorts = FedExState(start_of(), (0,)), [[0, 1], [2, 1], [0, 1]]
    first = [state.adapter[name].numpy() for name in (A, B)]
    known = [[everyone[one] for one in cohort] for cohort in cohorts]
    expected = list(reference.fedex(FROZEN, *first, scaling, known))
    replicas = [Replica(FROZEN, scaling) for _ in everyone]
    for round, cohort in enumerate(cohorts, start=1):
        state = METHOD.begin_round(state, server, trainer_at(round))
        for one in replicas:
            one.hear(round, METHOD.broadcast(state))
        updates = []
        for number in cohort:
            one = everyone[number]
            received = METHOD.received(state, f"client {number}", replace(ROW, rank=one.rank))
            assert set(received) == {A, B, HEAD}
            own_a, own_b = received[A].numpy(), received[B].numpy() * scaling / one.scaling
            assert len(own_a) == one.rank
            a, b = one.descend(replicas[number].weight, own_a, own_b)
            updates.append(sent(number, 4 * one.share, a, b * one.scaling / scaling))
        state = METHOD.aggregate(state, updates, server)
        weight, a, b = expected[round - 1]
        for found, known in (
            (FROZEN + state.adapter[FOLDED].numpy(), weight),
            (state.adapter[A], a),
            (state.adapter[B], b),
        ):
            np.testing.assert_allclose(found, known, rtol=1e-11, atol=1e-13)
    missed = Replica(FROZEN, scaling)
    for one in replicas:
        one.hear(4, METHOD.broadcast(state))
        np.testing.assert_allclose(one.weight, expected[-1][0], rtol=1e-11, atol=1e-13)
    missed.hear(4, METHOD.broadcast(state))
    assert np.abs(missed.weight - expected[-1][0]).max() > 1e-6


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("ranks", [[3, 3, 3], [1, 3, 2], [2, 1, 1], [3], [2]])
def test_the_new_model_is_the_exact_mean_of_products(ranks, dtype, error):
    """The factors are the means, and the residual makes up for the error of their product."""
    state, server = begun(dtype), server_of()
    scaling, updates = server.lora.effective_scaling, random_updates(ranks, [10, 30, 20][: len(ranks)], dtype=dtype)
    for _ in range(2):
        after = METHOD.aggregate(state, updates, server)
        mean = layerwise_mean(state.adapter, updates, server.aggregation)
        assert torch.equal(after.adapter[A], mean[A])
        assert torch.equal(after.adapter[B], mean[B])
        before = state.adapter[FOLDED].double().numpy()
        expected = scaling * mean_of_products(updates)
        found = weight_of(after, -before, scaling)
        assert np.linalg.norm(found - expected) <= error * np.linalg.norm(expected)
        residual = lora_residual(state.adapter, updates, server.aggregation, after.adapter, scaling)
        assert residual <= error
        assert residual < lora_residual(state.adapter, updates, server.aggregation) or len(ranks) == 1
        state = after


@pytest.mark.parametrize(
    ("ranks", "columns"),
    [
        ([3, 3, 3], 2 * 3),  # (K - 1) r
        ([3, 3], 3),
        ([3], None),
        ([1, 3, 2], 2 + 2 + 1),  # all but one of three, both of the two that reach row 2 and the correction, ...
        ([2, 2], 2 + 1),  # row 3 keeps its values, and its product is subtracted
        ([2], 1),
    ],
)
def test_the_residual_has_as_few_columns_as_its_largest_rank(ranks, columns):
    """The number of columns is the rank of the residual of random factors."""
    state, updates = begun(), random_updates(ranks, [10, 30, 20][: len(ranks)])
    mean = layerwise_mean(state.adapter, updates, server_of().aggregation)
    found = residual_factors(A, B, mean, [(one.num_examples, one.adapter) for one in updates])
    if columns is None:
        assert found is None
        return
    left, right = found
    assert (left.shape, right.shape) == ((OUT, columns), (columns, WIDTH))
    expected = mean_of_products(updates) - mean[B].numpy() @ mean[A].numpy()
    np.testing.assert_allclose(left.numpy() @ right.numpy(), expected, rtol=1e-11, atol=1e-12)
    assert np.linalg.matrix_rank(expected) == min(columns, OUT)


def test_rows_that_no_client_ever_reached_are_not_sent():
    state, updates = FedExState(start_of(), (0,)), random_updates([2, 2], [10, 30])
    after = METHOD.aggregate(state, updates, server_of())
    assert after.residual[A].shape == (2, WIDTH)
    assert METHOD.aggregate(state, updates[:1], server_of()).residual == {}


def test_the_smaller_form_of_the_residual_is_sent():
    """A matrix of 5 x 7 has fewer values than factors with three columns or more."""
    state, server = begun(), server_of()
    two, three = (METHOD.aggregate(state, random_updates([3] * count, [1] * count), server) for count in (2, 3))
    assert {name: tuple(one.shape) for name, one in two.residual.items()} == {FOLDED: (OUT, WIDTH)}
    assert set(three.residual) == {FOLDED}
    narrow = METHOD.aggregate(FedExState(start_of(), (0,)), random_updates([1, 1], [1, 1]), server)
    assert {name: tuple(one.shape) for name, one in narrow.residual.items()} == {A: (1, WIDTH), B: (OUT, 1)}


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_run_broadcasts_each_residual_to_all_clients(federation, clients):
    changes = {"federation.clients_per_round": clients, "lora.position": "l0", "lora.rank": 2, "local.steps": 1}
    _, first, second = federate(federation({**SMALL, **changes}))
    head, factors = 64 * 10 + 10, 12 * 2 * (64 + 64)
    assert first.metrics["bytes/down"] == first.metrics["bytes/up"] == 4 * clients * (head + factors)
    residuals = 3 * (clients - 1) * factors  # (K - 1) r columns for each layer, to all three clients
    assert second.metrics["bytes/down"] == 4 * (clients * (head + factors) + residuals)
    assert second.metrics["bytes/up"] == first.metrics["bytes/up"]
    assert all(result.metrics["lora/residual"] <= 1e-6 for result in (first, second))


@pytest.mark.parametrize("changes", [{}, {"federation.ranks": [3, 8, 5]}])
def test_a_cohort_of_one_is_local_training(federation, changes):
    """In two rounds, the server's predictions equal those of the only client after its training."""
    small = federation({**SMALL, "federation.clients_per_round": 1, **changes})
    images = small.domains[0].test.take(torch.arange(8))[0]
    start, *rounds = federate(small)
    for before, after in zip([start, *rounds], rounds, strict=False):
        state, trainer, cohort = before.state, small.trainer.at(after.round), small.cohort(after.round)
        rows = small.allocate(state, cohort, after.round)
        (update,) = METHOD.local_updates(state, cohort, rows, trainer)
        rank = cohort[0].rank or 8
        zeros = {name: torch.zeros_like(one) for name, one in state.adapter.items() if ".lora_" in name}
        trained = {name: one.clone() for name, one in state.adapter.items()} | zeros
        for name, one in update.adapter.items():
            place = (slice(rank),) if ".lora_A." in name else (slice(None), slice(rank)) if ".lora_B." in name else ()
            trained[name][place] = one
        logits = []
        for adapter in (trained, after.state.adapter, state.adapter):
            small.model.load_adapter(adapter)
            with torch.no_grad():
                logits.append(small.model.eval()(images))
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
        assert (logits[0] - logits[2]).abs().max() > 100 * (logits[0] - logits[1]).abs().max()


@pytest.mark.parametrize(
    ("base", "changes"),
    [("fedavg", {}), ("fedavg", RANKED), ("fedprox", RANKED), ("feddyn", {})],
    ids=["full", "unequal", "fedprox", "feddyn"],
)
def test_a_whole_run_equals_the_reference(federation, base, changes):
    optimizer = {"base_optimizer": {"name": base, **BASES[base]}}
    small = doubled(federation({**COMMON, "method": "fedex_lora", **optimizer, **changes}))
    lora = small.server.lora
    played = reference.FedExLoRA(world_of(small, scaling=lora.effective_scaling), small.fresh)
    played.ranks = {one.id: one.rank or lora.rank for one in small.clients}
    played.scalings = {client: lora.scaling_of(rank) for client, rank in played.ranks.items()}
    for result in compare(small, played):
        assert result.metrics["lora/residual"] <= 1e-12
        assert any(one.any() for name, one in result.state.adapter.items() if name.endswith(".folded"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora.patch_embed": True}, "`lora.patch_embed` must be false for `method` fedex_lora, which changes frozen "
         "weights of linear layers only, but it is true"),
        ({"aggregation.lora": "product_svd"}, "`aggregation.lora` must be factors for `method` fedex_lora, which has a "
         "rule of its own, but it is product_svd"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_rejected(tiny, changes, sentence):
    with pytest.raises(UserError) as refusal:
        tiny.override({"method": "fedex_lora", **changes}, "test")
    assert str(refusal.value) == f"test: {sentence}."
