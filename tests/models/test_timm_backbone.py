"""Backbones of timm that are built from configurations, with their shapes, initial values and normalisation."""

import math
from operator import attrgetter

import pytest
import timm
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import DigitsViT, LoraConfig, TimmBackbone, build_model
from fedsweep.models.layered import LayeredModel
from fedsweep.models.timm.architecture import Architecture, outline
from fedsweep.models.timm.transformer_families import LayeredViT
from fedsweep.testing.compare import identical, memory
from tests.models.small import TINY, tiny_vit

HEAD = ["backbone.head.weight", "backbone.head.bias"]


def weights_of(model: LayeredModel) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name not in HEAD}


def test_depth_and_width_are_found_without_memory_and_cached():
    outline.cache_clear()
    config = TimmBackbone.of({"name": "timm", "model": "vit_base_patch14_dinov2", "pretrained": "none"}, "test")
    assert (config.depth, config.width, config.image_size) == (12, 768, 518)
    assert outline.cache_info().misses == 1
    with torch.device("meta"):
        assert {one.device.type for one in Architecture("vit_base_patch14_dinov2").build().parameters()} == {"meta"}


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "mixer_s16_224"])
def test_a_recipe_builds_the_same_network_with_timm_alone(model):
    shape = Architecture(model, img_size=16, patch_size=4, embed_dim=48, num_blocks=3)
    recipe = shape.recipe(5, fetched=False)
    assert recipe.fetched is False
    names = [recipe.model] if recipe.model else []
    with torch.device("meta"):
        made = attrgetter(recipe.call.removeprefix("timm."))(timm)(*names, **recipe.arguments)
        own = shape.build()
    sizes = [{name: tuple(one.shape) for name, one in network.named_parameters()} for network in (made, own)]
    assert sizes[0] | {name: sizes[1][name] for name in ("head.weight", "head.bias")} == sizes[1]
    assert sizes[0]["head.weight"] == (5, 48)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (12, 192, 224)),
        ({"img_size": 64, "patch_size": 8, "embed_dim": 96}, (12, 96, 64)),
        ({"num_blocks": 5}, (5, 192, 224)),
        ({"model": "mixer_b16_224", "img_size": 64, "patch_size": 8, "embed_dim": 96, "num_blocks": 4}, (4, 96, 64)),
        ({"model": "vit_small_patch16_dinov3"}, (12, 384, 256)),
    ],
)
def test_depth_width_and_size_are_configured_or_those_of_the_model(changes, expected):
    data = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", **changes}
    config = TimmBackbone.of(data, "test")
    assert (config.depth, config.width, config.image_size) == expected


def test_a_small_backbone_for_64_pixels_can_be_configured():
    config = tiny_vit(img_size=64, patch_size=8, embed_dim=96, num_blocks=12, num_heads=3)
    model = config.build(7, seed=0)
    backbone = model.backbone
    assert (config.depth, config.width, config.image_size) == (12, 96, 64)
    assert backbone.pos_embed.shape == (1, 65, 96)
    assert backbone.blocks[0].attn.num_heads == 3
    assert backbone.head.out_features == 7
    assert not model.training


