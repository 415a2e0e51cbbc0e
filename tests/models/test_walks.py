"""Every supported family of timm models, whose output block by block is bit-identical to timm's forward pass."""

from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.models import LoraConfig, TimmBackbone, add_lora
from fedsweep.models.base import check_walk
from fedsweep.models.layered import LayeredModel
from fedsweep.models.timm.architecture import outline
from fedsweep.models.timm.transformer_families import (
    FAMILIES,
    LayeredBeit,
    LayeredEva,
    LayeredMixer,
    LayeredViT,
)
from fedsweep.models.weight_cache import Mould
from tests.models.small import TINY, stirred, timm_network

NO_HEADS = {**TINY, "num_heads": None}
CASES: dict[str, tuple[type[LayeredModel], dict[str, Any]]] = {
    "vit_tiny_patch16_224": (LayeredViT, TINY),
    "deit_tiny_patch16_224": (LayeredViT, TINY),
    "deit_tiny_distilled_patch16_224": (LayeredViT, TINY),  # a second head
    "deit3_small_patch16_224": (LayeredViT, TINY),  # layer scale, no position of the class token
    "vit_small_patch14_dinov2": (LayeredViT, TINY),
    "vit_small_patch14_reg4_dinov2": (LayeredViT, TINY),  # registers
    "vit_giant_patch14_dinov2": (LayeredViT, TINY),  # SwiGLU
    "vit_base_patch16_clip_224": (LayeredViT, TINY),  # norm before the blocks
    "vit_base_patch16_siglip_224": (LayeredViT, TINY),  # attention pooling, no class token
    "vit_medium_patch16_gap_240": (LayeredViT, TINY),  # average pooling with its own norm
    "vit_base_patch16_rpn_224": (LayeredViT, TINY),  # norms after the sublayers
    "beit_base_patch16_224": (LayeredBeit, TINY),
    "beitv2_base_patch16_224": (LayeredBeit, TINY),
    "eva_giant_patch14_224": (LayeredEva, TINY),  # absolute positions only
    "eva02_tiny_patch14_224": (LayeredEva, TINY),  # rotary positions, SwiGLU
    "vit_small_patch16_dinov3": (LayeredEva, TINY),  # rotary positions, which are shifted in training mode
    "vit_small_patch16_rope_mixed_ape_224": (LayeredEva, TINY),  # each block has its own rotary positions
    "vit_pe_core_tiny_patch16_384": (LayeredEva, TINY),
    "mixer_b16_224": (LayeredMixer, NO_HEADS),
    "gmixer_12_224": (LayeredMixer, {"img_size": 32}),  # gated MLPs
}
HELD = (0, 2)


def config_of(name: str) -> TimmBackbone:
    return TimmBackbone.of({"name": "timm", "model": name, "pretrained": "none", **CASES[name][1]}, "test")


@cache
def mould(name: str) -> Mould:
    config = config_of(name)
    family = outline(config._architecture).family
    return Mould(family(timm_network(config, 5), [0.5] * 3, [0.5] * 3).eval())


def layered(name: str) -> LayeredModel:
    """Return a copy of the small model for five classes, with noise on every weight, in evaluation mode."""
    model: LayeredModel = mould(name).cast()
    return model


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_every_family_is_tested():
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


def test_the_state_of_a_model_has_exactly_timms_tensors(name):
    model = layered(name)
    expected = {f"backbone.{one}": tensor.shape for one, tensor in model.backbone.state_dict().items()}
    assert {one: tensor.shape for one, tensor in model.state_dict().items()} == expected
    assert len(expected) > 10


@torch.no_grad()
def test_the_walk_is_bit_identical_to_timms_forward(name, images):
    model, config = layered(name), config_of(name)
    assert type(model) is CASES[name][0]
    assert model.num_layers == config.depth == len(model.backbone.blocks)
    pixels = model.normalize(images)
    expected = model.backbone(pixels)
    assert expected.shape == (2, 5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-4)
    assert model.embed(pixels).shape[-1] == config.width
    assert torch.equal(model(images), expected)
    assert torch.equal(model(images, range(config.depth)), expected)


