"""Properties of FedSA-LoRA, and whole runs against tests/references/fedsa_lora.py."""

from dataclasses import replace

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import RESIDUAL, federate
from fedsweep.models.names import rank_dim
from fedsweep.testing.compare import moved
from fedsweep.training.costs import size_in_bytes
from tests.federation.test_whole_runs import COMMON, doubled, same, world_of
from tests.references import fedsa_lora as reference

METHOD = {"method": "fedsa_lora"}


@pytest.mark.parametrize("ranks", [[4], [4, 1, 2]])
@pytest.mark.parametrize("head", ["shared", "personal"])
def test_whole_runs_equal_the_reference(federation, head, ranks):
    """Cohorts of two of six clients, two clients for each domain, in double precision."""
    changes = {**COMMON, "method": {"name": "fedsa_lora", "head": head}, "lora.rank": 4, "federation.ranks": ranks}
    changes["federation.depths"] = [4]
    small = doubled(federation({**changes, "partition": {"name": "feature_label_skew", "clients_per_domain": 2}}))
    zeros = {name: torch.zeros_like(one) for name, one in small.fresh.items() if rank_dim(name) == 1}
    small = replace(small, fresh=small.fresh | zeros)  # as in every run, B is zero at first
    played = reference.FedSALoRA(world_of(small), small.fresh)
    played.ranks = {one.id: one.rank for one in small.clients}
    played.shared_head = head == "shared"
    _, *results = federate(small)
    assert len(results) == 3
    for result, (theta, own) in zip(results, played.rounds(), strict=True):
        same(result.state.adapter, theta)
        assert set(result.state.own) == set(own)
        for client, kept in own.items():
            same(result.state.own[client], kept)
        hits = []
        for domain in small.domains:
            images, labels = domain.test.take(torch.arange(len(domain.test)))
            logits = played.of_domain(theta, own, images, domain.name)
            hits.append(float((logits.argmax(1) == labels).double().mean()))
        assert result.metrics["accuracy/mean"] == pytest.approx(sum(hits) / 3, rel=1e-9)


def test_the_factors_b_stay_on_the_clients(federation):
    start, *results = federate(federation({**METHOD, "federation.depths": [12]}))
    adapter = start.state.adapter
    sent = {name: one for name, one in adapter.items() if rank_dim(name) != 1}
    for result in results:
        assert result.metrics["bytes/up"] == result.metrics["bytes/down"] == 3 * size_in_bytes(sent)
        assert all(not one.any() for name, one in result.state.adapter.items() if rank_dim(name) == 1)
        assert result.metrics[RESIDUAL] == 0.0
        assert all(one.any() for own in result.state.own.values() for one in own.values())
    assert {rank_dim(name) for name in moved(adapter, results[-1].state.adapter)} == {0, None}


def test_a_personal_head_is_not_sent(federation):
    changes = {"method": {"name": "fedsa_lora", "head": "personal"}, "federation.depths": [12]}
    start, *results = federate(federation(changes))
    factors = {name: one for name, one in start.state.adapter.items() if rank_dim(name) == 0}
    assert results[-1].metrics["bytes/up"] == 3 * size_in_bytes(factors)
    assert {rank_dim(name) for name in moved(start.state.adapter, results[-1].state.adapter)} == {0}


def test_a_cohort_of_one_is_local_training(federation):
    changes = {"data.domains": ["plain"], "federation.depths": [12]}
    runs = [list(federate(federation({**changes, "method": method}))) for method in ("fedsa_lora", "all_large")]
    for ours, theirs in zip(*runs, strict=True):
        own = ours.state.adapter | ours.state.own.get("plain", {})
        for name, tensor in theirs.state.adapter.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-6, atol=1e-8)
        assert ours.metrics["accuracy/mean"] == pytest.approx(theirs.metrics["accuracy/mean"])


def test_feddyn_is_rejected(federation):
    with pytest.raises(UserError, match="feddyn corrects the mean of the clients' models, but `method` fedsa_lora"):
        federation({**METHOD, "base_optimizer": "feddyn"})