def test_a_mixers_widths_keep_their_ratio():
    data = {"name": "timm", "model": "mixer_b16_224", "pretrained": "none", "img_size": 64, "patch_size": 8}
    block = TimmBackbone.of({**data, "embed_dim": 96, "num_blocks": 1}, "test").build(3, seed=0).backbone.blocks[0]
    assert block.mlp_tokens.fc1.weight.shape == (48, 64)
    assert block.mlp_channels.fc1.weight.shape == (384, 96)


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "mixer_b16_224"])
def test_random_weights_depend_only_on_the_seed(model):
    shape = {**TINY, "num_heads": None, "model": model, "patch_size": 16}
    config = tiny_vit(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, after = config.build(5, seed=0), torch.rand(4)
        torch.manual_seed(1)
        assert torch.equal(after, torch.rand(4))  # the global generator did not change
        again, other = config.build(5, seed=0), config.build(5, seed=1)
    assert identical(dict(first.state_dict()), dict(again.state_dict()))
    assert not memory(list(first.parameters())) & memory(list(again.parameters()))
    for name in ("backbone.blocks.0.norm1.weight", "backbone.norm.weight"):
        assert torch.equal(first.state_dict()[name], other.state_dict()[name])
    drawn = [name for name, tensor in first.named_parameters() if tensor.ndim > 1]
    assert len(drawn) > 12
    assert not any(torch.equal(first.state_dict()[name], other.state_dict()[name]) for name in drawn)


@pytest.mark.usefixtures("untouchable_gpu")
def test_a_model_is_built_without_a_gpu():
    model = build_model(tiny_vit(), LoraConfig(rank=2, alpha=2.0), 5, 0)
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_a_fresh_head_has_its_own_random_stream():
    three, five = tiny_vit().build(3, seed=0), tiny_vit().build(5, seed=0)
    assert identical(weights_of(three), weights_of(five))  # the number of classes does not change other random values
    wide = tiny_vit(num_blocks=2).build(400, seed=0).backbone.head
    assert wide.bias.abs().max() == 0
    assert wide.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert wide.weight.abs().max() > 0.05
    assert torch.equal(five.backbone.head.weight, tiny_vit(num_blocks=2).build(5, seed=0).backbone.head.weight)
    assert not torch.equal(five.backbone.head.weight, tiny_vit().build(5, seed=1).backbone.head.weight)


def test_both_heads_of_a_distilled_model_are_fresh_and_differ():
    backbone = tiny_vit(model="deit_tiny_distilled_patch16_224").build(5, seed=0).backbone
    assert backbone.head.weight.shape == backbone.head_dist.weight.shape == (5, 48)
    assert not torch.equal(backbone.head.weight, backbone.head_dist.weight)
    assert backbone.head_dist.bias.abs().max() == 0


def test_normalisation_is_configured_or_that_of_the_tag_or_the_model():
    tagged = {"name": "timm", "pretrained": "none", "img_size": 32, "num_blocks": 1, "embed_dim": 48, "num_heads": 3}
    half = TimmBackbone.of({**tagged, "model": "vit_tiny_patch16_224"}, "test").build(2, 0)
    clip = TimmBackbone.of({**tagged, "model": "vit_base_patch16_clip_224.openai"}, "test").build(2, 0)
    other = TimmBackbone.of({**tagged, "model": "vit_base_patch16_224.mae"}, "test").build(2, 0)
    given = tiny_vit(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6]).build(2, 0)
    assert half.mean.flatten().tolist() == half.std.flatten().tolist() == [0.5] * 3
    torch.testing.assert_close(clip.mean.flatten(), torch.tensor([0.48145466, 0.4578275, 0.40821073]))
    torch.testing.assert_close(clip.std.flatten(), torch.tensor([0.26862954, 0.26130258, 0.27577711]))
    torch.testing.assert_close(other.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close(given.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(given.std.flatten(), torch.tensor([0.4, 0.5, 0.6]))


def test_a_backbone_with_one_channel_gets_the_mean_of_the_colours():
    model = tiny_vit(in_chans=1, mean=[0.2, 0.3, 0.7], std=[0.1, 0.2, 0.3]).build(4, seed=0)
    assert model.backbone.patch_embed.proj.weight.shape == (48, 1, 8, 8)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = model.normalize(images)
    assert pixels.shape == (2, 1, 32, 32)
    torch.testing.assert_close(pixels[:, 0], (images.float().mean(1) / 255 - 0.4) / 0.2, rtol=1e-4, atol=1e-5)
    assert model(images).shape == (2, 4)


def test_images_on_the_host_are_copied_to_the_models_device():
    model = tiny_vit().build(4, seed=0)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(model(images), model.backbone(model.normalize(images)))
        on_meta = model.to("meta")(images)
    assert on_meta.device.type == "meta"
    assert images.device.type == "cpu"


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("vit_tiny_patch16_224", {"num_heads": 2}),
        ("mixer_b16_224", {}),
        ("vit_small_patch16_dinov3", {"num_heads": 2}),
        ("beit_base_patch16_224", {"num_heads": 2}),
    ],
)
def test_a_federation_runs_with_a_timm_backbone(federation, model, fields):
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "num_blocks": 3, **fields}
    backbone = {"name": "timm", "model": model, "pretrained": "none", **small}
    changes = {"federation.depths": [3, 2, 1], "federation.rounds": 1, "lora.rank": 2}
    federated = federation({"backbone": backbone, **changes})
    start, *rounds = federate(federated)
    assert len(rounds) == 1
    assert all(math.isfinite(value) for value in rounds[-1].metrics.values())
    moved = [
        name for name, tensor in rounds[-1].state.adapter.items() if not torch.equal(tensor, start.state.adapter[name])
    ]
    assert len(moved) == len(start.state.adapter) == 3 * 4 + 2


def test_a_build_compares_its_walk_with_timm(monkeypatch):
    monkeypatch.setattr(LayeredViT, "block", lambda model, layer, tokens: 2 * model.backbone.blocks[layer](tokens))
    with pytest.raises(UserError, match=r"^`backbone\.model` vit_tiny_patch16_224 cannot be used: run block by"):
        tiny_vit().build(5, seed=0)


def test_a_run_checks_depths_and_rank_against_the_model(experiment):
    backbone = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", **TINY, "img_size": 16}
    for changes, sentence in [
        (
            {"federation.depths": [3, 3, 3, 3, 2, 4]},
            "run: `federation.depths` must contain numbers from 1 to 3, the number of blocks of timm, but one is 4.",
        ),
        (
            {"federation.depths": [3, 3, 3, 3, 2, 1], "lora.rank": 49},
            "run: `lora.rank` must be at most 48, the smallest dimension of the layers that LoRA adapts in timm, "
            "but it is 49.",
        ),
    ]:
        with pytest.raises(UserError) as refusal:
            experiment.override({"backbone": backbone, **changes}, "run")
        assert str(refusal.value) == sentence


def test_a_run_lists_all_fields_of_its_backbone(experiment):
    backbone = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "img_size": 16}
    config = experiment.override({"backbone": backbone}, "run")
    assert isinstance(config.backbone, TimmBackbone)
    assert RunConfig.of(config.model_dump(mode="json"), "again") == config
    assert isinstance(experiment.override({"backbone": "digits_vit"}, "run").backbone, DigitsViT)


def test_two_builds_share_no_adapters():
    lora = LoraConfig(rank=2, alpha=2.0)
    first, second = (build_model(tiny_vit(), lora, 5, seed=0) for _ in range(2))
    assert identical(first.adapter(), second.adapter())
    assert not memory(list(first.parameters())) & memory(list(second.parameters()))