@torch.no_grad()
def test_features_are_the_input_of_timms_head(name, images):
    model = layered(name)
    tokens = model.embed(model.normalize(images))
    for layer in range(model.num_layers):
        tokens = model.block(layer, tokens)
    backbone, found = model.backbone, model.features(tokens)
    assert found.shape == (2, model.embed(model.normalize(images)).shape[-1])
    assert torch.equal(found, backbone.forward_head(backbone.forward_features(model.normalize(images)), True))
    if "distilled" in name:  # each head has its own token; the features are the mean of the tokens
        assert torch.equal(found, backbone.norm(tokens)[:, :2].mean(1))
    else:
        assert torch.equal(backbone.head(found), model.classify(tokens))


@pytest.mark.parametrize(
    ("name", "pool"),
    [("vit_tiny_patch16_224", lambda tokens: tokens[:, 0]), ("mixer_b16_224", lambda tokens: tokens.mean(1))],
)
@torch.no_grad()
def test_features_are_the_pooled_output_of_the_last_block(name, pool, images):
    model, last = layered(name), []
    model.backbone.blocks[-1].register_forward_hook(lambda block, given, out: last.append(out))
    model(images)
    assert torch.equal(model.features(last[0]), pool(model.backbone.norm(last[0])))


@torch.no_grad()
def test_a_walk_of_held_blocks_equals_timms_blocks_in_order(name, images):
    model = layered(name)
    pixels, whole = model.normalize(images), model(images)
    walked = model(images, HELD)
    assert not torch.allclose(walked, whole, atol=1e-3)
    if getattr(model.backbone, "rope_mixed", False):  # timm would renumber the rotary positions
        tokens, rope = model.backbone._pos_embed(model.backbone.patch_embed(pixels))
        for layer in HELD:
            tokens = model.backbone.blocks[layer](tokens, rope=rope[layer])
        expected = model.backbone.forward_head(model.backbone.norm(tokens))
    else:
        kept = [model.backbone.blocks[layer] for layer in HELD]
        model.backbone.blocks = nn.Sequential(
            *kept
        )  # BEiT and EVA iterate over the blocks, the others call the sequence
        expected = model.backbone(pixels)
    assert torch.equal(walked, expected)


@torch.no_grad()
def test_training_mode_does_not_change_frozen_features(name, images):
    model = layered(name)
    expected = model(images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert torch.equal(model.train()(images), expected)


@torch.no_grad()
def test_relative_positions_that_all_blocks_share_are_supported(images):
    from timm.models.beit import Beit

    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5}
    with torch.random.fork_rng(devices=[]):
        backbone = stirred(Beit(**shape, use_shared_rel_pos_bias=True))
    model = LayeredBeit(backbone, [0.5] * 3, [0.5] * 3)
    expected = backbone(model.normalize(images))
    assert torch.equal(model(images), expected)
    backbone.rel_pos_bias.relative_position_bias_table.zero_()
    assert not torch.allclose(model(images), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "position"),
    [
        *((name, "both") for name in CASES),
        *((name, one) for name in ("beit_base_patch16_224", "mixer_b16_224") for one in ("l0", "l1")),
    ],
)
def test_the_last_linear_layer_of_each_sublayer_is_adapted(name, position):
    model = layered(name)
    add_lora(model, LoraConfig(rank=2, alpha=2.0, position=position), seed=0)
    mixer = isinstance(model, LayeredMixer)
    places = {"l0": "mlp_tokens.fc2" if mixer else "attn.proj", "l1": "mlp_channels.fc2" if mixer else "mlp.fc2"}
    chosen = places.values() if position == "both" else [places[position]]
    heads = ["head", "head_dist"] if "distilled" in name else ["head"]
    expected = {f"backbone.{head}.{part}" for head in heads for part in ("weight", "bias")} | {
        f"backbone.blocks.{layer}.{place}.lora_{letter}.default.weight"
        for layer in range(model.num_layers)
        for place in chosen
        for letter in "AB"
    }
    assert set(model.trainable()) == expected


