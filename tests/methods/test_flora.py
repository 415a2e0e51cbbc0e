"""Properties of FLoRA, and its runs against tests/references/folding.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.methods.flora import FLoRA, FLoRAState
from fedsweep.models.lora import initial_a
from fedsweep.models.names import is_folded, rank_dim
from fedsweep.training.aggregation import lora_residual
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
from tests.references import folding as reference

METHOD, FROZEN = FLoRA(), np.random.default_rng(8).normal(size=(OUT, WIDTH))
SMALL = {"method": "flora", "federation.depths": [12], "lora.dropout": 0.0}


def begun(dtype=torch.float64) -> FLoRAState:
    return FLoRAState(start_of(dtype), (0,))


@pytest.mark.parametrize("rule", ["held", "over_rank", "over_sqrt_rank"])
@pytest.mark.parametrize("ranks", [[3, 3], [1, 3], [2, 1]])
def test_two_rounds_equal_the_numpy_reference_and_the_weights_of_every_client(rule, ranks):
    """Clients know only what they receive: the head, and the stack of the round before, also outside the cohort."""
    server, state = server_of(rule), begun()
    scaling, everyone = server.lora.effective_scaling, learners(server, [*ranks, 2], [0.25, 0.75, 0.25])
    drawn = [start_of()[A].numpy()]
    drawn += [initial_a(start_of()[A], 4, "fresh adapter", round, A).numpy() for round in (2, 3)]
    cohorts = [[0, 1], [2, 1], [0, 1]]
    expected = list(reference.flora(FROZEN, drawn, [[everyone[one] for one in cohort] for cohort in cohorts]))
    replicas = [Replica(FROZEN, scaling) for _ in everyone]
    for round, cohort in enumerate(cohorts, start=1):
        state = METHOD.begin_round(state, server, trainer_at(round))
        for one in replicas:
            one.hear(round, METHOD.broadcast(state))
        updates = []
        for number in cohort:
            one, received = everyone[number], METHOD.received(state, f"client {number}", replace(ROW, rank=ranks[0]))
            assert set(received) == {HEAD}
            a, b = one.descend(replicas[number].weight, drawn[round - 1][: one.rank], np.zeros((OUT, one.rank)))
            updates.append(sent(number, 4 * one.share, a, b * one.scaling / scaling))
        state = METHOD.aggregate(state, updates, server)
        np.testing.assert_allclose(weight_of(state, FROZEN, scaling), expected[round - 1], rtol=1e-12, atol=1e-13)
        assert not state.adapter[B].any()
    missed = Replica(FROZEN, scaling)
    for one in replicas:
        one.hear(4, METHOD.broadcast(state))
        np.testing.assert_allclose(one.weight, expected[-1], rtol=1e-12, atol=1e-13)
    missed.hear(4, METHOD.broadcast(state))
    assert np.abs(missed.weight - expected[-1]).max() > 1e-3  # a client cannot leave out a round


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("ranks", [[3, 3, 3], [1, 3, 2], [2]])
def test_the_change_is_the_exact_mean_of_products_of_any_factors(ranks, dtype, error):
    state, server = begun(dtype), server_of()
    updates = random_updates(ranks, [10, 30, 20][: len(ranks)], dtype=dtype)
    for round in (1, 2):
        after = METHOD.aggregate(state, updates, server)
        expected = round * server.lora.effective_scaling * mean_of_products(updates)
        found = after.adapter[FOLDED].double().numpy()
        assert np.linalg.norm(found - expected) <= error * np.linalg.norm(expected)
        assert after.adapter[FOLDED].dtype == after.stack[A].dtype == dtype
        scaling = server.lora.effective_scaling
        residual = lora_residual(state.adapter, updates, server.aggregation, after.adapter, scaling)
        assert residual <= error
        assert residual < lora_residual(state.adapter, updates, server.aggregation) or len(ranks) == 1
        assert after.stack[A].shape == (sum(ranks), WIDTH)
        assert after.stack[B].shape == (OUT, sum(ranks))
        state = after


def test_new_factors_depend_on_seed_round_and_layer_and_only_stacked_layers_get_them():
    state, server = begun(), server_of()
    first = METHOD.begin_round(state, server, trainer_at(1))
    assert torch.equal(first.adapter[A], state.adapter[A])  # LoRA's own first values, as in other methods
    after = METHOD.aggregate(first, random_updates([3], [10]), server)
    assert torch.equal(after.adapter[A], state.adapter[A])
    second, again, third = (METHOD.begin_round(after, server, trainer_at(round)).adapter[A] for round in (2, 2, 3))
    assert torch.equal(second, again)
    assert not torch.equal(second, third)
    assert not torch.equal(second, state.adapter[A])
    assert 0.8 * WIDTH**-0.5 < second.abs().max() <= WIDTH**-0.5  # Kaiming-uniform values, as those of the first round
    idle = replace(after, stack={})
    assert torch.equal(METHOD.begin_round(idle, server, trainer_at(2)).adapter[A], after.adapter[A])


@pytest.mark.parametrize("changes", [{}, {"federation.depths": [12, 2, 1], "federation.ranks": [3, 8, 1]}])
def test_a_run_broadcasts_each_stack_to_all_clients(federation, changes):
    small = federation({**SMALL, "federation.clients_per_round": 2, **changes})
    _, first, second = federate(small)
    assert METHOD.broadcast(small.initial_state()) == {}
    head = sum(one.numel() for name, one in first.state.adapter.items() if "head" in name)
    ranks = {one.id: one.rank or 8 for one in small.clients}
    widths = [(64, 64), (128, 64)]
    of_client = {
        one.id: one.capacity * sum(ranks[one.id] * (ins + outs) for ins, outs in widths) for one in small.clients
    }
    stacked = [sum(of_client[one.id] for one in small.cohort(round)) for round in (1, 2)]
    assert first.metrics["bytes/down"] == 4 * 2 * head
    assert second.metrics["bytes/down"] == 4 * (2 * head + 3 * stacked[0])
    assert [one.metrics["bytes/up"] for one in (first, second)] == [4 * (2 * head + one) for one in stacked]
    rebuilt = {name: torch.zeros_like(one) for name, one in first.state.adapter.items() if is_folded(name)}
    for result in (first, second):
        assert result.metrics["lora/residual"] <= 1e-6
        for name, one in rebuilt.items():
            a, b = (name.replace(".folded", f".lora_{which}.default.weight") for which in "AB")
            if a in (stack := result.state.stack):
                rebuilt[name] = (one.double() + (stack[b].double() @ stack[a].double())).float()
    assert all(torch.equal(result.state.adapter[name], one) for name, one in rebuilt.items())


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_the_download_grows_with_the_cohort(federation, clients):
    changes = {"federation.clients_per_round": clients, "lora.position": "l0", "lora.rank": 2}
    _, _, second = federate(federation({**SMALL, **changes, "local.steps": 1}))
    # 12 layers of 64 x 64, factors of rank 2 for each client of the cohort, sent to 3 clients; the head to the cohort
    assert second.metrics["bytes/down"] == 4 * (3 * 12 * clients * 2 * (64 + 64) + clients * (64 * 10 + 10))


def test_a_cohort_of_one_is_local_training(federation):
    """In two rounds, the server's predictions equal those of the only client after its training."""
    small = federation({**SMALL, "federation.clients_per_round": 1})
    images = small.domains[0].test.take(torch.arange(8))[0]
    start, *rounds = federate(small)
    for before, after in zip([start, *rounds], rounds, strict=False):
        trainer = small.trainer.at(after.round)
        state = METHOD.begin_round(before.state, small.server, trainer)
        cohort = small.cohort(after.round)
        (update,) = METHOD.local_updates(state, cohort, small.allocate(state, cohort, after.round), trainer)
        logits = []
        for adapter in (state.adapter | update.adapter, after.state.adapter, before.state.adapter):
            small.model.load_adapter(adapter)
            with torch.no_grad():
                logits.append(small.model.eval()(images))
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
        assert (logits[0] - logits[2]).abs().max() > 100 * (logits[0] - logits[1]).abs().max()


