"""Clients of unequal rank: what they train equals the training of a model of their own rank."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from fedsweep.federation.rounds import federate
from fedsweep.models.client_rank import cut
from fedsweep.models.names import rank_dim
from fedsweep.testing.compare import identical
from fedsweep.testing.rounds import one_round
from fedsweep.training.attacks import attacked
from fedsweep.training.drift_and_structural_bias import REPRESENTATION
from tests.federation import test_whole_runs as whole
from tests.references import ranks as reference

SCALES = {"held": 2.0, "over_rank": 8 / 3, "over_sqrt_rank": 8 / 3**0.5}
"""The scaling of a client of rank 3 if alpha is 8 and the full rank is 4."""
OPTIMIZERS = [
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5},
    {"name": "adam", "lr": 0.01, "decoupled": True},
]


def doubled(federation):
    """Return a federation that computes in double precision."""
    federation.model.double()
    fresh = {name: tensor.double() for name, tensor in federation.fresh.items()}
    return replace(federation, fresh=fresh)


def started(federation, rank=4, scaling=1.0):
    """Return the server's tensors with factors B that are not zero, cut to a rank and divided by a scaling."""
    generator = torch.Generator().manual_seed(3)
    state = federation.method.init(federation.model, federation.clients, federation.server)
    full = {}
    for name, tensor in state.adapter.items():
        shape = list(tensor.shape)
        if (dim := rank_dim(name)) is not None:
            shape[dim] = 4
        drawn = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        full[name] = drawn if rank_dim(name) is not None else tensor
    return replace(state, adapter=cut(full, rank, 1 / scaling))


def trained(federation, state):
    """Return the update of the first client in the first round."""
    cohort = federation.cohort(1)[:1]
    rows = federation.allocate(state, cohort, 1)
    return federation.method.local_updates(state, cohort, rows, federation.trainer.at(1))[0]


@pytest.mark.parametrize("aggregation", ["factors", "freeze_a"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam"])
@pytest.mark.parametrize("rule", SCALES)
def test_a_client_of_smaller_rank_trains_like_a_model_of_its_rank(federation, rule, optimizer, dropout, aggregation):
    """In double precision, the updates are bit-identical, with every scaling, optimizer and dropout rate.

    If the scalings of the client and the server differ, so do the units of B, and rounding changes the last digit.
    """
    common = {
        "method": "fedra",
        "optimizer": optimizer,
        "base_optimizer": {"name": "fedprox", "mu": 0.1},
        "lora.dropout": dropout,
        "aggregation.lora": aggregation,
        "lora.position": "both",
    }
    ranks = {"lora.rank": 4, "lora.alpha": 8.0, "lora.scaling": None, "lora.rank_scaling": rule}
    resident = doubled(federation({**common, **ranks, "federation.ranks": [3]}))
    own = doubled(federation({**common, "lora.rank": 3, "lora.alpha": None, "lora.scaling": SCALES[rule]}))
    factor, full = SCALES[rule] / resident.server.lora.effective_scaling, started(resident)
    ours, theirs = trained(resident, full), trained(own, started(own, 3, factor))
    expected = {name: factor * one if rank_dim(name) == 1 else one for name, one in theirs.adapter.items()}
    assert set(ours.adapter) == set(expected)
    for name, tensor in ours.adapter.items():
        assert tensor.shape == expected[name].shape
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0 if factor == 1 else 1e-15)
        assert not torch.equal(tensor, cut(full.adapter, 3)[name])


UNEQUAL = {"lora.rank": 4, "federation.ranks": [4, 1, 2]}


@pytest.mark.parametrize("base", whole.BASES)
def test_whole_runs_with_unequal_ranks_equal_the_reference(federation, base):
    """Three rounds of two of three clients, whose depths are equal, in double precision."""
    changes = {"method": "all_large", "federation.depths": [4], **UNEQUAL}
    changes |= {"base_optimizer": {"name": base, **whole.BASES[base]}}
    small = whole.doubled(federation({**whole.COMMON, **changes}))
    played = reference.Ranked(whole.world_of(small), small.fresh)
    played.ranks = {one.id: one.rank for one in small.clients}
    whole.compare(small, played)


@pytest.mark.parametrize("attack", ["reversed_update", "reversed_weights"])
@pytest.mark.parametrize("scaling", ["held", "over_rank"])
def test_a_malicious_client_of_smaller_rank_reverses_its_own_rows_and_columns(federation, attack, scaling):
    """The reversed tensors are in the server's scaling, like those of honest clients."""
    changes = {"method": "all_large", "lora.alpha": 8.0, "lora.scaling": None, "lora.rank_scaling": scaling}
    small = federation({**UNEQUAL, **changes})
    start, updates = one_round(small)
    full = start.state.adapter
    reversed_ = attacked({one.id: full for one in small.clients}, updates, attack)
    assert [one.allocation.rank for one in reversed_] == [1, 2, 4]
    for honest, malicious in zip(updates, reversed_, strict=True):
        rank = honest.allocation.rank
        for name, sent in malicious.adapter.items():
            given = full[name][:rank] if "lora_A" in name else full[name][:, :rank] if "lora_B" in name else full[name]
            step = honest.adapter[name] - given
            expected = given - step if attack == "reversed_update" else -honest.adapter[name]
            torch.testing.assert_close(sent, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("base", ["fedavg", "feddyn"])
def test_a_run_with_malicious_clients_of_unequal_rank_is_another_run(federation, base):
    changes = {**UNEQUAL, "base_optimizer": base, "local.steps": 1}
    runs = [list(federate(federation({**changes, "federation.malicious_share": share}))) for share in (0.0, 0.4)]
    assert all(one.isfinite().all() for one in runs[1][-1].state.adapter.values())
    assert not identical(runs[0][-1].state.adapter, runs[1][-1].state.adapter)
    # A malicious client remembers the tensors that it trained, so the first round's memories are equal.
    assert identical(runs[0][1].state.client_memory, runs[1][1].state.client_memory)


def test_drift_compares_the_functions_of_clients_of_unequal_rank(federation):
    """The metric equals the distances between models whose weights are W + s B A, with each client's own factors."""
    changes = {"method": "all_large", "evaluation.metrics": ["drift"], "federation.rounds": 1, **UNEQUAL}
    small = federation({**changes, "optimizer": {"name": "sgd", "lr": 0.5}})
    _, first = federate(small)
    start, updates = one_round(small)
    images, features = small._probed(), []
    for update in updates:
        small.model.load_adapter(start.state.adapter)
        weights = []
        for name, a in update.adapter.items():
            if "lora_A" in name:
                layer = small.model.get_submodule(name.partition(".lora_")[0])
                b = update.adapter[name.replace("lora_A", "lora_B")]
                weights.append((layer.base_layer.weight, layer.base_layer.weight.data))
                layer.base_layer.weight.data = weights[-1][1] + small.server.lora.effective_scaling * b @ a
                layer.lora_B["default"].weight.data.zero_()
        with torch.no_grad():
            seen = small.model.features(small.model.walk(images, range(12)))
        features.append(seen.double().numpy())
        for weight, data in weights:
            weight.data = data
    distances = []
    for one, other in combinations(features, 2):
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        distances.append(1 - (one * other).sum(1) / norms)
    assert first.metrics[REPRESENTATION] == pytest.approx(np.mean(distances), rel=1e-3)
    assert first.metrics[REPRESENTATION] > 1e-4
