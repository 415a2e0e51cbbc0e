"""Properties of FedAG, apart from the losses of its server (test_fedag_mutual_learning.py)."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import predicted
from fedsweep.methods.fedag import method as fedag
from fedsweep.methods.fedag.method import SERVER, FedAGState, quality
from fedsweep.testing.compare import identical, identical_rounds, moved, unkept
from fedsweep.testing.rounds import one_round
from fedsweep.training.attacks import attacked
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import AdapterState, ClientId, RoundResult
from tests.references import fedag as reference

Run = tuple[Federation, list[RoundResult], list[dict[ClientId, AdapterState]]]
QUICK = {"warmup_epochs": 1, "epochs": 1, "batch_size": 8, "lr": 1e-3}


@pytest.fixture
def make(federation, random_clip) -> Callable[..., Federation]:
    """Return a function that builds a small FedAG with given hyperparameters, as in `make(gamma=0.5)`."""

    def built(changes=None, **method):
        chosen = {"name": "fedag", "clip": {"name": "clip", "model": str(random_clip)}, "server": QUICK, **method}
        synthetic = {"synthetic": {"name": "surrogate", "share": 0.01}, "partition.proxy_share": 0.2}
        return federation({"method": chosen, **synthetic, **(changes or {})})

    return built


@pytest.fixture(scope="module")
def played() -> dict[str, Run]:
    """Return an empty cache of runs by name, which several tests share."""
    return {}


@pytest.fixture
def base(make, played, monkeypatch) -> Run:
    """Return a federation with FedAG's defaults, its rounds, and the tensors from which clients start each round."""
    if "base" not in played:
        started, fit = [], CohortTrainer.fit

        def recorded(self, tasks):
            started.append({task.client.id: task.start for task in tasks})
            return fit(self, tasks)

        small = make()
        with monkeypatch.context() as patch:
            patch.setattr(CohortTrainer, "fit", recorded)
            played["base"] = (small, list(federate(small)), started)
    return played["base"]


@pytest.fixture
def with_held_out(make, played) -> Run:
    """Return the run of the fixture `base` with an additional, held-out domain; its third value is empty."""
    if "with_held_out" not in played:
        small = make({"data.domains": ["plain", "inverted", "noisy", "thick"], "data.held_out_domains": ["thick"]})
        played["with_held_out"] = (small, list(federate(small)), [])
    return played["with_held_out"]


def test_a_client_starts_from_the_mixture_of_equation_1(base):
    small, (untuned, first, _), started = base
    gamma = small.method.gamma
    assert 0 < gamma < 1
    names = [name for name in untuned.state.adapter if not name.startswith(SERVER)]
    assert len(names) > 100
    for client in small.clients:
        begun, then = started[0][client.id], started[1][client.id]
        own, copy = first.state.own[client.id], first.state.copies[client.domain]
        assert all(torch.equal(begun[name], untuned.state.adapter[name]) for name in names)
        for name in names:
            torch.testing.assert_close(then[name], gamma * own[name] + (1 - gamma) * copy[name])
        assert moved(own, copy) == set(names)


def test_leaving_out_a_component_equals_setting_its_weight_to_zero(make, base):
    _, full, _ = base
    off, same = {"momentum": False, "regularizer": False}, {"gamma": 0.0, "strength": 0.0}
    without, weightless = (list(federate(make(**given))) for given in (off, same))
    assert identical_rounds(without, weightless)
    assert not identical(without[1].state, full[1].state)  # momentum has no effect before the second round


def test_without_quality_all_synthetic_images_have_equal_weights_and_no_score_is_sent(make, base):
    small, (start, first, _), _ = base
    assert small.method.metric_names([]) == ["synthetic/quality", "synthetic/quality_spread"]
    _, alike = islice(federate(make(quality=False)), 2)
    sizes = [len(client.synthetic) for client in small.clients]
    assert first.metrics["bytes/up"] == alike.metrics["bytes/up"] + 4 * sum(sizes)
    assert first.state.quality.keys() == {client.domain for client in small.clients}
    assert alike.state.quality == {}
    assert moved(first.state.copies["plain"], alike.state.copies["plain"])
    assert start.state.adapter.keys() == first.state.adapter.keys()


def test_scores_are_cosines_with_the_classes_prototypes(make):
    small = make()
    client = small.clients[0]
    labels = client.train.labels
    train = client.train.select((labels != 3).nonzero().flatten())
    found = quality(small.model, train, client.synthetic, batch_size=7)
    with torch.no_grad():
        features, asked = (
            small.model.features(small.model.walk(images.take(torch.arange(len(images)))[0], range(12)))
            .double()
            .numpy()
            for images in (train, client.synthetic)
        )
    wanted = client.synthetic.labels.tolist()
    expected = reference.scores(features, train.labels.tolist(), asked, wanted)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    assert [score == 0 for score in expected] == [label == 3 for label in wanted]


