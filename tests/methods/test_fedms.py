"""Properties of FedMS, and its queue, mixture and gate against tests/references/fedms.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import predicted
from fedsweep.methods.fedms.gate import mixing
from fedsweep.methods.fedms.method import FedMSState
from fedsweep.models.activation_cache import FrozenFunction
from fedsweep.models.names import is_statistic, layer_of
from fedsweep.testing.compare import identical, identical_rounds, moved, unkept
from fedsweep.testing.rounds import one_round
from fedsweep.types import Batch, ClientUpdate, RoundResult
from tests.references import fedms as reference

GATE = {"trunk": {"name": "digits_resnet"}}


@pytest.fixture
def make(federation, random_clip) -> Callable[..., Federation]:
    """Return a function that builds a small FedMS with given hyperparameters, as in `make(global_rounds=0)`."""

    def built(changes=None, **method):
        chosen = {"name": "fedms", "global_rounds": 0, "gate": GATE, **method}
        clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp", "lora.rank": 2}
        shares = {"partition.validation_share": 0.02, "partition.test_share": 0.02, "local.steps": 3}
        return federation({"method": chosen, **clip, **shares, **(changes or {})})

    return built


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    """Return an empty cache of runs and rounds by name, which several tests share."""
    return {}


@pytest.fixture
def one_played(make, played) -> tuple[RoundResult, list[ClientUpdate]]:
    """Return the state and the updates of the first round of stage two, which tests must not change."""
    if "round" not in played:
        played["round"] = one_round(make())
    found: tuple[RoundResult, list[ClientUpdate]] = played["round"]
    return found


SEQUENCES = [
    ([0.5, 0.5, 0.5, 0.5, 0.5], 3, 0.01),
    ([0.1, 0.3, 0.5, 0.7, 0.9], 1, 0.01),
    ([0.5, 0.52, 0.53, 0.53, 0.6, 0.6, 0.59, 0.61], 2, 0.02),
    ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0], 1, 0.0),
    ([0.4, 0.41, 0.42, 0.43, 0.44, 0.45], 3, 0.02),
]


@pytest.mark.parametrize(("accuracies", "length", "threshold"), SEQUENCES)
def test_the_queue_activates_blocks_by_equation_5(make, one_played, accuracies, length, threshold):
    small = make(sal={"queue": length, "threshold": threshold, "initial": 2})
    _, (update, *others) = one_played
    state, active = small.method.begin_round(small.initial_state(), small.server, small.trainer.at(1)), [2]
    for accuracy in accuracies:
        told = replace(update, metrics={**update.metrics, "accuracy": accuracy})
        state = small.method.aggregate(state, [told], small.server)
        active.append(state.active[update.client])
    assert active == reference.active_blocks(accuracies, length, threshold, blocks=12, initial=2)
    assert {state.active[other.client] for other in others} == {2}
    assert state.queues == {update.client: tuple(accuracies[-length:])}


def test_larger_thresholds_activate_no_fewer_blocks_given_the_same_accuracies(make, one_played):
    rng, last = np.random.default_rng(0), []
    accuracies = list(np.cumsum(rng.normal(0.005, 0.02, 20)))
    server = make().server
    start, (update, *_) = one_played
    for delta in (-1.0, 0.001, 0.005, 0.01, 0.02, 1.0):
        method, state = make(sal={"threshold": delta}).method, start.state
        for accuracy in accuracies:
            told = replace(update, metrics={**update.metrics, "accuracy": accuracy})
            state = method.aggregate(state, [told], server)
        last.append(state.active[update.client])
    assert last == sorted(last)
    assert (last[0], last[-1]) == (1, 12)


def test_stage_one_is_bit_identical_to_all_large(make, federation, random_clip):
    ours = list(federate(make({"local.steps": 1}, global_rounds=5)))
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp", "lora.rank": 2}
    shares = {"partition.validation_share": 0.02, "partition.test_share": 0.02, "local.steps": 1}
    theirs = list(federate(federation({"method": "all_large", **clip, **shares})))
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        lora = {name: tensor for name, tensor in one.state.adapter.items() if not name.startswith("gate.")}
        assert identical(lora, other.state.adapter)
        assert {name: one.metrics[name] for name in other.metrics} == dict(other.metrics)


def test_stage_two_trains_the_active_blocks_and_the_gate_and_sends_the_gate(make):
    small = make(sal={"initial": 3})
    start, updates = one_round(small)
    assert isinstance(start.state, FedMSState)
    for update in updates:
        assert {layer_of(name) for name in update.private} == {9, 10, 11}
        assert all(name.startswith("gate.adapter.") for name in update.adapter)
        assert {name for name in update.adapter if is_statistic(name)} == {
            f"gate.adapter.{place}.running_{one}" for place in (1, 3) for one in ("mean", "var")
        }
        assert not identical(update.adapter, {name: start.state.adapter[name] for name in update.adapter})
    after = small.method.aggregate(start.state, updates, small.server)
    assert {name.split(".")[0] for name in moved(start.state.adapter, after.adapter)} == {"gate"}
    for update in updates:
        assert identical(after.experts[update.client], update.private)
        own = small.method.client_adapter(after, update.client)
        assert moved(own, after.adapter) <= set(update.private)
        assert moved(own, after.adapter)


def test_stage_two_sends_only_the_bytes_of_the_gate(make):
    rounds = list(federate(make({"local.steps": 1})))
    gate = [name for name in rounds[0].state.adapter if name.startswith("gate.")]
    size = sum(rounds[0].state.adapter[name].numel() * 4 for name in gate)
    expert = sum(one.numel() * 4 for name, one in rounds[0].state.adapter.items() if name not in gate)
    assert [result.metrics["bytes/up"] for result in rounds[1:]] == [3 * size, 3 * size]
    assert [result.metrics["bytes/down"] for result in rounds[1:]] == [3 * (size + expert), 3 * size]
    trained = [result.metrics["parameters/trained"] for result in rounds[1:]]
    values = sum(rounds[0].state.adapter[name].numel() for name in gate if not is_statistic(name))
    assert trained[0] == values + sum(one.numel() for one in rounds[1].state.experts["plain"].values())


def test_the_gates_are_averaged_by_loss(make):
    small = make()
    start, updates = one_round(small)
    weighted = [
        replace(update, metrics={**update.metrics, "loss": loss})
        for update, loss in zip(updates, (0.5, 2.0, 1.0), strict=True)
    ]
    after = small.method.aggregate(start.state, weighted, small.server).adapter
    gates = [{name: one.double().numpy() for name, one in update.adapter.items()} for update in weighted]
    expected = reference.gate_mean(gates, [0.5, 2.0, 1.0])
    for name in expected:
        np.testing.assert_allclose(after[name].numpy(), expected[name], rtol=2e-6, atol=1e-7)
    samples = make(gate={**GATE, "weights": "aggregation"})
    other = samples.method.aggregate(start.state, weighted, samples.server).adapter
    assert moved(after, other)


@pytest.fixture
def trained(make, played) -> tuple[Federation, FedMSState]:
    """Return a federation and its state after two rounds of stage two."""
    if "trained" not in played:
        small = make()
        *_, last = federate(small)
        played["trained"] = (small, last.state)
    found: tuple[Federation, FedMSState] = played["trained"]
    return found


def features(model, adapter, images):
    """Return the image features and text features of an expert in float64."""
    model.load_adapter(adapter)
    path = range(model.num_layers)
    with torch.no_grad():
        found = model.features(model.walk(images, path)), model.text_features(path).clone()
    return [one.double().numpy() for one in found]


def test_a_clients_prediction_is_equation_6(trained):
    small, state = trained
    reader, client = small.trainer.reader, small.clients[1]
    images = client.test
    side_inputs = small.method.side_inputs(state, reader, {"test": images})["test"]
    small.model.load_adapter(small.method.client_adapter(state, client.id))
    ours = predicted(small.method, state, reader, images, client, side_inputs).double().numpy()

    pixels = images.take(torch.arange(len(images)))[0]
    scale = small.model.backbone.logit_scale.exp().item()
    trunk = small.model.gate.features(pixels).detach().double().numpy()
    one, bn1, two, bn2 = small.model.gate.adapter
    arrays = lambda *tensors: [tensor.detach().double().numpy().copy() for tensor in tensors]  # noqa: E731
    norms = [arrays(bn.running_mean, bn.running_var, bn.weight, bn.bias) for bn in (bn1, bn2)]
    linears = [arrays(layer.weight, layer.bias) for layer in (one, two)]
    global_images, global_texts = features(small.model, state.adapter, pixels)
    local_images, local_texts = features(small.model, small.method.client_adapter(state, client.id), pixels)
    mixes = [reference.gate(x, *linears[0], norms[0], *linears[1], norms[1]) for x in trunk]
    expected = [
        reference.mixture(mix, (global_images[n], local_images[n]), (global_texts, local_texts), scale)
        for n, mix in enumerate(mixes)
    ]
    np.testing.assert_allclose(ours, np.array(expected), rtol=1e-4, atol=1e-4)
    assert np.std(mixes) > 1e-3  # a softmax of the single output would be 1 for every image
    assert not np.allclose(global_images, local_images)


def test_without_a_client_the_global_expert_predicts(trained):
    small, state = trained
    images = small.domains[0].test
    small.model.load_adapter(state.adapter)
    ours = predicted(small.method, state, small.trainer.reader, images)
    pixels = images.take(torch.arange(len(images)))[0]
    with torch.no_grad():
        torch.testing.assert_close(ours, small.model(pixels))


def test_a_step_descends_the_mixtures_cross_entropy(make):
    """One step of plain SGD on all images follows autograd's gradient of the loss of Eq. 6."""
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    small = make({"local.batch_size": 40, "local.steps": 1, "optimizer": sgd, "lora.dropout": 0.0}, sal={"initial": 12})
    start, updates = one_round(small)
    client, model = small.cohort(1)[0], small.model
    pixels, labels = client.train.take(torch.arange(len(client.train)))
    model.load_adapter(start.state.adapter)
    path = range(model.num_layers)
    with torch.no_grad():
        known = model(pixels).clone()
    model.train()
    mix = model.gate(model.gate.features(pixels)).unsqueeze(1)
    cosines = model.features(model.walk(pixels, path)) @ model.text_features(path).T
    loss = F.cross_entropy(mix * known + (1 - mix) * cosines * model.backbone.logit_scale.exp(), labels)
    names = [name for name in start.state.adapter if not is_statistic(name)]
    gradients = dict(zip(names, torch.autograd.grad(loss, [model.trainable()[name] for name in names]), strict=True))
    model.eval()
    sent = {**updates[0].adapter, **updates[0].private}
    assert set(names) <= set(sent)
    for name in names:
        expected = start.state.adapter[name] - 0.1 * gradients[name]
        torch.testing.assert_close(sent[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("global_rounds", "rounds", "stages"),
    [(0, 3, ["stage 2"]), (1, 3, ["stage 1", "stage 2"]), (3, 3, ["stage 1"]), (4, 3, ["stage 1"])],
)
def test_stages_that_take_place_are_counted(make, global_rounds, rounds, stages):
    small = make(global_rounds=global_rounds)
    found = small.method.stage_states(next(iter(federate(small))).state, rounds)
    assert [*found] == stages
    assert "stage 2" not in found or found["stage 2"].active == {client.id: 12 for client in small.clients}


def test_sal_activates_one_block_at_a_time_and_remembers_the_queue(make):
    small = make({"federation.rounds": 4, "local.steps": 1}, sal={"queue": 2, "threshold": 2.0})
    rounds = list(federate(small))
    per_round = [result.metrics["sal/active/plain"] for result in rounds[1:]]
    assert per_round == [1, 1, 1, 2]
    assert [len(result.state.queues.get("plain", ())) for result in rounds] == [0, 1, 2, 2, 2]


def test_a_local_expert_does_not_affect_other_clients(make):
    small = make({"federation.clients_per_round": 1})
    _, first, _ = federate(small)
    (client,) = small.cohort(1)
    assert set(first.state.experts) == {client.id}
    for other in small.clients:
        own = small.method.client_adapter(first.state, other.id)
        assert bool(moved(own, first.state.adapter)) == (other.id == client.id)


def test_a_run_is_the_same_with_and_without_kept_activations(make, tmp_path, monkeypatch):
    """The run is bit-identical with a filled cache and without a cache, even if SAL activates a further block."""
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    changes = {"federation.rounds": 4, "federation.depths": [12], "local.batch_size": 9, "local.steps": 1}
    changes["data.domains"] = ["plain", "noisy"]
    given = make(changes, global_rounds=1, sal={"queue": 1, "threshold": 2.0})
    cold = list(federate(given))
    assert [result.metrics.get("sal/active") for result in cold[1:]] == [12, 1, 1, 2]
    assert len(list(tmp_path.glob("*.rows"))) > 4
    computed, call = [], FrozenFunction.__call__

    def counted(self, images):
        computed.append(len(images))
        return call(self, images)

    monkeypatch.setattr(FrozenFunction, "__call__", counted)
    assert identical_rounds(cold, federate(make(changes, global_rounds=1, sal={"queue": 1, "threshold": 2.0})))
    assert computed == []
    assert identical_rounds(cold, federate(unkept(given)))
    assert len(computed) > 4


def test_the_whole_gate_can_be_trained(make):
    small = make(gate={**GATE, "trained": "all"})
    start, updates = one_round(small)
    trunk = [name for name in updates[0].adapter if name.startswith("gate.trunk.")]
    assert any(is_statistic(name) for name in trunk)
    after = small.method.aggregate(start.state, updates, small.server).adapter
    assert any(name.startswith("gate.trunk.") for name in moved(start.state.adapter, after))


def test_the_gate_has_a_different_weight_for_each_image(trained):
    small, state = trained
    small.model.load_adapter(state.adapter)
    images = small.domains[0].test
    with torch.no_grad():
        mix = mixing(small.model, Batch(images, torch.arange(len(images))))
    assert mix.min() > 0
    assert mix.max() < 1
    assert mix.std() > 1e-3


REFUSED = [
    ({"partition.validation_share": 0.0}, "uses validation images of the clients and needs a `partition.valid"),
    ({"method.sal.initial": 13}, "`method.sal.initial` must be at most 12, the number of blocks, but it is 13"),
    ({"method.sal.queue": 0}, "`method.sal.queue` must be greater than 0, but it is 0"),
    (
        {"backbone": "digits_vit", "lora.position": "both"},
        "needs a `backbone` with a text encoder, clip or digits_clip",
    ),
    (
        {"method.gate.trunk": {"name": "timm", "model": "resnet"}},
        "`method.gate.trunk.model` resnet is not a model of timm",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=lambda one: str(one)[:40])
def test_an_invalid_configuration_is_rejected(make, tiny, random_clip, changes, sentence):
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    method = {"method": {"name": "fedms", "gate": GATE}, "partition.validation_share": 0.1}
    base: RunConfig = tiny.override({**clip, **method}, "test")
    with pytest.raises(UserError) as refusal:
        base.override(changes, "test")
    assert sentence in str(refusal.value)


def test_a_missing_trunk_is_reported_before_a_run(tiny, random_clip):
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    trunk = {"name": "timm", "model": "resnet18", "pretrained": "not/there.safetensors"}
    method = {"method": {"name": "fedms", "gate": {"trunk": trunk}}, "partition.validation_share": 0.1}
    config = tiny.override({**clip, **method}, "test")
    with pytest.raises(UserError, match=r"^`method\.gate\.trunk\.pretrained` not/there\.safetensors does not exist"):
        config.method.check_weights(config.backbone, ("a", "b"))
