"""The card of a weights file, whose recipe, classes and normalisation must fit the experiment."""

import json

import pytest
import torch
from timm.models import PretrainedCfg

from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.models import DigitsViT, LoraConfig, TimmBackbone, build_model
from fedsweep.models.timm import backbone as timm_backbone
from tests.models.small import TINY, tiny_vit

RECIPE = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "in_chans": 3, **TINY}
NAMES = list("abcde")


def card_of(**changes) -> dict:
    return {"recipe": {"backbone": RECIPE | changes}}


@pytest.mark.parametrize(
    ("trained", "asked", "sentence"),
    [
        ({"model": "deit_tiny_patch16_224"}, {}, "model` is vit_tiny_patch16_224, but {} deit_tiny_patch16_224"),
        ({"model": "of_another_timm"}, {}, "model` is vit_tiny_patch16_224, but {} of_another_timm"),
        ({"num_heads": 6}, {}, "num_heads` is 3, but {} 6"),
        ({}, {"num_heads": 4}, "num_heads` is 4, but {} 3"),
        ({"patch_size": 4}, {}, "patch_size` is 8, but {} 4"),
    ],
)
def test_weights_trained_with_another_architecture_are_an_error(weights, trained, asked, sentence):
    path = weights(card=card_of(**trained))
    said = sentence.format(f"the weights {path} were trained with")
    with pytest.raises(UserError) as refusal:
        tiny_vit(path, **asked).fingerprint()
    assert str(refusal.value) == f"`backbone.{said}, according to their card."


@pytest.mark.parametrize(
    ("trained", "asked"),
    [
        ({}, {}),
        ({"num_heads": None}, {}),  # the model's own value is three
        ({}, {"num_heads": None}),
        ({}, {"model": "vit_tiny_patch16_224.augreg_in21k"}),
        ({"model": "vit_tiny_patch16_224.augreg_in21k"}, {}),
        ({"name": "digits_vit", "num_heads": 6}, {}),
        ({"mean": [0.1] * 3, "std": None}, {}),
        ({}, {"img_size": 64}),
        ({}, {"in_chans": 1}),
    ],
)
def test_weights_trained_with_this_architecture_are_loaded(weights, trained, asked):
    tiny_vit(weights(card=card_of(**trained)), **asked).check_weights(5)


@pytest.mark.parametrize("card", [{"recipe": "mine"}, {"recipe": {"backbone": "mine"}}, {"recipe": {}}])
def test_recipes_of_other_origin_are_ignored(weights, card):
    tiny_vit(weights(card=card)).check_weights(5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_heads": "3"}, "its `num_heads` must be a whole number, but it is 3"),
        ({"in_chans": None}, "its `in_chans` must be a whole number, but it is None"),
        ({"model": [1]}, "its `model` must be a name, but it is [1]"),
        ({"img_size": 33}, "`backbone.img_size` must be a multiple of the patch size 8, but it is 33"),
    ],
)
def test_an_invalid_recipe_is_one_error_message(weights, changes, problem):
    path = weights(card=card_of(**changes))
    with pytest.raises(UserError) as refusal:
        tiny_vit(path).fingerprint()
    assert str(refusal.value) == f"`recipe.backbone` of the card {path.with_suffix('.json')} is invalid: {problem}."


def test_the_included_experiment_fits_the_weights_of_the_included_pretraining(tmp_path):
    trained = read_yaml(find("pretrain", "tinyimagenet_vit"))["backbone"]
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"any")
    path.with_suffix(".json").write_text(json.dumps({"recipe": {"backbone": trained}}))
    asked = read_yaml(find("experiments", "fedra_pacs"))["backbone"] | {"pretrained": str(path)}
    assert TimmBackbone.of(asked, "test").fingerprint().startswith("sha256:")
    with pytest.raises(UserError, match="num_heads"):
        TimmBackbone.of(asked | {"num_heads": 8}, "test").fingerprint()


def test_a_single_number_applies_to_every_channel(weights):
    path = weights(card={"mean": [0.3], "std": [0.5]})
    model = tiny_vit(path).build(5, seed=0)
    torch.testing.assert_close(model.mean.flatten(), torch.full((3,), 0.3))
    torch.testing.assert_close(model.std.flatten(), torch.full((3,), 0.5))
    assert model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 5)


def test_a_count_other_than_that_of_the_channels_is_an_error(monkeypatch):
    monkeypatch.setattr(timm_backbone, "timm_config", lambda model: PretrainedCfg(mean=(0.5, 0.25), std=(0.5,)))
    with pytest.raises(UserError) as refusal:
        tiny_vit().build(5, seed=0)
    assert str(refusal.value) == (
        "`backbone.mean` must be 3 numbers, but the weights of vit_tiny_patch16_224 have 2: 0.5, 0.25."
    )


def test_the_head_is_kept_only_for_the_same_classes(weights):
    with_names, without = weights("a.pth", card={"class_names": NAMES}), weights("b.pth")
    fresh = tiny_vit().build(5, seed=0).backbone.head.weight

    def is_fresh(path, names) -> bool:
        return torch.equal(tiny_vit(path).build(5, 0, class_names=names).backbone.head.weight, fresh)

    assert is_fresh(with_names, list("vwxyz"))
    assert is_fresh(with_names, NAMES[::-1])
    assert not is_fresh(with_names, tuple(NAMES))
    assert not is_fresh(with_names, None)
    assert not is_fresh(without, list("vwxyz"))
    built = build_model(tiny_vit(with_names), LoraConfig(rank=2, alpha=2.0), 5, 0, list("vwxyz"))
    assert torch.equal(built.backbone.head.weight, fresh)


def test_the_fingerprint_covers_the_classes_on_the_card(weights):
    prints = {
        tiny_vit(weights(card=card)).fingerprint()
        for card in ({}, {"class_names": NAMES}, {"class_names": NAMES[::-1]})
    }
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({}, (48, 48)),
        (
            {"model": "mixer_b16_224", "num_heads": None},
            (16, 48),
        ),  # the number of patches is the number of rows of `mlp_tokens.fc2`
        (
            {"model": "mixer_b16_224", "num_heads": None, "img_size": 128},
            (24, 48),
        ),  # the number of columns is half the width of a token
    ],
)
def test_the_largest_rank_is_the_smallest_side_of_the_adapted_layers(changes, largest):
    config = tiny_vit(**changes)
    model = config.build(5, seed=0)
    for (position, name), most in zip(model.sublayers.items(), largest, strict=True):
        sides = [min(block.get_submodule(name).weight.shape) for block in model.backbone.blocks]
        assert config.largest_rank(position) == most == min(sides)
    assert config.largest_rank("both") == min(largest)
    assert config.width == 48


def test_the_largest_rank_of_the_included_backbone():
    model = DigitsViT().build(10)
    places = [block.get_submodule(name) for block in model.backbone.blocks for name in model.sublayers.values()]
    narrowest = min(min(place.weight.shape) for place in places)
    assert {DigitsViT().largest_rank(position) for position in ("l0", "l1", "both")} == {narrowest} == {64}