def test_mean_and_spread_of_the_scores_are_reported(base):
    _, (_, first, *_), _ = base
    scores = [score.double().numpy() for score in first.state.quality.values()]  # one client per domain
    assert first.metrics[fedag.QUALITY] == pytest.approx(np.mean([score.mean() for score in scores]))
    assert first.metrics[fedag.SPREAD] == pytest.approx(np.mean([score.std() for score in scores]))


def test_no_score_is_below_zero(make, monkeypatch):
    small = make()
    images = small.clients[0].train.select(torch.arange(6))
    asked = -torch.eye(6)
    asked[0] *= -1
    found = iter([torch.eye(6), asked])
    monkeypatch.setattr(fedag, "features", lambda *_: next(found))
    labels = torch.arange(6)
    given = replace(images, labels=labels)
    assert quality(small.model, given, given, 16).tolist() == [1, 0, 0, 0, 0, 0]


def test_a_known_domain_uses_its_own_adapter_and_an_unknown_domain_uses_all(with_held_out):
    small, (*_, last), _ = with_held_out
    assert [client.domain for client in small.clients] == ["plain", "inverted", "noisy"]
    state, reader, server = last.state, small.trainer.reader, small.model.server
    small.model.load_adapter(state.adapter)
    images = small.held_out[0].test
    features = small.method.server_features(reader, images)["clip"]
    with torch.no_grad():
        phis = server.all_logits(features)
        eta, _ = server.attended(phis)
    for place, domain in enumerate(["inverted", "noisy", "plain"]):
        torch.testing.assert_close(predicted(small.method, state, reader, images, domain=domain), phis[place])
    torch.testing.assert_close(predicted(small.method, state, reader, images), eta)
    plain = small.method.model_copy(update={"cross_domain": False})
    torch.testing.assert_close(predicted(plain, state, reader, images), phis.mean(0))
    right = (eta.argmax(1) == images.labels).double().mean().item()
    assert last.metrics["accuracy/out_of_domain/thick"] == last.metrics["accuracy/out_of_domain_mean"] == right
    assert "accuracy/domain/thick" not in last.metrics


def test_held_out_domains_do_not_change_the_training(base, with_held_out):
    (_, without, _), (_, held, _) = base, with_held_out
    for one, other in zip(without, held, strict=True):
        assert identical(one.state, other.state)
        more = {"accuracy/out_of_domain_mean", "accuracy/out_of_domain/thick"}
        assert {name: value for name, value in other.metrics.items() if name not in more} == dict(one.metrics)


def test_the_adapters_are_warmed_up_once_before_the_first_round(base):
    small, (untuned, first, second), _ = base
    assert [result.state.warm for result in (untuned, first, second)] == [False, True, True]
    warm = small.method.begin_round(untuned.state, small.server, small.trainer.at(1))
    adapters = {name for name in untuned.state.adapter if name.startswith(f"{SERVER}adapters.")}
    assert moved(untuned.state.adapter, warm.adapter) == adapters
    assert small.method.begin_round(first.state, small.server, small.trainer.at(2)) is first.state


def test_clip_encodes_each_image_once_for_all_rounds_and_runs(make, base):
    """A run with cached features equals a run that computes the features again."""
    _, before, _ = base
    seen = []

    def counted(given: Federation) -> list[RoundResult]:
        given.model.server.clip.backbone.stem["norm"].register_forward_hook(lambda *_: seen.append(1))
        return list(federate(given))

    again = counted(make({"seed": 0, "optimizer.lr": 0.05, "federation.rounds": 1}))
    assert seen == []
    assert not identical(before[1].state, again[1].state)
    assert identical_rounds(before, counted(unkept(make())))
    assert len(seen) > 6