def test_untrained_adapters_have_no_effect_and_only_held_blocks_get_gradients(name, images):
    model = layered(name)
    with torch.no_grad():
        plain = model(images, HELD)
    add_lora(model, LoraConfig(rank=2, alpha=2.0, dropout=0.0, patch_embed=True), seed=0)
    logits = model.eval()(images, HELD)
    torch.testing.assert_close(logits.detach(), plain, rtol=1e-4, atol=1e-4)
    parameters = model.trainable()
    assert sum(model.patch_projection in name for name in parameters) == 2
    gradients = torch.autograd.grad(logits.square().sum(), list(parameters.values()), allow_unused=True)
    moved = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    assert {name for name in parameters if name not in moved} == {
        name for name in parameters if name.startswith("backbone.blocks.") and int(name.split(".")[2]) not in HELD
    }
    by_name = dict(zip(parameters, gradients, strict=True))
    assert all(by_name[name].abs().sum() > 0 for name in moved if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit_base_patch16_224", "mixer_b16_224"])
@torch.no_grad()
def test_full_size_models_are_bit_identical_to_timms_forward(model):
    config = TimmBackbone.of({"name": "timm", "model": model, "pretrained": "none"}, "test")
    assert (config.depth, config.width, config.image_size) == (12, 768, 224)
    built = config.build(100, seed=0)
    image = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = built.backbone(built.normalize(image))
    assert expected.shape == (1, 100)
    assert torch.equal(built(image), expected)


def without_rope(model, layer, tokens):
    return model.backbone.blocks[layer](tokens)


def first_rope_for_all(model, layer, tokens):
    return model.backbone.blocks[layer](tokens, rope=model.rope[0])


def in_reverse(model, pixels):
    return model.backbone.stem(pixels).flip(1)


@pytest.mark.parametrize(
    ("name", "family", "part", "wrong"),
    [
        ("vit_small_patch16_dinov3", LayeredEva, "block", without_rope),
        ("vit_small_patch16_rope_mixed_ape_224", LayeredEva, "block", first_rope_for_all),
        ("mixer_b16_224", LayeredMixer, "embed", in_reverse),
    ],
)
def test_a_walk_that_differs_from_timms_forward_is_an_error(name, family, part, wrong, monkeypatch):
    model = layered(name)
    check_walk(model, model.backbone, 32, name, "timm's forward pass")
    monkeypatch.setattr(family, part, wrong)
    with pytest.raises(UserError) as refusal:
        check_walk(model, model.backbone, 32, name, "timm's forward pass")
    assert str(refusal.value) == (
        f"`backbone.model` {name} cannot be used: run block by block, it returns other logits than timm's forward pass."
    )


def test_a_walk_whose_logits_have_another_shape_is_an_error(monkeypatch):
    model = layered("vit_tiny_patch16_224")
    monkeypatch.setattr(
        LayeredViT, "classify", lambda model, tokens: model.backbone.forward_head(model.backbone.norm(tokens))[0]
    )
    with pytest.raises(UserError, match="it returns other logits than"):
        check_walk(model, model.backbone, 32, "x", "timm's forward pass")


def test_every_class_in_the_table_of_families_exists_in_timm():
    names = [f"timm.models.{name}" for names in FAMILIES.values() for name in names]
    assert len(names) == 11
    for name in [*names, "timm.layers.patch_embed.PatchEmbed"]:
        module, _, found = name.rpartition(".")
        kind = getattr(import_module(module), found)
        assert f"{kind.__module__}.{kind.__name__}" == name  # the module that defines it, not one that imports it


def test_logits_with_nan_are_an_error():
    model = layered("vit_tiny_patch16_224")
    model.backbone.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match=r"the weights of `backbone\.model` x give logits that are not finite numbers"):
        check_walk(model, model.backbone, 32, "x", "timm's forward pass")
