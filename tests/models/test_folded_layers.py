"""A change that is folded into a frozen weight acts like a weight that contains the change, in every forward pass."""

from dataclasses import replace

import pytest
import torch

from fedsweep.federation.rounds import federate
from fedsweep.models.lora import relative_norm
from fedsweep.models.names import is_folded
from fedsweep.models.sessions import DropoutMasks, Segment
from fedsweep.testing.compare import identical, unkept
from fedsweep.types import RoundResult
from tests.models.test_lora import adapted_linear

METHODS = ["flora", "fedex_lora"]
EVERYTHING = {
    "evaluation.metrics": ["drift", "structural_bias"],
    "evaluation.tsne_classes": 3,
    "evaluation.tsne_images": 12,
    "federation.depths": [12, 4, 2],
}

OF_CHANGES = ("lora/relative_norm", "lora/residual", "lora/energy_beyond_least_rank")
"""Metrics that look at the folded changes themselves."""


def folded_and_merged(federation, changes):
    """Return a federation with the result of its first round, and one whose frozen weights contain the changes."""
    small, merged = (unkept(federation(changes)) for _ in range(2))
    _, first = (result for result, _ in zip(federate(small), range(2), strict=False))
    adapter = dict(first.state.adapter)
    for name in filter(is_folded, first.state.adapter):
        merged.model.get_submodule(name.removesuffix(".folded")).base_layer.weight.data.add_(adapter[name])
        adapter[name] = torch.zeros_like(adapter[name])
    return small, first, merged, RoundResult(1, replace(first.state, adapter=adapter))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [{"lora.dropout": 0.0}, {"lora.dropout": 0.2}, {"federation.ranks": [8, 3, 1]}, {"local.batch_size": 7}, None],
    ids=["no dropout", "dropout", "ranks", "unequal batches", "alone"],
)
def test_a_round_is_bit_identical_to_that_of_merged_weights(federation, monkeypatch, method, changes):
    """Training, evaluation, t-SNE and all metrics of the clients' models use the weights with the changes."""
    if changes is None:
        monkeypatch.setattr("fedsweep.training.local_training.JOINED_ON_CPU", 1)
    measured = EVERYTHING if changes == {"lora.dropout": 0.0} else {"federation.depths": [12, 4, 2]}
    small, first, merged, same = folded_and_merged(federation, {**measured, "method": method, **(changes or {})})
    assert any(one.any() for name, one in first.state.adapter.items() if is_folded(name))
    (ours,), (theirs,) = federate(small, first), federate(merged, same)
    folded = {name for name in ours.state.adapter if is_folded(name)}
    for name in set(ours.state.adapter) - folded:
        assert torch.equal(ours.state.adapter[name], theirs.state.adapter[name]), name
    assert ours.metrics["lora/residual"] <= 1e-6
    for name, one in ours.metrics.items():
        if name.startswith(("accuracy/", "loss/test")):  # the sum of the changes is rounded in another order
            assert one == pytest.approx(theirs.metrics[name], rel=1e-3, abs=1e-5)
        elif name not in (
            "lora/relative_norm",
            "lora/residual",
            "lora/energy_beyond_least_rank",
        ):  # which look at the changes themselves
            assert one == theirs.metrics[name], name
    if measured is not EVERYTHING:
        return
    assert {"drift/representation", "structural_bias/gradient"} <= set(ours.metrics)
    embedding = small.embed(first.state)
    assert identical(embedding, merged.embed(same.state))
    assert not identical(embedding, small.embed(small.initial_state()))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_bfloat16_is_exact_and_near_the_one_in_float32(federation, method):
    runs = [list(federate(federation({"method": method, "precision": one}))) for one in ("float32", "bfloat16")]
    for plain, rounded in zip(*(run[1:] for run in runs), strict=True):
        assert rounded.metrics["lora/residual"] <= 1e-6
        assert rounded.metrics["loss/test"] == pytest.approx(plain.metrics["loss/test"], rel=0.15)
        assert all(tensor.dtype == torch.float32 for tensor in rounded.state.adapter.values())


def layers(training):
    """Return a layer with a folded change, and one whose frozen weight contains it, with their inputs."""
    folded, merged = (adapted_linear((6, 10), True).train(training) for _ in range(2))
    change = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for one in (folded, merged):
        one.base_layer.weight.data.copy_(torch.ones(10, 6, dtype=torch.float64))
        one.lora_A["default"].weight.data.copy_(torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6))
        one.base_layer.bias.data.zero_()
    folded.register_buffer("folded", change)
    merged.base_layer.weight.data.add_(change)
    return folded, merged, torch.randn(6, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("sizes", [[], [3, 3], [2, 4]])
@pytest.mark.parametrize("narrow", [0, 10**9])
@pytest.mark.parametrize("training", [True, False])
def test_every_order_of_products_contains_the_change(monkeypatch, training, narrow, sizes):
    monkeypatch.setattr("fedsweep.models.lora_linear.NARROW", narrow)
    found = []
    for layer in layers(training)[:2]:
        x = layers(training)[2].requires_grad_()
        names = [f"0.lora_{which}.default.weight" for which in "AB"]
        own = dict(zip(names, (layer.lora_A["default"].weight, layer.lora_B["default"].weight), strict=True))
        segments = [
            Segment(size, {name: (place + 1) * one for name, one in own.items()}, DropoutMasks(place))
            for place, size in enumerate(sizes)
        ]
        with layer.session.joined(segments):
            out = layer(x)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), out)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *own.values()])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_does_not_add_the_change_to_rounded_weights():
    """In bfloat16, a small change would vanish if it was added to a weight of 1."""
    layer = adapted_linear((4, 3), bias=False).float().eval()
    x = torch.tensor([[1.0, -1.0, 0.0, 0.0]])  # W x is zero
    layer.register_buffer("folded", 1e-4 * torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3))
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_B["default"].weight.zero_()
        for sizes in ([], [1, 1]):
            with layer.session.joined([Segment(one, {}, DropoutMasks(0)) for one in sizes]):
                inputs = x.repeat(len(sizes) or 1, 1)
                expected = layer(inputs)
                with torch.autocast("cpu", torch.bfloat16):
                    found = layer(inputs)
            assert expected.min() > 0.9e-4
            torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_keys_of_the_activation_cache_depend_on_the_changes_of_the_blocks_before(federation, method):
    small = federation({"method": method})
    adapter = small.initial_state().adapter
    changed = {name: one + 1 if "blocks.2." in name and is_folded(name) else one for name, one in adapter.items()}
    assert any(one is not adapter[name] for name, one in changed.items())
    for steps in (2, 3):
        keys = {small.trainer.reader.prefix(tuple(range(12)), steps, one).key for one in (adapter, changed)}
        assert len(keys) == (1 if steps == 2 else 2)


def test_the_relative_norm_contains_the_changes(federation):
    small = federation({"method": "flora", "lora.scaling": 1.5, "lora.alpha": None})
    model, generator = small.model, torch.Generator().manual_seed(0)
    model.load_adapter({name: torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()})
    added = frozen = 0.0
    for block in model.backbone.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
            added += float((layer.folded.double() + 1.5 * b @ a).square().sum())
            frozen += float(layer.base_layer.weight.double().square().sum())
    assert relative_norm(model, range(12)) == pytest.approx((added / frozen) ** 0.5, rel=1e-6)