RANKED = {"lora.rank": 4, "lora.scaling": None, "lora.alpha": 4.0, "lora.rank_scaling": "over_sqrt_rank"}
RANKED |= {"federation.ranks": [2, 4, 1]}


@pytest.mark.parametrize("base", ["fedavg", "fedprox"])
@pytest.mark.parametrize("changes", [{}, RANKED], ids=["full", "unequal"])
def test_a_whole_run_equals_the_reference(federation, base, changes):
    optimizer = {"base_optimizer": {"name": base, **BASES[base]}}
    small = doubled(federation({**COMMON, "method": "flora", **optimizer, **changes}))
    for name, one in small.model.named_parameters():
        if ".lora_B." in name:
            one.data.zero_()
    small = replace(small, fresh=small.model.adapter())
    lora = small.server.lora
    played = reference.FLoRA(world_of(small, scaling=lora.effective_scaling), small.fresh)
    played.ranks = {one.id: one.rank or lora.rank for one in small.clients}
    played.scalings = {client: lora.scaling_of(rank) for client, rank in played.ranks.items()}
    played.fresh_a = lambda round, name: initial_a(small.fresh[name], small.seed, "fresh adapter", round, name)
    results = compare(small, played)
    for result in results:
        assert result.metrics["lora/residual"] <= 1e-12
        assert result.metrics["lora/relative_norm"] > 0.001
        for name, one in result.state.adapter.items():
            assert rank_dim(name) != 1 or not one.any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora.patch_embed": True}, "`lora.patch_embed` must be false for `method` flora, which changes frozen "
         "weights of linear layers only, but it is true"),
        ({"base_optimizer": "feddyn"}, "`base_optimizer` feddyn stores gradients of LoRA's A and B and cannot be "
         "combined with `method` flora, which replaces A and B in every round"),
        ({"aggregation.lora": "product_svd"}, "`aggregation.lora` must be factors for `method` flora, which has a rule "
         "of its own, but it is product_svd"),
        ({"aggregation.lora": "freeze_a"}, "`aggregation.lora` must be factors for `method` flora, which has a rule "
         "of its own, but it is freeze_a"),
        ({"federation.ranks": [9]}, "`federation.ranks` must contain numbers from 1 to 8, `lora.rank`, but one is 9"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_rejected(tiny, changes, sentence):
    with pytest.raises(UserError) as refusal:
        tiny.override({"method": "flora", **changes}, "test")
    assert str(refusal.value) == f"test: {sentence}."
