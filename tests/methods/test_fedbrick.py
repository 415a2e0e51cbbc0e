"""Properties of FedBRICK, and its losses against tests/references/fedbrick.py."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import Federation, federate
from fedsweep.methods.fedbrick.bricks import Blend
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import assert_close, identical, moved
from fedsweep.testing.rounds import one_round
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.types import ClientUpdate
from tests.references import fedbrick as reference

BASES = ("fedra", pytest.param("inclusivefl", marks=pytest.mark.slow), "depthfl")  # InclusiveFL resembles FedRA here
SAME_IMAGES = {"partition.proxy_share": 0.2, "lora.dropout": 0.0, "federation.depths": [12, 5, 2]}


@pytest.fixture
def make(federation) -> Callable[..., Federation]:
    """Return a function that builds a small FedBRICK with given hyperparameters, as in `make(lambda_w=1.0)`."""

    def built(changes=None, **method):
        chosen = {"name": "fedbrick", "server_epochs": 2, "server_lr": 0.01, **method}
        return federation({"method": chosen, **SAME_IMAGES, **(changes or {})})

    return built


@pytest.fixture
def heard(monkeypatch) -> list[tuple[list[LocalTask], list[ClientUpdate]]]:
    """Return the list to which every call of `CohortTrainer.fit` appends its tasks and updates."""
    sessions, fit = [], CohortTrainer.fit

    def listening(self, tasks):
        updates = fit(self, tasks)
        sessions.append((list(tasks), updates))
        return updates

    monkeypatch.setattr(CohortTrainer, "fit", listening)
    return sessions


def bricks_in(adapter, prefix="bricks."):
    return {name: one for name, one in adapter.items() if name.startswith(prefix)}


def others_in(adapter):
    return {name: one for name, one in adapter.items() if not name.startswith("bricks.")}


@pytest.mark.parametrize("base", BASES)
def test_without_bricks_the_run_is_bit_identical_to_the_depth_method(make, federation, base):
    short = {"local.steps": 1}
    off = list(federate(make(short, brick=False, over={"name": base})))
    plain = list(federate(federation({"method": base, **SAME_IMAGES, **short})))
    assert len(off) == len(plain) == 3
    for ours, theirs in zip(off, plain, strict=True):
        assert identical(ours.state, theirs.state)
        assert identical(dict(ours.metrics), dict(theirs.metrics))


@pytest.mark.parametrize("base", BASES)
def test_without_missing_blocks_and_penalties_adapters_and_heads_equal_the_depth_methods(make, federation, base):
    """Stage II and the server train only BRICKs, which clients that hold all blocks do not run in stage I."""
    whole = {"federation.depths": [12, 12, 12], "federation.rounds": 1}
    ours = list(federate(make(whole, lambda_w=0.0, over={"name": base})))
    theirs = list(federate(federation({"method": base, **SAME_IMAGES, **whole})))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(others_in(one.state.adapter), other.state.adapter)
        assert one.metrics["loss/test"] == pytest.approx(other.metrics["loss/test"], rel=1e-5)
    assert len(moved(bricks_in(ours[0].state.adapter), bricks_in(ours[1].state.adapter))) == 3 * 12 * 4


def as_arrays(model, held, bricks):
    """Return lists of the held blocks (or None) and of all BRICKs, as functions on float64 arrays of tokens."""
    factors = {layer: [getattr(bricks[layer], one).detach().double().numpy() for one in ("a1", "b1", "a2", "b2")]
               for layer in range(12)}  # fmt: skip

    def block(layer):
        return lambda tokens: model.block(layer, torch.tensor(tokens, dtype=torch.float32)).detach().double().numpy()

    def brick(layer):
        return lambda tokens: np.array(
            [[reference.brick(token, *factors[layer], "softmax") for token in image] for image in tokens]
        )

    return [block(layer) if layer in held else None for layer in range(12)], [brick(layer) for layer in range(12)]


def logits_of(model, tokens):
    return model.classify(torch.tensor(tokens, dtype=torch.float32)).detach().double().numpy()


@pytest.fixture
def stages(make, heard):
    """Return a federation, the sent adapter, the model's different adapter, and a client's tasks of both stages."""
    small = make(lambda_w=0.3, lambda_theta=0.2, lambda_d=0.7)
    start, _ = one_round(small)
    tasks = [session[0] for session, _ in heard]
    generator = torch.Generator().manual_seed(5)
    elsewhere = {
        name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in start.state.adapter.items()
    }
    small.model.load_adapter(elsewhere)
    return small, start.state.adapter, elsewhere, tasks


def test_stage_one_minimises_equation_21_with_bricks_in_place_of_missing_blocks(stages):
    small, sent, now, (task, _) = stages
    model, client, held = small.model, task.client, task.allocation.held
    images, labels = client.train.take(torch.arange(3))
    bricks = model.bricks[small.method.set_of(client.domain)]
    blocks, stand_ins = as_arrays(model, held, bricks)
    tokens = model.embed(model.normalize(images)).detach().double().numpy()
    logits = logits_of(model, reference.stage_one_walk(tokens, blocks, stand_ins, held))
    kept = [name for name in sent if ".lora_" in name and layer_of(name) in held]
    missing = [f"bricks.for_{client.domain}.{layer}.{one}" for layer in range(12) if layer not in held
               for one in ("a1", "b1", "a2", "b2")]  # fmt: skip
    assert (len(held), len(kept), len(missing)) == (5, 5 * 4, 7 * 4)
    arrays = {name: (now[name].double().numpy(), sent[name].double().numpy()) for name in (*kept, *missing)}
    weights, old = ({name: arrays[name][place] for name in kept} for place in (0, 1))
    theta, old_theta = ({name: arrays[name][place] for name in missing} for place in (0, 1))
    expected = reference.stage_one_loss(logits, labels.numpy(), weights, old, theta, old_theta, 0.3, 0.2)
    assert task.objective(model, images, labels, task.walk(0.0)).item() == pytest.approx(expected, rel=1e-5)
    untethered = reference.cross_entropy(logits, labels.numpy())
    assert expected > untethered + 1


@pytest.mark.parametrize("over", [0.0, 0.75])
def test_stage_two_minimises_equation_24_on_annealed_blends(stages, over):
    small, _, _, (_, task) = stages
    model, client, held = small.model, task.client, task.allocation.held
    images, labels = client.train.take(torch.arange(3))
    blocks, stand_ins = as_arrays(model, held, model.bricks[small.method.set_of(client.domain)])
    tokens = model.embed(model.normalize(images)).detach().double().numpy()
    share = reference.alpha(int(over * 4), 4)
    out, gaps = reference.stage_two_walk(tokens, blocks, stand_ins, held, share)
    expected = reference.stage_two_loss(logits_of(model, out), labels.numpy(), gaps, 0.7)
    assert task.objective(model, images, labels, task.walk(over)).item() == pytest.approx(expected, rel=1e-5)
    assert len(gaps) == 5
    assert share == 1 - over


def test_alpha_falls_from_one_to_one_over_the_number_of_steps(make, monkeypatch):
    """Eq. 22 also lists the step E_2, where alpha is 0, but stage II has only E_2 steps."""
    shares, run = [], Blend.__call__
    monkeypatch.setattr(Blend, "__call__", lambda self, *given: (shares.append(self.share), run(self, *given))[1])
    one_round(make({"local.steps": 4, "federation.depths": [2, 2, 2]}))
    assert shares == [alpha for _ in range(3) for alpha in (1, 0.75, 0.5, 0.25) for _ in range(2)]


def test_each_stage_trains_only_its_own_tensors(make, heard):
    small = make()
    start, updates = one_round(small)
    (first, after_one), (second, after_two) = heard
    for one, other, between, end, update in zip(first, second, after_one, after_two, updates, strict=True):
        held, own = set(one.allocation.held), f"bricks.for_{one.client.domain}."
        blocks = {layer_of(name) for name in others_in(between.adapter)}
        assert blocks == {None, *held}
        assert {int(name.split(".")[2]) for name in bricks_in(between.adapter)} == set(range(12)) - held
        assert {int(name.split(".")[2]) for name in end.adapter} == held
        assert all(name.startswith(own) for name in (*bricks_in(between.adapter), *end.adapter))
        assert identical({**between.adapter, **end.adapter}, dict(update.adapter))
        assert identical(other.start, {**one.start, **between.adapter})  # stage II starts from the result of stage I
        assert (one.session, other.session) == (0, 1)
        for name, tensor in update.adapter.items():
            if "lora_A" not in name:
                assert not torch.equal(tensor, start.state.adapter[name]), name


def test_without_annealing_block_and_brick_are_weighted_equally(make, heard):
    one_round(make(anneal=False))
    task = heard[1][0][0]
    assert {step.share for over in (0.0, 0.9) for step in task.walk(over) if hasattr(step, "share")} == {0.5}


def test_without_stage_two_only_the_missing_blocks_bricks_are_sent(make, heard):
    _, updates = one_round(make(parallel=False))
    assert len(heard) == 1
    counts = {one.client: len(bricks_in(one.adapter)) for one in updates}
    assert counts == {"plain": 0, "inverted": 7 * 4, "noisy": 10 * 4}


def test_without_stage_one_adapters_and_heads_equal_the_depth_methods(make, federation):
    _, updates = one_round(make(compensate=False))
    plain = federation({"method": "fedra", **SAME_IMAGES})
    _, theirs = one_round(plain)
    for one, other in zip(updates, theirs, strict=True):
        assert_close(others_in(one.adapter), dict(other.adapter))
        held = set(one.allocation.held)
        assert {int(name.split(".")[2]) for name in bricks_in(one.adapter)} == held


def test_the_server_distils_the_bricks_of_every_domain_and_nothing_else(make):
    small = make({"evaluation.metrics": ["structural_bias"]}, server_epochs=20)
    before = small.initial_state()
    after = small.method.begin_round(before, small.server, small.trainer.at(1))
    assert identical(others_in(before.adapter), others_in(after.adapter))
    assert len(moved(bricks_in(before.adapter), bricks_in(after.adapter))) == 3 * 12 * 4
    cohort = small.cohort(1)
    rows = small.method.allocate(before, cohort, small.server, stream(0, "allocation", 1))
    errors = [
        small.biased(state, small.placed(cohort, rows), 1)["structural_bias/brick_error"] for state in (before, after)
    ]
    assert errors[1] < 0.9 < 0.95 < errors[0] < 1.05
    again = small.method.begin_round(before, small.server, small.trainer.at(2))
    assert not identical(after.adapter, again.adapter)  # each round has different batches
    none = make(server_epochs=0)
    assert identical(none.method.begin_round(before, none.server, none.trainer.at(1)), before)


def test_a_domains_bricks_are_learned_from_its_own_images(make):
    small = make()
    start = small.initial_state()
    swapped = dict(small.server.proxy) | {"noisy": small.server.proxy["plain"]}
    one, other = (
        small.method.begin_round(start, replace(small.server, proxy=proxy), small.trainer.at(1)).adapter
        for proxy in (small.server.proxy, swapped)
    )
    assert {name.split(".")[1] for name in moved(one, other)} == {"for_noisy"}


def test_bricks_are_averaged_within_their_domain_by_images(make):
    two_each = {
        "partition": {"name": "feature_label_skew", "clients_per_domain": 2, "min_size": 3, "proxy_share": 0.2},
        "federation.depths": [4],
    }
    small = make(two_each)
    start, updates = one_round(small)
    after = small.method.aggregate(start.state, updates, small.server).adapter
    for domain in ("plain", "inverted", "noisy"):
        pair = [one for one in updates if one.client.startswith(f"{domain}/")]
        weights = [one.num_examples for one in pair]
        assert len(set(weights)) == 2
        for name in bricks_in(after, f"bricks.for_{domain}."):
            mean = sum(one.adapter[name] * weight for one, weight in zip(pair, weights, strict=True)) / sum(weights)
            torch.testing.assert_close(after[name], mean)
            assert not any(name in one.adapter for one in updates if one not in pair)


@pytest.mark.parametrize(
    "stages", [{"parallel": False}, {"compensate": False}, {"parallel": False, "compensate": False}]
)
def test_the_names_of_the_sent_tensors_are_known_before_the_training(make, stages):
    small = make(**stages)
    start, updates = one_round(small)
    for one in updates:
        assert set(one.adapter) == set(small.method.sent_names(start.state, start.state.adapter, one.allocation))


def test_all_clients_have_the_shared_bricks(make):
    small = make(domains="shared")
    start, updates = one_round(small)
    assert {name.split(".")[1] for name in bricks_in(start.state.adapter)} == {"shared"}
    assert all(len(bricks_in(one.adapter)) == 12 * 4 for one in updates)
    fewer = replace(small.server, proxy={"plain": small.server.proxy["plain"]})
    begun = [small.method.begin_round(small.initial_state(), one, small.trainer.at(1)) for one in (small.server, fewer)]
    assert not identical(*begun)  # trained on the images of all domains


def test_clients_of_a_pool_have_bricks_from_the_images_of_all_domains(make):
    small = make({"partition": {"name": "iid", "clients": 3, "proxy_share": 0.2}})
    start, updates = one_round(small)
    after = small.method.aggregate(start.state, updates, small.server)
    assert {name.split(".")[1] for name in bricks_in(after.adapter)} == {"for_pool"}
    assert moved(bricks_in(start.state.adapter), bricks_in(after.adapter))


def test_a_domains_name_may_contain_dots_or_equal_an_attributes_name():
    from fedsweep.methods.fedbrick.method import FedBRICK

    names = ["v1.5", "v1%2E5", "train", "keys", "shared"]
    sets = [FedBRICK().set_of(name) for name in names]
    assert len(set(sets)) == len(names)
    modules = torch.nn.ModuleDict({name: torch.nn.Identity() for name in sets})
    assert list(modules) == sets


def test_over_depthfl_clients_have_the_heads_of_a_full_model(make):
    small = make(over={"name": "depthfl"})
    _, updates = one_round(small)
    heads = [{name.split(".")[1] for name in one.adapter if name.startswith("heads.")} for one in updates]
    assert heads == [{"3", "6", "9"}] * 3
    assert all(any(name.startswith("backbone.head") for name in one.adapter) for one in updates)


def test_bytes_and_parameters_count_only_the_bricks_of_a_clients_own_domain(make):
    on, off = (
        list(federate(make({"federation.rounds": 1, "local.steps": 1}, brick=brick)))[-1].metrics
        for brick in (True, False)
    )
    bricks = 12 * 4 * 8 * 64
    for name, clients, size in (("bytes/up", 3, 4), ("bytes/down", 3, 4), ("parameters/held", 1, 1)):
        assert on[name] - off[name] == clients * size * bricks


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "fedbrick", "partition.proxy_share": 0.0},
         "`method` fedbrick trains on the server's images and needs a `partition.proxy_share` above 0, but it is 0."),
        ({"method": {"name": "fedbrick", "over": {"name": "depthfl"}, "compensate": False}},
         "`method.compensate` must be true if `method.over` is depthfl"),
        ({"method": {"name": "fedbrick", "over": {"name": "depthfl", "heads": [5, 3]}}},
         "`method.over.heads` must be ascending numbers of blocks between 1 and 11"),
        ({"method": {"name": "fedbrick", "over": {"name": "all_large"}}},
         "`method.over.name` must be one of fedra, inclusivefl, depthfl, but it is `all_large`"),
    ],
)  # fmt: skip
def test_an_invalid_configuration_is_one_error_message(tiny, changes, sentence):
    with pytest.raises(UserError) as refusal:
        tiny.override({"partition.proxy_share": 0.2, **changes}, "test")
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("method", [{"brick": False}, {"server_epochs": 0}])
def test_without_distillation_the_server_needs_no_images(tiny, method):
    config = tiny.override({"method": {"name": "fedbrick", **method}}, "test")
    assert config.partition.proxy_share == 0
    assert not config.method.needs.proxy
