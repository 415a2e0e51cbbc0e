"""Properties of DepthFL, and its loss against tests/references/depthfl.py."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.methods import depthfl
from fedsweep.methods.depthfl import DepthFL, mutual_loss, ramp_up
from fedsweep.models.names import layer_of, names_within
from fedsweep.testing.compare import identical, moved
from tests.references import depthfl as reference

HEADS = {12: ((3, 6, 9), True), 10: ((3, 6, 9, 10), False), 8: ((3, 6, 8), False), 6: ((3, 6), False)}
HEADS |= {4: ((3, 4), False), 3: ((3,), False)}
RELEASED = {12: (4, 7, 10), 10: (4, 7, 10), 8: (4, 7), 6: (4,), 4: (4,), 3: ()}
RELEASED_CODE = DepthFL(heads=(4, 7, 10), own_head="shared", ramp=5.0, prediction="last")


@given(st.integers(1, 4), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**31))
def test_the_loss_equals_the_papers_loss(heads, images, weight, seed):
    rng = np.random.default_rng(seed)
    logits = [rng.normal(scale=3, size=(images, 7)) for _ in range(heads)]
    labels = rng.integers(7, size=images)
    ours = mutual_loss([torch.tensor(one) for one in logits], torch.tensor(labels), weight)
    assert ours.item() == pytest.approx(reference.loss(logits, labels, weight), rel=1e-9)


def test_a_teacher_gets_no_gradient():
    logits = [torch.randn(5, 4, generator=torch.Generator().manual_seed(one)).requires_grad_() for one in range(2)]
    labels = torch.zeros(5, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(mutual_loss(logits, labels, 1.0), logits[:1])
    student, teacher = logits[0].detach().requires_grad_(), logits[1].detach()
    alone = F.cross_entropy(student, labels) + F.kl_div(
        student.log_softmax(1), teacher.softmax(1), reduction="batchmean"
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(alone, student)[0])


@pytest.mark.parametrize("depth", HEADS)
def test_heads_follow_the_blocks_that_the_paper_names(depth):
    assert DepthFL().exits_of(depth, 12) == HEADS[depth]


@pytest.mark.parametrize("depth", RELEASED)
def test_the_heads_of_the_released_code_can_be_configured(depth):
    assert RELEASED_CODE.exits_of(depth, 12) == (RELEASED[depth], True)


@pytest.mark.parametrize("rounds", [10, 12, 100])
def test_the_ramp_is_full_well_before_the_last_round(rounds):
    weights = [ramp_up(done, 0.3 * rounds) for done in range(rounds)]
    assert weights == sorted(weights)
    assert weights[0] == math.exp(-5)
    assert weights[rounds // 3] > 0.9
    assert weights[-1] == 1.0
    assert ramp_up(99, 5.0 * 100) < 0.05  # with the ramp of the released code, distillation never starts


@pytest.fixture
def six(federation):
    """Return a federation with clients of depths 12, 5 and 3, and heads after 3, 5, 6 and 9 blocks."""
    return federation({"method": "depthfl", "federation.depths": [12, 5, 3]})


def heads_in(names) -> set[str]:
    return {name.rsplit(".", 1)[0].removeprefix("backbone.") for name in names if layer_of(name) is None}


def test_every_client_trains_the_heads_within_its_depth_and_its_own(six):
    _, first, *_ = federate(six)
    start = six.initial_state()
    assert heads_in(start.adapter) == {"head", "heads.3", "heads.5", "heads.6", "heads.9"}
    rows = six.method.allocate(start, six.clients, six.server, np.random.default_rng(0))
    updates = six.method.local_updates(start, six.clients, rows, six.trainer.at(1))
    assert {update.client: heads_in(update.adapter) for update in updates} == {
        "plain": {"head", "heads.3", "heads.6", "heads.9"}, "inverted": {"heads.3", "heads.5"}, "noisy": {"heads.3"},
    }  # fmt: skip
    assert heads_in(moved(start.adapter, first.state.adapter)) == heads_in(start.adapter)
    down = 4 * sum(
        start.adapter[name].numel()
        for row in rows.values()
        for name in names_within(start.adapter, row.held, row.excluded_prefixes)
    )
    assert first.metrics["bytes/down"] == first.metrics["bytes/up"] == down
    heads = {"plain": 4, "inverted": 2, "noisy": 1}
    frozen = sum(tensor.numel() for name, tensor in six.model.named_parameters() if name not in start.adapter)
    in_blocks = sum(
        tensor.numel()
        for name, tensor in six.model.named_parameters()
        if name not in start.adapter and layer_of(name) is not None
    )
    lora = sum(start.adapter[name].numel() for name in start.adapter if layer_of(name) == 0)
    held = [
        frozen - in_blocks + depth * (in_blocks / 12 + lora) + heads[client] * 650
        for client, depth in zip(heads, (12, 5, 3), strict=True)
    ]
    assert first.metrics["parameters/held"] == pytest.approx(sum(held) / 3)


def test_all_clients_train_a_shared_last_head(federation):
    method = {"name": "depthfl", "heads": [4], "own_head": "shared"}
    small = federation({"method": method, "federation.depths": [12, 5, 3]})
    start = small.initial_state()
    rows = small.method.allocate(start, small.clients, small.server, np.random.default_rng(0))
    updates = small.method.local_updates(start, small.clients, rows, small.trainer.at(1))
    assert [heads_in(update.adapter) for update in updates] == [{"head", "heads.4"}, {"head", "heads.4"}, {"head"}]


def test_the_prediction_is_the_mean_of_the_heads_or_the_last_one(six):
    *_, last = federate(six)
    images = six.domains[0].test.images[:5]
    six.model.load_adapter(last.state.adapter)
    with torch.no_grad():
        tokens, logits = six.model.embed(six.model.normalize(images)), []
        for layer in range(12):
            tokens = six.model.block(layer, tokens)
            if layer + 1 in (3, 6, 9):
                logits.append(six.model.heads[str(layer + 1)](six.model.features(tokens)))
        logits.append(six.model.classify(tokens))
        mean = six.method.predict(last.state, six.model, images)
        alone = six.method.model_copy(update={"prediction": "last"}).predict(last.state, six.model, images)
    torch.testing.assert_close(mean, sum(logits) / 4)
    assert torch.equal(alone, logits[-1])
    assert torch.equal(alone, six.model(images, range(12)))


def test_the_distillation_weight_grows_over_a_share_of_the_rounds(federation, monkeypatch):
    weights = []

    def noting(logits, labels, weight):
        weights.append(weight)
        return mutual_loss(logits, labels, weight)

    monkeypatch.setattr(depthfl, "mutual_loss", noting)
    changes = {"federation.rounds": 8, "local.steps": 1, "federation.depths": [3, 2, 1]}
    list(federate(federation({"method": {"name": "depthfl", "ramp": 0.5}, **changes})))
    expected = [math.exp(-5 * (1 - done / 4) ** 2) for done in range(4)] + [1.0] * 4
    assert weights == pytest.approx([weight for weight in expected for _ in range(3)])


@pytest.mark.parametrize("prediction", ["mean", "last"])
def test_without_a_client_of_full_depth_the_server_has_the_deepest_clients_model(federation, prediction):
    """A deeper server model would predict with heads that no client trains."""
    method = {"name": "depthfl", "prediction": prediction}
    small = federation({"method": method, "federation.depths": [7, 5, 3]})
    start, *_, last = federate(small)
    assert last.state.layers == tuple(range(7))
    assert heads_in(start.state.adapter) == {"head", "heads.3", "heads.5", "heads.6", "heads.7"}
    assert heads_in(moved(start.state.adapter, last.state.adapter)) == heads_in(start.state.adapter) - {"head"}
    images = small.domains[0].test.images[:5]
    small.model.load_adapter(last.state.adapter)
    used = (3, 6, 7) if prediction == "mean" else (7,)
    with torch.no_grad():
        expected = torch.stack(small.model.exits(images, range(7), used, last=False)).mean(0)
        assert torch.equal(small.method.predict(last.state, small.model, images), expected)


def test_dynamic_depths_have_a_head_for_each_depth(federation):
    small = federation({"method": "depthfl", "federation.depths": "dynamic"})
    start = small.initial_state()
    assert start.layers == tuple(range(12))
    assert heads_in(start.adapter) == {"head", *(f"heads.{depth}" for depth in range(1, 12))}


def test_fresh_heads_depend_on_the_seed_and_their_depth_alone(federation):
    first = federation({"method": "depthfl", "federation.depths": [12, 5, 3]}).initial_state().adapter
    other = federation({"method": {"name": "depthfl", "heads": [3]}, "federation.depths": [7, 5, 4]}).initial_state()
    common = {name for name in first if name in other.adapter}
    assert heads_in(common) == {"head", "heads.3", "heads.5"}
    assert all(identical(first[name], other.adapter[name]) for name in common)
    seeded = federation({"method": "depthfl", "federation.depths": [12, 5, 3], "seed": 1}).initial_state().adapter
    assert not torch.equal(seeded["heads.3.weight"], first["heads.3.weight"])
    assert not torch.equal(first["heads.6.weight"], first["heads.3.weight"])


@pytest.mark.parametrize("heads", [[6, 3], [3, 3], [0, 3], [3, 12]])
def test_heads_outside_the_model_or_out_of_order_are_rejected(tiny, heads):
    with pytest.raises(UserError, match=r"`method\.heads` must be ascending numbers of blocks between 1 and 11"):
        tiny.override({"method": {"name": "depthfl", "heads": heads}}, "test")
