"""FedBRICK's parallel distillation on the server, compared with training each block alone with torch's Adam."""

import numpy as np
import pytest
import torch

from fedsweep.methods.fedbrick.bricks import FACTORS, activations, brick, distil
from fedsweep.types import ImageSet

LAYERS, IMAGES, TOKENS, WIDTH, RANK = 4, 11, 3, 6, 2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def stacked():
    return {
        name: random(LAYERS, *shape, seed=place)
        for place, (name, shape) in enumerate(zip(FACTORS, [(RANK, WIDTH), (WIDTH, RANK)] * 2, strict=True))
    }


@pytest.fixture
def passed():
    return random(LAYERS + 1, IMAGES, TOKENS, WIDTH, seed=9)


def one_by_one(stacked, passed, gate, epochs, lr, batch_size, rng):
    """Distil the blocks one after the other with torch.optim.Adam, with the same batches for every block."""
    orders = [rng.permutation(IMAGES) for _ in range(epochs)]
    learned = []
    for layer in range(LAYERS):
        factors = {name: one[layer].clone().requires_grad_() for name, one in stacked.items()}
        optimizer = torch.optim.Adam(factors.values(), lr=lr)
        for order in orders:
            for start in range(0, IMAGES, batch_size):
                chosen = order[start : start + batch_size]
                gap = brick(passed[layer, chosen], factors, gate) - passed[layer + 1, chosen]
                optimizer.zero_grad()
                (gap**2).mean().backward()
                optimizer.step()
        learned.append({name: one.detach() for name, one in factors.items()})
    return {name: torch.stack([one[name] for one in learned]) for name in FACTORS}


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_training_all_blocks_in_parallel_equals_training_each_alone(stacked, passed, gate):
    ours = distil(stacked, passed, gate, 5, 0.01, 4, np.random.default_rng(3))
    theirs = one_by_one(stacked, passed, gate, 5, 0.01, 4, np.random.default_rng(3))
    for name in FACTORS:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
        assert (ours[name] - stacked[name]).abs().amax(dim=(1, 2)).min() > 0.01  # every BRICK has changed


def test_distillation_does_not_change_its_inputs(stacked, passed):
    kept = {name: one.clone() for name, one in stacked.items()}
    distil(stacked, passed, "softmax", 1, 0.01, 4, np.random.default_rng(0))
    assert all(torch.equal(stacked[name], kept[name]) for name in FACTORS)


def test_activations_equal_the_full_models_for_any_batch_size(federation):
    model = federation().model
    images = torch.randint(256, (7, 3, 16, 16), dtype=torch.uint8)
    sets = [ImageSet(images[:5], torch.zeros(5)), ImageSet(images[5:], torch.zeros(2))]
    passed = activations(model, sets, batch_size=3)
    assert passed.shape == (13, 7, 17, 64)
    with torch.no_grad():
        torch.testing.assert_close(passed[0], model.embed(model.normalize(images)))
        for layer in range(12):
            torch.testing.assert_close(passed[layer + 1], model.block(layer, passed[layer]))
        torch.testing.assert_close(model.classify(passed[-1]), model(images))