def test_cached_clip_features_are_shared_with_methods_on_the_same_clip(
    make, federation, random_clip, monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    clip = {"name": "clip", "model": str(random_clip), "prompt": "{}"}
    next(federate(federation({"method": "zero_shot", "backbone": clip, "lora.position": "mlp"})))
    small, seen = make(), []
    embed = small.model.server.clip.backbone.stem["norm"]
    embed.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    list(islice(federate(small), 2))
    synthetic = sum(map(len, small.server.synthetic.values()))
    assert synthetic <= sum(seen) < synthetic + 16 * len(seen)
    assert len(seen) == len(small.server.synthetic)


def test_several_clients_of_a_domain_share_a_copy_that_starts_as_their_mean(make):
    dealt = {"name": "feature_label_skew", "clients_per_domain": 2, "alpha": 10.0, "min_size": 20, "proxy_share": 0.2}
    small = make({"partition": dealt, "federation.depths": [12], "local.steps": 1})
    assert len(small.clients) == 6
    start, updates = one_round(small)
    after = small.method.aggregate(start.state, updates, small.server)
    pair = [update for update in updates if update.client.startswith("plain")]
    total = sum(update.num_examples for update in pair)
    for name, tensor in after.copies["plain"].items():
        mean = sum(update.num_examples / total * update.adapter[name] for update in pair)
        torch.testing.assert_close(tensor, mean)
    told = sum(update.num_examples / total * update.extra["quality"] for update in pair)
    torch.testing.assert_close(after.quality["plain"], told)


def test_clients_of_a_pool_have_one_adapter_and_all_synthetic_images(make):
    pooled = {"name": "iid", "clients": 2, "proxy_share": 0.2}
    small = make({"partition": pooled, "federation.depths": [12]})
    _, last = islice(federate(small), 2)
    assert isinstance(last.state, FedAGState)
    assert list(last.state.copies) == ["pool"]
    assert len(small.clients[0].synthetic) == sum(map(len, small.server.synthetic.values()))


def test_a_clients_own_model_is_tested_if_there_is_a_test_share(make):
    small = make({"partition.test_share": 0.02})
    _, last = islice(federate(small), 2)
    client = small.clients[0]
    small.model.load_adapter(last.state.own[client.id])
    with torch.no_grad():
        logits = small.model(client.test.take(torch.arange(len(client.test)))[0])
    right = (logits.argmax(1) == client.test.labels).double().mean().item()
    assert last.metrics[f"accuracy/client/{client.id}"] == right


def test_an_attack_reverses_the_sent_update_and_not_the_clients_own_model(make, base):
    """The server sends the initial model in the first round and the copy of the client's domain in the second."""
    (honest, (_, first, _), _), small = base, make({"federation.malicious_share": 0.34})
    (attacker,) = small.malicious()
    domain = small.method.init(small.model, small.clients, small.server).domains[attacker]
    (second,) = federate(small, first)
    rng = stream(0, "allocation", 2)
    rows = small.method.allocate(first.state, small.clients, small.server, rng)
    trained = honest.method.local_updates(first.state, honest.cohort(2), rows, honest.trainer.at(2))
    (own,) = [update for update in trained if update.client == attacker]
    sent = small.method.sent_adapter(first.state, attacker)
    assert moved(first.state.copies[domain], {name: first.state.adapter[name] for name in own.adapter})
    assert identical(second.state.own[attacker], own.adapter)
    (got,) = attacked({attacker: small.method.sent_adapter(first.state, attacker)}, [own], "reversed_update")
    for name, tensor in got.adapter.items():
        torch.testing.assert_close(tensor, 2 * sent[name] - own.adapter[name])
    after = small.method.aggregate(first.state, [got], small.server)
    assert identical(after.own[attacker], own.adapter)
    assert set(moved(after.copies[domain], own.adapter)) == set(own.adapter)


REFUSED = [
    ({"synthetic": "none"}, "`method` fedag trains on synthetic images and needs a `synthetic` other than none, "
     "but it is none"),
    ({"partition.proxy_share": 0.0}, "`synthetic` surrogate uses the server's images and needs a "
     "`partition.proxy_share` above 0, but it is 0"),
    ({"base_optimizer": "feddyn"}, "`base_optimizer` feddyn corrects the mean of the clients' models, but `method` "
     "fedag does not average them"),
    ({"evaluation.metrics": ["drift"]}, "`evaluation.metrics` drift compares clients with a shared model, but the "
     "clients of `method` fedag do not share a model"),
    ({"evaluation.tsne_classes": 3}, "`evaluation.tsne_classes` shows the features of a shared model, but the clients "
     "of `method` fedag do not share a model"),
    ({"method.delta": -0.1}, "`method.delta` must be greater than or equal to 0, but it is -0.1"),
    ({"method.clip.prompt": "a photo"}, "`method.clip.prompt` must contain {} once, for the class name, but it is "
     "`a photo`"),
]  # fmt: skip


@pytest.fixture
def shipped() -> RunConfig:
    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import read_yaml

    return RunConfig.of(read_yaml(find("experiments", "fedag_digits")), "fedag_digits")


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_an_invalid_configuration_is_one_error_message(shipped, changes, sentence):
    with pytest.raises(UserError) as refusal:
        shipped.override(changes, "test")
    assert str(refusal.value) == f"test: {sentence}."


def test_a_clip_for_images_of_another_size_is_rejected(shipped):
    method = shipped.method
    method.check_weights(shipped.backbone, tuple("0123456789"))
    with pytest.raises(UserError, match=r"needs images that are 16 pixels wide, and `backbone` .* 32 pixels wide\."):
        method.check_weights(_Large(), tuple("0123456789"))


class _Large:
    image_size = 32


def test_the_state_of_another_method_is_rejected(make, federation):
    small = make()
    with pytest.raises(TypeError, match="needs a state of type FedAGState, but the state is of type ServerState"):
        small.method.aggregate(federation().initial_state(), [], small.server)


def test_a_resumed_run_uses_the_state_and_not_the_adapters_in_the_model(make, base):
    _, (_, first, second), _ = base
    small = make()
    for parameter in small.model.server.adapters.parameters():
        parameter.data.zero_()
    assert identical_rounds([second], federate(small, replace(first, metrics={})))
