"""LoRA adapters, their layers, their initial values and their output (tests/references/lora.py)."""

from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora.layer import Linear

from fedsweep.models import LoraConfig, build_model, relative_norm
from fedsweep.models.lora_linear import LoraLinear
from fedsweep.models.names import layer_of
from fedsweep.models.sessions import Session
from fedsweep.testing.compare import identical
from tests.references import lora as reference

HEAD = {"backbone.head.weight", "backbone.head.bias"}
TARGETS = {"l0": ["attn.proj"], "l1": ["mlp.fc2"], "both": ["attn.proj", "mlp.fc2"]}
PATCH = "backbone.patch_embed.proj"


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "scaling": 1.0, "dropout": 0.0, **changes})


def parts(module: str) -> set[str]:
    return {f"{module}.lora_{letter}.default.weight" for letter in "AB"}


@pytest.fixture
def build(tiny):
    """Return a function that builds the tiny model with the given options of its adapters."""
    return lambda config, seed=0: build_model(tiny.backbone, config, 10, seed)


@pytest.mark.parametrize("patch_embed", [False, True])
@pytest.mark.parametrize("position", ["l0", "l1", "both"])
def test_only_adapters_and_head_are_trainable(build, position, patch_embed):
    model = build(lora(position=position, patch_embed=patch_embed))
    expected = set(HEAD)
    for target in TARGETS[position]:
        expected |= {name for layer in range(12) for name in parts(f"backbone.blocks.{layer}.{target}")}
    if patch_embed:
        expected |= parts(PATCH)
    assert set(model.trainable()) == expected
    assert len(expected) == 2 + 24 * len(TARGETS[position]) + 2 * patch_embed


def test_adapters_of_a_patch_embedding_belong_to_no_block(build):
    assert {layer_of(name) for name in build(lora(patch_embed=True)).trainable()} == {None, *range(12)}
    assert all(layer_of(name) is None for name in parts(PATCH))


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_the_rank_is_the_number_of_rows_of_factor_a(build, rank):
    adapter = build(lora(rank=rank)).adapter()
    assert adapter["backbone.blocks.3.attn.proj.lora_A.default.weight"].shape == (rank, 64)
    assert adapter["backbone.blocks.3.attn.proj.lora_B.default.weight"].shape == (64, rank)
    assert adapter["backbone.blocks.3.mlp.fc2.lora_A.default.weight"].shape == (rank, 128)
    assert adapter["backbone.blocks.3.mlp.fc2.lora_B.default.weight"].shape == (64, rank)


@pytest.mark.parametrize("position", ["l0", "l1", "both"])
def test_a_factor_a_of_smaller_rank_is_the_first_rows_of_a_larger_one(build, position):
    largest = build(lora(rank=16, position=position, patch_embed=True), seed=3).adapter()
    factors = [name for name in largest if ".lora_A." in name]
    assert len(factors) == 1 + 12 * len(TARGETS[position])
    for rank in (1, 3, 4, 8, 15):
        smaller = build(lora(rank=rank, position=position, patch_embed=True), seed=3).adapter()
        assert all(len(smaller[name]) == rank for name in factors)
        assert all(torch.equal(smaller[name], largest[name][:rank]) for name in factors)


