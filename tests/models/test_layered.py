"""The model that runs block by block, compared with timm's own forward pass."""

import pytest
import torch
from torch import nn

from fedsweep.models import build_model
from fedsweep.models.initial_values import draw_linears
from fedsweep.models.names import layer_of, names_within
from fedsweep.testing.compare import copied, identical, memory


@pytest.fixture
def model(tiny):
    """Return the tiny model with random adapters. Untrained adapters have no effect, because their factor B is zero."""
    built = build_model(tiny.backbone, tiny.lora, 10, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in built.trainable().items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return built


@pytest.fixture
def images():
    return torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_walk_is_bit_identical_to_timms_forward(model, images):
    pixels = (images.float() / 255 - 0.5) / 0.5
    assert torch.equal(model(images), model.backbone(pixels))
    assert torch.equal(model(images, range(12)), model(images))


@torch.no_grad()
@pytest.mark.parametrize("held", [(0,), (11,), (0, 3, 7), (1, 2, 4, 8, 9, 10), ()])
def test_a_walk_of_held_blocks_equals_a_timm_model_of_these_blocks(model, images, held):
    pixels = model.normalize(images)
    walked, whole = model(images, held), model(images)
    model.backbone.blocks = nn.Sequential(*(model.backbone.blocks[layer] for layer in held))
    assert torch.equal(walked, model.backbone(pixels))
    assert not torch.allclose(walked, whole, atol=1e-3)


@torch.no_grad()
def test_normalisation_uses_the_cards_mean_and_deviation(model):
    model.mean.copy_(torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1))
    model.std.copy_(torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1))
    white = model.normalize(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    assert white.dtype == torch.float32
    assert white[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]


def test_an_adapter_is_a_copy_that_can_be_loaded_again(model):
    adapter = model.adapter()
    assert not memory(adapter) & memory(list(model.parameters()))
    changed = {name: tensor + 1 for name, tensor in adapter.items()}
    kept = copied(changed)
    model.load_adapter(changed)
    assert identical(model.adapter(), kept)
    assert not memory(changed) & memory(list(model.parameters()))


def test_loading_part_of_an_adapter_changes_nothing_else(model):
    before = model.adapter()
    model.load_adapter({"backbone.head.bias": torch.ones(10)})
    after = model.adapter()
    assert torch.equal(after.pop("backbone.head.bias"), torch.ones(10))
    del before["backbone.head.bias"]
    assert identical(before, after)
    model.load_adapter({})
    assert identical(after | {"backbone.head.bias": torch.ones(10)}, model.adapter())


@pytest.mark.parametrize(
    "name", ["blocks.0.attn.proj.lora_A.default.weight", "backbone.blocks.0.norm1.weight", "backbone.haed.weight"]
)
def test_loading_an_unknown_or_frozen_tensor_is_an_error(model, name):
    before = model.adapter()
    with pytest.raises(KeyError, match=f"not trainable tensors of this model: {name}"):
        model.load_adapter({"backbone.head.bias": torch.ones(10), name: torch.zeros(64)})
    assert identical(before, model.adapter())


def test_the_name_of_a_tensor_contains_its_block():
    names = ["backbone.head.bias", "backbone.blocks.1.a", "backbone.blocks.11.a", "backbone.patch_embed.blocks.1.a"]
    assert [layer_of(name) for name in names] == [None, 1, 11, None]
    assert names_within(names, [1]) == [names[0], names[1], names[3]]
    assert names_within(names, []) == [names[0], names[3]]


def test_drawn_linear_layers_depend_only_on_the_seed_the_strings_and_the_place():
    def drawn(seed: int, *strings: str) -> list[torch.Tensor]:
        layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))  # drawn from torch's global generator
        draw_linears(layers, seed, *strings)
        return [*layers.parameters()]

    first = drawn(0, "gate", "a")
    assert all(torch.equal(one, other) for one, other in zip(first, drawn(0, "gate", "a"), strict=True))
    assert not torch.equal(first[0], first[2])
    for other in (drawn(1, "gate", "a"), drawn(0, "adapter", "a"), drawn(0, "gate", "b")):
        assert not torch.equal(first[0], other[0])
    assert first[1].count_nonzero() == 0
    assert 0.25 < first[0].abs().max() <= 0.5  # torch's uniform distribution up to 1 / sqrt(inputs)
