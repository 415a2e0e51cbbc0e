"""Weights files with timm's tensor names, how they are fitted to a model, and their fingerprints."""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn

from fedsweep.common.errors import UserError
from fedsweep.models.weights_file import digest, read_card
from fedsweep.testing.compare import identical
from tests.models.small import timm_network, tiny_vit

CARD = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
HEAD = ("head.weight", "head.bias")


def loaded(path: Path, classes: int = 5, **changes) -> dict[str, torch.Tensor]:
    """Return the tensors of a backbone that is built from the weights file `path`."""
    return dict(tiny_vit(path, **changes).build(classes, seed=0).backbone.state_dict())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.pt", "w.bin"])
def test_all_tensors_of_a_file_are_loaded(weights, name):
    path = weights(name)
    expected = dict(timm_network(tiny_vit(), 5).state_dict())
    assert len(expected) == 3 * 12 + 8
    assert identical(loaded(path), expected)


def test_a_folder_is_read_from_its_model_safetensors(weights):
    path = weights("folder/model.safetensors", card=CARD)
    model = tiny_vit(path.parent).build(5, seed=0)
    assert identical(dict(model.backbone.state_dict()), dict(load_file(path)))
    assert model.mean.flatten().tolist() == pytest.approx(CARD["mean"])


@pytest.mark.parametrize("wrap", [lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_a_training_checkpoint_yields_its_model(weights, wrap):
    assert identical(loaded(weights("w.pth", change=wrap)), dict(timm_network(tiny_vit(), 5).state_dict()))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_as_float32(weights, kind):
    halved = weights(change=lambda state: {name: tensor.to(kind) for name, tensor in state.items()})
    expected = timm_network(tiny_vit(), 5).state_dict()
    single = {name: tensor.to(kind).float() for name, tensor in expected.items()}
    assert identical(loaded(halved), single)

    resized = timm_network(tiny_vit(img_size=64), 5)
    assert identical(
        loaded(halved, img_size=64), dict(checkpoint_filter_fn(single, resized))
    )  # resampling is done in float32


def test_a_head_is_kept_only_if_it_has_the_right_number_of_classes(weights):
    path, fresh = weights(classes=5), tiny_vit().build(7, seed=0).backbone.state_dict()
    kept, replaced = loaded(path, classes=5), loaded(path, classes=7)
    assert not torch.equal(kept["head.weight"], tiny_vit().build(5, seed=0).backbone.head.weight)
    assert identical({name: replaced[name] for name in HEAD}, {name: fresh[name] for name in HEAD})
    for name in HEAD:
        del kept[name], replaced[name]
    assert identical(kept, replaced)


def test_a_file_without_a_head_gets_a_fresh_one(weights):
    path = weights(change=lambda state: {name: tensor for name, tensor in state.items() if name not in HEAD})
    fresh = tiny_vit().build(5, seed=0).backbone.state_dict()
    assert identical({name: loaded(path)[name] for name in HEAD}, {name: fresh[name] for name in HEAD})


def test_positions_and_patches_are_resampled_like_in_timm(weights):
    path = weights()
    for changes in ({"img_size": 64}, {"img_size": 64, "patch_size": 16}):
        target = timm_network(tiny_vit(**changes), 5)
        expected = checkpoint_filter_fn(load_file(path), target)
        assert expected["pos_embed"].shape == target.pos_embed.shape
        assert identical(loaded(path, **changes), dict(expected))


def test_three_colours_are_summed_for_one_channel(weights):
    path = weights()
    stem = load_file(path)["patch_embed.proj.weight"]
    torch.testing.assert_close(loaded(path, in_chans=1)["patch_embed.proj.weight"], stem.sum(1, keepdim=True))


def test_mean_and_deviation_are_configured_or_those_of_the_card_or_the_model(weights):
    def of(path: Path, **changes) -> tuple[list[float], list[float]]:
        model = tiny_vit(path, **changes).build(5, seed=0)
        return model.mean.flatten().tolist(), model.std.flatten().tolist()

    with_card, without = weights("a.safetensors", card=CARD), weights("b.safetensors")
    assert of(with_card) == (pytest.approx(CARD["mean"]), pytest.approx(CARD["std"]))
    assert of(without) == ([0.5] * 3, [0.5] * 3)
    assert of(with_card, mean=[0.7, 0.8, 0.9]) == (pytest.approx([0.7, 0.8, 0.9]), pytest.approx(CARD["std"]))
    assert of(with_card, in_chans=1) == ([pytest.approx(0.2)], [pytest.approx(0.5)])
    assert of(weights("c.safetensors", card={"mean": [0.3], "std": [1]}), in_chans=1) == ([pytest.approx(0.3)], [1.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_on_the_card_can_be_any_number_of_single_precision(weights, sign):
    largest = sign * float(np.finfo(np.float32).max)
    assert read_card(weights(card={"mean": [largest]}))["mean"] == [largest]
    with pytest.raises(UserError, match="must be one or three finite numbers"):
        read_card(weights(card={"mean": [math.nextafter(largest, sign * math.inf)]}))


@pytest.mark.parametrize(("limit", "outside"), [("max", math.inf), ("tiny", 0.0)])
def test_a_deviation_on_the_card_can_be_any_positive_normal_number_of_single_precision(weights, limit, outside):
    edge = float(getattr(np.finfo(np.float32), limit))
    assert read_card(weights(card={"std": [edge]}))["std"] == [edge]
    with pytest.raises(UserError, match="must be one or three finite positive numbers"):
        read_card(weights(card={"std": [math.nextafter(edge, outside)]}))


def test_the_fingerprint_changes_with_the_content(weights):
    path = weights("w.safetensors")
    first = tiny_vit(path).fingerprint()
    assert first == f"sha256:{sha256(path)}"
    status = path.stat()
    weights("w.safetensors", seed=2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # ensures a new time even if the clock is coarse
    assert tiny_vit(path).fingerprint() == f"sha256:{sha256(path)}" != first

    copy = path.with_name("copy.safetensors")
    copy.write_bytes(path.read_bytes())
    assert tiny_vit(copy).fingerprint() == tiny_vit(path).fingerprint()


def test_the_fingerprint_covers_the_normalisation_on_the_card(weights):
    path = weights(card={"what": "x"})
    bare = tiny_vit(path).fingerprint()
    assert bare == f"sha256:{sha256(path)}"
    prints = {bare}
    for card in (CARD, {**CARD, "std": [0.4, 0.5, 0.7]}, {**CARD, "mean": [0.1, 0.2, 0.4]}):
        path.with_suffix(".json").write_text(json.dumps(card))
        prints.add(tiny_vit(path).fingerprint())
    assert len(prints) == 4
    assert all(one.startswith(bare) for one in prints)
    assert (
        tiny_vit(path, mean=[0.1] * 3, std=[0.1] * 3).fingerprint() == bare
    )  # the values on the card are not used then


def test_fingerprints_without_a_file():
    assert tiny_vit().fingerprint() == "none"
    assert (
        tiny_vit(
            "timm",
            model="test_vit.r160_in1k",
            **dict.fromkeys(("img_size", "patch_size", "embed_dim", "num_blocks", "num_heads")),
        ).fingerprint()
        == "timm:test_vit.r160_in1k"
    )


def test_a_digest_is_computed_once_for_each_content(weights, monkeypatch):
    path, counted = weights(), []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: counted.append(1) or real(*arguments))
    assert digest(path) == digest(path) == sha256(path)
    assert len(counted) == 1


def test_weights_are_checked_once_for_each_content(weights, monkeypatch):
    path, built = weights(), []
    config = tiny_vit(path)
    real = type(config).build
    monkeypatch.setattr(type(config), "build", lambda *arguments, **named: built.append(1) or real(*arguments, **named))
    for classes in (5, 5, 6, 5):
        config.check_weights(classes)
    assert len(built) == 2
