"""The embedded backbone, its weights file, and the papers' counts (tests/golden)."""

import json
from pathlib import Path

import pytest
import torch

from fedsweep.costs import count, held_parameters
from fedsweep.errors import UserError
from fedsweep.models import LoraConfig, add_lora, vit
from fedsweep.models.layered import names_within
from fedsweep.models.vit import DigitsViT, LayeredViT
from tests.compare import identical

COUNTS = json.loads((Path(__file__).parents[1] / "golden" / "counts.json").read_text())


def block_parameters(model: LayeredViT, layer: int) -> int:
    """Parameters of one block, its adapters included."""
    return held_parameters(model, [layer]) - held_parameters(model, [])


@pytest.fixture(scope="module")
def vit_b16() -> LayeredViT:
    """timm's ViT-B/16 with 100 classes, before adapters."""
    import timm

    backbone = timm.create_model("vit_base_patch16_224", num_classes=100)
    return LayeredViT(backbone, [0.5] * 3, [0.5] * 3)


def test_the_papers_counts_come_out_exactly(vit_b16):
    expected = COUNTS["vit_b16"]
    assert block_parameters(vit_b16, 0) == block_parameters(vit_b16, 11) == expected["block"]

    add_lora(vit_b16, LoraConfig(rank=8, alpha=8.0), seed=0)
    trainable = vit_b16.trainable()
    head = {name: trainable[name] for name in names_within(trainable, [])}
    first = {name: trainable[name] for name in names_within(trainable, [0]) if name not in head}
    assert count(head) == expected["head_100_classes"]
    assert count(first) == expected["lora_r8_both_per_block"]
    assert block_parameters(vit_b16, 0) == expected["block"] + expected["lora_r8_both_per_block"]
    assert held_parameters(vit_b16, range(12)) == expected["all_with_lora_r8_both_and_100_classes"]
    assert held_parameters(vit_b16, range(4)) == (
        expected["all_with_lora_r8_both_and_100_classes"] - 8 * block_parameters(vit_b16, 0)
    )
    assert len(expected) == 4


def test_the_released_codes_patch_adapter_has_its_count():
    import timm

    model = LayeredViT(timm.create_model("vit_base_patch16_224", num_classes=100), [0.5] * 3, [0.5] * 3)
    add_lora(model, LoraConfig(rank=8, alpha=8.0, patch_embed=True), seed=0)
    adapter = {name: tensor for name, tensor in model.trainable().items() if "patch_embed" in name}
    assert count(adapter) == COUNTS["vit_b16_patch_embed_lora_r8"]


def test_the_embedded_backbone_has_the_depth_and_width_that_its_config_says(random_weights, monkeypatch):
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    model = DigitsViT().build(10)
    assert model.num_layers == DigitsViT().depth == 12
    assert model.backbone.embed_dim == DigitsViT().width
    assert model.backbone.head.out_features == 10


def test_the_weights_come_from_the_file(random_weights, monkeypatch):
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    first, second = (DigitsViT().build(10).state_dict() for _ in range(2))
    assert len(first) > 12 * 12
    assert identical(dict(first), dict(second))
    assert all(tensor.dtype == torch.float32 for tensor in first.values())


def test_another_number_of_classes_is_refused():
    with pytest.raises(UserError) as refusal:
        DigitsViT().build(7)
    assert str(refusal.value) == "`backbone.name` digits_vit knows ten digits, but the data has 7 classes."


def test_a_changed_weights_file_is_refused(random_weights, tmp_path, monkeypatch):
    path = tmp_path / "digits_vit.safetensors"
    content = bytearray(random_weights.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    path.with_suffix(".json").write_text(random_weights.with_suffix(".json").read_text())
    monkeypatch.setattr(vit, "WEIGHTS", path)
    with pytest.raises(UserError) as refusal:
        DigitsViT().build(10)
    assert str(refusal.value) == "digits_vit.safetensors is not the file that its card digits_vit.json describes."


def test_the_shipped_weights_fit_their_card():
    card = json.loads(vit.WEIGHTS.with_suffix(".json").read_text())
    model = DigitsViT().build(10)
    assert count(dict(model.backbone.named_parameters())) == card["parameters"]
    assert model.mean.flatten().tolist() == card["mean"]
    assert model.std.flatten().tolist() == card["std"]
