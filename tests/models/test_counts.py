"""The papers' parameter counts (tests/golden), computed without allocating tensors."""

import json
from pathlib import Path

import pytest
import torch

from fedsweep.models import LayeredModel, LoraConfig, add_lora
from fedsweep.models.names import names_within
from fedsweep.models.timm.architecture import Architecture, outline
from fedsweep.training.costs import count, held_parameters, sizes_of

COUNTS = json.loads((Path(__file__).parents[1] / "golden" / "counts.json").read_text())
MODELS = {"vit_b16": "vit_base_patch16_224", "mixer_b16": "mixer_b16_224"}


def on_meta(model: str, num_classes: int = 100) -> LayeredModel:
    """Return a model without adapters on the meta device, where tensors have shapes but no values."""
    architecture = Architecture(model)
    with torch.device("meta"):
        backbone = architecture.build()
        backbone.reset_classifier(num_classes)
        return outline(architecture).family(backbone, [0.5] * 3, [0.5] * 3)


def block_parameters(model: LayeredModel, layer: int) -> int:
    """Return the number of parameters of one block, including its adapters."""
    sizes = sizes_of(model)
    return held_parameters(sizes, [layer]) - held_parameters(sizes, [])


def test_every_golden_count_has_a_test():
    assert sum(len(values) if isinstance(values, dict) else 1 for values in COUNTS.values()) == 9 + 9
    assert set(COUNTS) == {
        *MODELS,
        "vit_b16_patch_embed_lora_r8",
        "fedms",
    }  # tests/sweep/plan/test_model_counts.py tests the counts of FedMS


@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_the_papers(model):
    expected, layered = COUNTS[model], on_meta(MODELS[model])
    assert len(expected) == 4
    assert {tensor.device.type for tensor in layered.parameters()} == {"meta"}
    assert {block_parameters(layered, layer) for layer in range(12)} == {expected["block"]}

    add_lora(layered, LoraConfig(rank=8, alpha=8.0), seed=0)
    trainable = layered.trainable()
    head = {name: trainable[name] for name in names_within(trainable, [])}
    first = {name: trainable[name] for name in names_within(trainable, [0]) if name not in head}
    assert count(head) == expected["head_100_classes"]
    assert count(first) == expected["lora_r8_both_per_block"]
    assert block_parameters(layered, 0) == expected["block"] + expected["lora_r8_both_per_block"]
    whole = expected["all_with_lora_r8_both_and_100_classes"]
    sizes = sizes_of(layered)
    assert held_parameters(sizes, range(12)) == whole
    assert held_parameters(sizes, range(4)) == whole - 8 * block_parameters(layered, 0)


def test_the_patch_embedding_adapter_has_the_released_codes_count():
    model = on_meta("vit_base_patch16_224")
    add_lora(model, LoraConfig(rank=8, alpha=8.0, patch_embed=True), seed=0)
    adapter = {name: tensor for name, tensor in model.trainable().items() if "patch_embed" in name}
    assert count(adapter) == COUNTS["vit_b16_patch_embed_lora_r8"]