def test_untrained_adapters_do_not_change_the_output(build, tiny):
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = tiny.backbone.build(10).eval()
    with torch.no_grad():
        torch.testing.assert_close(build(lora(patch_embed=True))(images), plain(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [({"scaling": 0.5}, 0.5), ({"scaling": None, "alpha": 2.0}, 0.5), ({"scaling": None, "alpha": 12.0}, 3.0)],
)
def test_an_adapted_layer_computes_w_x_plus_s_b_a_x(build, config, scaling):
    assert lora(**config).effective_scaling == scaling
    layer = build(lora(**config)).backbone.blocks[5].mlp.fc2
    generator = torch.Generator().manual_seed(0)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    b.data.normal_(0, 0.1, generator=generator)
    x = torch.randn(3, 128, generator=generator)
    with torch.no_grad():
        got = layer(x)
    arrays = [tensor.detach().numpy() for tensor in (x, layer.base_layer.weight, layer.base_layer.bias, a, b)]
    np.testing.assert_allclose(got.numpy(), reference.forward(*arrays, scaling), rtol=1e-4, atol=1e-4)
    without = reference.forward(*arrays, 0.0)
    assert np.abs(got.numpy() - without).max() > 0.05


@pytest.mark.parametrize("patch_embed", [False, True])
@pytest.mark.parametrize("layers", [range(12), (0, 7)])
def test_the_relative_norm_compares_the_products_with_the_frozen_weights(build, layers, patch_embed):
    model = build(lora(scaling=3.0, patch_embed=patch_embed))
    assert relative_norm(model, layers) == 0
    generator = torch.Generator().manual_seed(0)
    model.load_adapter({name: torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()})
    blocks = [model.backbone.blocks[layer] for layer in layers]
    adapted = [linear for block in blocks for linear in (block.attn.proj, block.mlp.fc2)]
    adapted += [model.backbone.patch_embed.proj] * patch_embed
    added = frozen = 0.0
    for layer in adapted:
        a, b = (part["default"].weight.detach().flatten(1).numpy() for part in (layer.lora_A, layer.lora_B))
        added += np.square(3.0 * b @ a).sum()
        frozen += layer.base_layer.weight.square().sum().item()
    assert relative_norm(model, layers) == pytest.approx((added / frozen) ** 0.5, rel=1e-5)


def test_with_fixed_alpha_the_rank_changes_the_scaling():
    assert [LoraConfig(rank=rank, alpha=8.0).effective_scaling for rank in (1, 4, 16)] == [8.0, 2.0, 0.5]
    assert [LoraConfig(rank=rank, scaling=2.0).effective_scaling for rank in (1, 4, 16)] == [2.0, 2.0, 2.0]


def test_initial_values_do_not_depend_on_the_other_adapted_layers(build):
    whole = build(lora(position="both", patch_embed=True)).adapter()
    for position in ("l0", "l1"):
        part = build(lora(position=position)).adapter()
        assert len(part) == 26
        assert identical(part, {name: whole[name] for name in part})


def test_factor_a_depends_on_seed_and_name_and_factor_b_starts_at_zero(build):
    first, again, other = build(lora()).adapter(), build(lora()).adapter(), build(lora(), seed=1).adapter()
    assert identical(first, again)
    drawn = [name for name in first if "lora_A" in name]
    assert len(drawn) == 24
    for name in drawn:
        assert not torch.equal(first[name], other[name])
        # Kaiming-uniform values with a = sqrt(5) are uniform in +-1 / sqrt(inputs).
        bound = first[name].shape[1] ** -0.5
        assert 0.9 * bound < first[name].abs().max() <= bound
    assert len({tuple(first[name].flatten()[:8].tolist()) for name in drawn}) == 24
    assert not any(first[name].any() for name in first if "lora_B" in name)


def test_dropout_applies_to_the_adapters_input_only_in_training(build):
    layer = build(lora(dropout=0.5)).backbone.blocks[0].attn.proj
    layer.lora_B["default"].weight.data.fill_(1.0)
    x = torch.ones(2, 64)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), layer(x))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            assert not torch.equal(layer.train()(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(6, 10), (150, 250), (6, 4000)])
@pytest.mark.parametrize("training", [True, False])
def test_every_order_of_products_agrees_with_pefts(training, widths, bias, monkeypatch):
    """Narrow and wide layers, with and without gradients, compute what PEFT's own class computes."""
    for narrow in (0, 10**9):
        monkeypatch.setattr("fedsweep.models.lora_linear.NARROW", narrow)
        layer = adapted_linear(widths, bias).train(training)
        x = torch.randn(5, 7, widths[0], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x.requires_grad_()
        weights = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        found = []
        for forward in (layer.forward, partial(Linear.forward, layer)):
            out = forward(x)
            with torch.no_grad():
                torch.testing.assert_close(forward(x), out)
            found.append([out, *torch.autograd.grad(out.square().sum(), weights)])
        for ours, pefts in zip(*found, strict=True):
            torch.testing.assert_close(ours, pefts, rtol=1e-9, atol=1e-9)


def test_autocast_does_not_add_the_factors_to_rounded_weights():
    """In bfloat16, a small B A would vanish if it was added to a weight of 1."""
    layer = adapted_linear((4, 3), bias=False).float().eval()
    x = torch.tensor([[1.0, -1.0, 0.0, 0.0]])  # W x is zero
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.copy_(torch.eye(3, 4))
        layer.lora_B["default"].weight.fill_(1e-4)
        layer.lora_B["default"].weight[:, 1] = 0
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
    assert expected.min() > 1e-4
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0)


def adapted_linear(widths: tuple[int, int], bias: bool) -> LoraLinear:
    """Return a layer with random factors in double precision."""
    network = torch.nn.Sequential(torch.nn.Linear(*widths, bias=bias))
    config = PeftLoraConfig(r=3, lora_alpha=6, target_modules=["0"])
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    inject_adapter_in_model(config, network)
    layer = network[0].double()
    layer.name, layer.session = "0", Session()
    torch.nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(1))
    return layer
