"""BRICKs, FedBRICK's replacements for blocks, against tests/references/fedbrick.py."""

import numpy as np
import pytest
import torch

from fedsweep.methods.fedbrick.bricks import FACTORS, Blend, Brick, InPlace, add_bricks, brick
from fedsweep.models.layered import completed
from tests.references import fedbrick as reference

GATES = ("softmax", "sigmoid")


def drawn(width: int = 6, rank: int = 2, leading: tuple[int, ...] = (), seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(zip(FACTORS, [(rank, width), (width, rank)] * 2, strict=True))
    return {
        name: torch.randn(*leading, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("gate", GATES)
def test_a_brick_equals_the_papers_formula(gate):
    factors, x = drawn(), torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    arrays = [factors[name].numpy() for name in FACTORS]
    expected = np.array([[reference.brick(token, *arrays, gate) for token in image] for image in x.numpy()])
    np.testing.assert_allclose(brick(x, factors, gate).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_several_bricks_at_once_equal_each_brick_alone(gate):
    factors = drawn(leading=(4,))
    x = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together = brick(x, factors, gate)
    for place in range(4):
        alone = brick(x[place], {name: one[place] for name, one in factors.items()}, gate)
        torch.testing.assert_close(together[place], alone, rtol=1e-12, atol=0)


def test_an_untrained_brick_is_nearly_the_identity():
    fresh, x = Brick(64, 8, "softmax"), torch.randn(2, 5, 64)
    torch.testing.assert_close(fresh(x), x * (1 + 1 / 64))
    assert sum(one.numel() for one in Brick(768, 8, "softmax").parameters()) == 24_576


@pytest.fixture
def model(federation):
    built = federation().model
    add_bricks(built, {"for_b", "for_a"}, rank=3, gate="softmax", seed=0)
    with torch.no_grad():
        for name, one in built.bricks.named_parameters():
            if name.endswith(("b1", "b2")):
                one.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return built


def test_bricks_are_trainable_and_named_after_set_block_and_factor(model):
    names = [name for name in model.trainable() if name.startswith("bricks.")]
    expected = {f"bricks.{one}.{layer}.{f}" for one in ("for_a", "for_b") for layer in range(12) for f in FACTORS}
    assert set(names) == expected
    a1 = [one for name, one in model.trainable().items() if name.endswith(".a1")]
    assert len({tuple(one.flatten().tolist()) for one in a1}) == 24  # each drawn with its own random stream


def test_a_walk_replaces_missing_blocks_by_bricks(model):
    images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    bricks = model.bricks["for_a"]
    path = completed((0, 3, 11), {layer: InPlace(layer, bricks[layer]) for layer in range(12)})
    tokens = model.embed(model.normalize(images))
    for layer in range(12):
        tokens = model.block(layer, tokens) if layer in (0, 3, 11) else bricks[layer](tokens)
    assert torch.equal(model(images, path), model.classify(tokens))
    assert not torch.equal(model(images, path), model(images, (0, 3, 11)))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_blend_moves_from_the_block_to_its_brick(model, share):
    tokens = torch.randn(2, 17, 64, requires_grad=True)
    stand_in = model.bricks["for_a"][4]
    step = Blend(4, stand_in, share)
    out = step(model, tokens)
    block, own = model.block(4, tokens), stand_in(tokens)
    torch.testing.assert_close(out, share * block + (1 - share) * own)
    if share in (0.0, 1.0):
        assert torch.equal(out, block if share else own)
    torch.testing.assert_close(step.gap, (own - block).square().mean())
    (through,) = torch.autograd.grad(step.gap, tokens)
    frozen = (stand_in(tokens) - block.detach()).square().mean()
    torch.testing.assert_close(through, torch.autograd.grad(frozen, tokens)[0])  # the block gets no gradient
