"""The backbone digits_vit, which ships with fedsweep, and its weights file."""

import json

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.models import weights_file
from fedsweep.models.timm import digits_vit as vit
from fedsweep.models.timm.digits_vit import DigitsViT
from fedsweep.testing.compare import identical
from fedsweep.training.costs import count


def test_the_model_has_the_depth_and_width_of_its_config(random_weights, monkeypatch):
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    model = DigitsViT().build(10)
    assert model.num_layers == DigitsViT().depth == 12
    assert model.backbone.embed_dim == DigitsViT().width
    assert model.backbone.patch_embed.img_size == (DigitsViT().image_size,) * 2
    assert model.backbone.head.out_features == 10


def test_the_weights_come_from_the_file(random_weights, monkeypatch):
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    first, second = (DigitsViT().build(10).state_dict() for _ in range(2))
    assert len(first) > 12 * 12
    assert identical(dict(first), dict(second))
    assert all(tensor.dtype == torch.float32 for tensor in first.values())


def test_the_fingerprint_is_the_digest_of_the_weights(random_weights, monkeypatch):
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    card = json.loads(random_weights.with_suffix(".json").read_text())
    assert DigitsViT().fingerprint() == f"sha256:{card['sha256']}"


def test_another_number_of_classes_is_an_error():
    with pytest.raises(UserError) as refusal:
        DigitsViT().check_weights(7)
    assert str(refusal.value) == "`backbone.name` digits_vit classifies ten digits, but the data set has 7 classes."
    DigitsViT().check_weights(10)


def test_a_changed_weights_file_is_an_error(random_weights, tmp_path, monkeypatch):
    path = tmp_path / "digits_vit.safetensors"
    content = bytearray(random_weights.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    path.with_suffix(".json").write_text(random_weights.with_suffix(".json").read_text())
    monkeypatch.setattr(vit, "WEIGHTS", path)
    with pytest.raises(UserError) as refusal:
        DigitsViT().build(10)
    assert str(refusal.value) == (
        f"{path} is not the file that its card digits_vit.json describes: "
        f"the SHA-256 of the file is {weights_file.digest(path)}."
    )


def test_the_included_weights_match_their_card():
    card = json.loads(vit.WEIGHTS.with_suffix(".json").read_text())
    model = DigitsViT().build(10)
    assert count(dict(model.backbone.named_parameters())) == card["parameters"]
    assert model.mean.flatten().tolist() == card["mean"]
    assert model.std.flatten().tolist() == card["std"]
