"""Malicious clients, which any federation may contain."""

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.models.names import is_statistic
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.testing.rounds import one_round
from fedsweep.training.attacks import attacked, malicious_clients
from fedsweep.types import RoundResult

IDS = [f"client-{number}" for number in range(10)]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.2, 2), (0.25, 3), (0.14, 1), (0.5, 5), (0.94, 9)])
def test_the_number_of_attackers_is_rounded_and_the_choice_does_not_depend_on_the_order(share, count):
    chosen = malicious_clients(IDS, share, seed=3)
    assert len(chosen) == count
    assert chosen == malicious_clients(list(reversed(IDS)), share, seed=3)
    assert chosen <= set(IDS)


def test_another_seed_has_other_attackers_and_a_larger_share_the_same_and_more():
    drawn = {malicious_clients(IDS, 0.2, seed) for seed in range(20)}
    assert len(drawn) > 5
    for seed in range(20):
        assert malicious_clients(IDS, 0.2, seed) <= malicious_clients(IDS, 0.4, seed)


@pytest.mark.parametrize("attack", ["reversed_update", "reversed_weights"])
def test_only_attackers_updates_are_reversed(federation, attack):
    start, updates = one_round(federation())
    sent = start.state.adapter
    after = attacked({"noisy": sent}, updates, attack)
    assert len(after) == len(updates) == 3
    for before, now in zip(updates, after, strict=True):
        if before.client != "noisy":
            assert now is before
            continue
        for name, tensor in before.adapter.items():
            expected = -tensor if attack == "reversed_weights" else sent[name] - (tensor - sent[name])
            torch.testing.assert_close(now.adapter[name], expected, rtol=1e-6, atol=1e-6)
            assert not torch.equal(now.adapter[name], tensor) or not tensor.any()


def test_a_share_of_zero_changes_nothing_and_a_positive_share_does(federation):
    none = {"federation.malicious_share": 0.0, "federation.attack": "reversed_weights"}
    clean, none, some = (
        list(federate(federation({"federation.rounds": 1, **changes})))
        for changes in ({}, none, {"federation.malicious_share": 0.34})
    )
    assert [one.metrics for one in clean] == [one.metrics for one in none]
    assert not identical(clean[-1].state.adapter, some[-1].state.adapter)


def test_running_statistics_and_private_tensors_are_not_reversed(federation, random_clip):
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    method = {"name": "fedms", "global_rounds": 0, "gate": {"trunk": {"name": "digits_resnet"}}}
    start, updates = one_round(federation({"method": method, **clip, "partition.validation_share": 0.02}))
    (before, *_), (now, *_) = (
        updates,
        attacked({updates[0].client: start.state.adapter}, updates, "reversed_weights"),
    )
    statistics = [name for name in before.adapter if is_statistic(name)]
    assert len(statistics) == 4
    assert identical(now.private, before.private)
    for name, tensor in before.adapter.items():
        assert torch.equal(now.adapter[name], tensor if name in statistics else -tensor)


def test_attackers_are_left_out_of_the_mean_over_clients(federation):
    shares = {"partition.test_share": 0.05, "federation.malicious_share": 0.34}
    built = federation(shares)
    (attacker,) = built.malicious()
    metrics = built.evaluate(built.initial_state(), 0)
    own = {client.id: metrics[f"accuracy/client/{client.id}"] for client in built.clients}
    honest = [score for client, score in own.items() if client != attacker]
    assert len(honest) == 2
    assert metrics["accuracy/clients/mean"] == pytest.approx(sum(honest) / 2)
    assert metrics["accuracy/clients/worst"] == min(honest)


def test_an_attackers_memory_is_that_of_an_honest_client(federation):
    """FedDyn remembers the same gradients for an attacker as for an honest client with the same images."""
    dyn = {"base_optimizer": {"name": "feddyn", "alpha": 1.0}, "federation.rounds": 1}
    (_, honest), (_, attacked_) = (
        federate(federation({**dyn, "federation.malicious_share": share})) for share in (0.0, 0.34)
    )
    assert identical(honest.state.client_memory, attacked_.state.client_memory)
    assert not identical(honest.state.server_memory, attacked_.state.server_memory)


def test_under_feddyn_with_attackers_a_resumed_run_equals_an_uninterrupted_one(federation, tmp_path):
    dyn = {"base_optimizer": {"name": "feddyn", "alpha": 1.0}, "federation.clients_per_round": 2}
    changes = {**dyn, "seed": 2, "federation.malicious_share": 0.34, "federation.attack": "reversed_update"}
    straight = list(federate(federation(changes)))
    fresh = federation(changes)
    assert all(fresh.malicious() <= {client.id for client in fresh.cohort(round)} for round in (1, 2))
    save(tmp_path / "checkpoint", Checkpoint(1, straight[1].state, ()))
    read = load(tmp_path / "checkpoint", like=fresh.initial_state())
    assert identical_rounds(straight[2:], federate(fresh, RoundResult(1, read.state)))


@pytest.mark.parametrize(
    ("share", "said"), [(0.95, "leave at least one of the 3 clients honest"), (0.1, "be 0 or select at least one of")]
)
def test_a_share_of_no_client_or_all_clients_is_rejected(tiny, share, said):
    with pytest.raises(UserError, match=rf"`federation\.malicious_share` must {said}"):
        tiny.override({"federation.malicious_share": share}, "test")


def test_a_malicious_share_is_rejected_with_a_single_client(tiny):
    alone = {"data.domains": ["plain"], "federation.depths": [3], "federation.malicious_share": 0.5}
    with pytest.raises(UserError, match=r"must be 0 if there is only one client, but it is 0\.5"):
        tiny.override(alone, "test")
