"""Structural bias, compared with Theorem 1 on a linear network and with exact gradients and Jacobians."""

import numpy as np
import pytest
import torch
from torch import nn

from fedsweep.federation.rounds import federate
from fedsweep.methods.fedbrick.bricks import Brick, InPlace
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import layer_of
from fedsweep.training.drift_and_structural_bias import (
    Placed,
    bias_metrics,
    gradient_distortion,
    jacobian_discrepancy,
    slope,
    structural_bias,
)
from fedsweep.training.local_training import cross_entropy
from fedsweep.types import Client

WIDTH, LAYERS = 12, 6


class Linear(LayeredModel):
    """The linear network of Theorem 1: blocks a -> W a, no embedding and no head. Tokens are (1, 1, width)."""

    def __init__(self, blocks: list[torch.Tensor]) -> None:
        body = nn.Module()
        body.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in blocks)
        for layer, weight in zip(body.blocks, blocks, strict=True):
            layer.weight.data.copy_(weight)
        super().__init__(body, [0.0], [1.0])

    sublayers = {}  # noqa: RUF012
    patch_projection = ""
    fits = staticmethod(lambda backbone: True)

    def embed(self, pixels):
        return pixels

    def normalize(self, images):
        return images

    def classify(self, tokens):
        return tokens


def deviating(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return matrices I + u v^T with independent u and v; each differs from the identity in one dimension."""
    u, v = (torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return [torch.eye(WIDTH, dtype=torch.float64) + torch.outer(a, b) / 4 for a, b in zip(u, v, strict=True)]


@pytest.mark.parametrize("skipped", [(), (4,), (2, 5), (1, 3, 4), (1, 2, 3, 4, 5)])
def test_the_space_of_distortions_has_as_many_dimensions_as_skipped_layers(skipped):
    """Theorem 1 (Eq. 12) for epsilon_1 over all possible gradients v of the loss, with the first block held.

    The theorem assumes that each skipped layer deviates from the identity in one direction of its own. With deviations
    of full rank, a single skipped layer would span all dimensions.
    """
    generator = torch.Generator().manual_seed(0)
    model = Linear(deviating(LAYERS, generator))
    held = tuple(layer for layer in range(LAYERS) if layer not in skipped)
    start = torch.randn(1, 1, WIDTH, generator=generator, dtype=torch.float64)
    (weight,) = model.backbone.blocks[0].parameters()
    errors = []
    for v in torch.eye(WIDTH, dtype=torch.float64):  # the loss <v, a_L> has the gradient v for any a_L
        own, full = (torch.autograd.grad((model(start, path) * v).sum(), weight)[0] for path in (held, range(LAYERS)))
        errors.append((own - full).flatten().numpy())
    values = np.linalg.svd(np.stack(errors), compute_uv=False)
    assert (values > 1e-9 * max(values.max(), 1)).sum() == len(skipped)


def placed(small, name: str, stand_ins=None, held=(0, 3, 7)) -> tuple[Placed, torch.Tensor, torch.Tensor]:
    client = next(one for one in small.clients if one.id == name)
    images, labels = client.train.take(torch.arange(6))
    return Placed(client, held, stand_ins or {}), images, labels


def test_distortion_is_the_difference_of_gradients_block_by_block(federation):
    small = federation({"lora.dropout": 0.0})
    with torch.no_grad():  # with B = 0, A would have no gradient
        for name, one in small.model.trainable().items():
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))))
    where, images, labels = placed(small, "plain")
    by_block, relative = gradient_distortion(small.model, cross_entropy, range(12), where, images, labels)
    gradients = []
    for walk in (where.held, range(12)):
        small.model.zero_grad()
        cross_entropy(small.model, images, labels, walk).backward()
        gradients.append(
            {name: one.grad.double() for name, one in small.model.trainable().items() if layer_of(name) in where.held}
        )
    own, full = gradients
    assert set(by_block) == {0, 3, 7}
    for layer, error in by_block.items():
        squares = [(own[name] - full[name]).square().sum() for name in own if layer_of(name) == layer]
        assert len(squares) == 4
        assert error == pytest.approx(sum(squares).item() ** 0.5, rel=1e-6)
    whole = sum(one.square().sum() for one in full.values()).item() ** 0.5
    assert relative == pytest.approx(sum(error**2 for error in by_block.values()) ** 0.5 / whole, rel=1e-6)
    assert relative > 0.1


def test_a_client_that_holds_all_blocks_is_not_biased(federation):
    changes = {"evaluation.metrics": ["structural_bias"], "federation.depths": [12], "data.domains": ["plain"]}
    small = federation({**changes, "federation.rounds": 1})
    _, *results = federate(small)
    for result in results:
        found = {name: value for name, value in result.metrics.items() if name.startswith("structural_bias/")}
        assert set(found.values()) == {0.0}
        assert len(found) == 3 + 12


def exact(of, x: torch.Tensor) -> torch.Tensor:
    """Return the Jacobian of the function `of` at the tokens `x` of one image, as a square matrix."""
    return torch.autograd.functional.jacobian(of, x).reshape(x.numel(), x.numel())


def test_the_estimated_discrepancy_equals_the_exact_one(federation):
    """The estimate from random signs agrees with full Jacobians on blocks of width 64 with 17 tokens."""
    model = federation({"lora.dropout": 0.0}).model
    stand_in = Brick(64, 4, "softmax")
    generator = torch.Generator().manual_seed(0)
    for one in stand_in.parameters():
        one.data.normal_(std=0.2, generator=generator)
    image = torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8, generator=generator)
    step = InPlace(2, stand_in)
    where = Placed(None, tuple(layer for layer in range(12) if layer != 2), {2: step})
    draws = [
        list(jacobian_discrepancy(model, range(12), where, image, torch.Generator().manual_seed(seed)))
        for seed in range(20)
    ]
    assert {len(one) for one in draws} == {1}
    with torch.no_grad():
        x = model.walk(image, (0, 1))
    block = exact(lambda one: model.block(2, one), x)
    expected = {
        "structural_bias/jacobian/identity": (torch.eye(x.numel()) - block).square().sum().item() / x.numel(),
        "structural_bias/jacobian/brick": (exact(stand_in, x) - block).square().sum().item() / x.numel(),
    }
    for name, value in expected.items():
        drawn = np.array([one[0][name] for one in draws])
        assert abs(drawn.mean() - value) < 4 * drawn.std(ddof=1) / len(drawn) ** 0.5
        assert drawn.std(ddof=1) < 0.2 * value  # a single estimate is accurate enough
    with torch.no_grad():
        error = (stand_in(x) - model.block(2, x)).square().sum() / (x - model.block(2, x)).square().sum()
    assert draws[0][0]["structural_bias/brick_error"] == pytest.approx(error.item(), rel=1e-4)


def test_the_slope_is_that_of_least_squares():
    x, y = [0, 2, 4, 6, 7, 8], [0.1, 0.5, 0.4, 0.9, 1.0, 1.3]
    assert slope(x, y) == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-9)
    assert slope([3, 3], [1.0, 2.0]) == 0.0


def test_a_server_model_above_the_deepest_clients_heads_is_measured(federation):
    method = {"name": "depthfl", "own_head": "shared"}
    changes = {"method": method, "federation.depths": [8, 3], "evaluation.metrics": ["structural_bias"]}
    changes |= {"federation.rounds": 1, "data.domains": ["plain", "noisy"]}
    _, result = federate(federation(changes))
    assert result.metrics["structural_bias/gradient"] > 0


METHODS = [
    {"name": "depthfl"},
    {"name": "fedbrick", "server_epochs": 1},
    {"name": "all_small"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_measuring_structural_bias_does_not_change_the_run(federation, tiny, method):
    changes = {"method": method, "partition.proxy_share": 0.2, "federation.depths": [12, 3]}
    changes |= {"data.domains": ["plain", "noisy"]}
    asked = {**changes, "evaluation.metrics": ["structural_bias"]}
    studied, plain = list(federate(federation(asked))), list(federate(federation(changes)))
    assert len(studied) == 3
    promised = tiny.override(asked, "test").metrics()
    expected = set(bias_metrics(method["name"] == "fedbrick"))
    for one, other in zip(studied[1:], plain[1:], strict=True):
        extra = {name: value for name, value in one.metrics.items() if name not in other.metrics}
        assert {name: value for name, value in one.metrics.items() if name in other.metrics} == dict(other.metrics)
        of_blocks = {name for name in extra if "/block/" in name}
        assert set(extra) == expected | of_blocks
        assert expected == {name for name in promised if name.startswith("structural_bias/")}
        assert len(of_blocks) == (3 if method["name"] == "all_small" else 12)
    if method["name"] == "fedbrick":
        assert studied[1].metrics["structural_bias/gradient"] > 0


def test_the_order_of_the_clients_does_not_matter_and_each_round_has_its_images(federation):
    small = federation({"lora.dropout": 0.0})
    given = [Placed(Client(one.id, one.domain, one.train, one.capacity), (0, 5), {}) for one in small.clients[:2]]
    results = [
        structural_bias(small.model, cross_entropy, range(12), order, seed=0, round=1) for order in (given, given[::-1])
    ]
    assert results[0] == results[1]
    other = structural_bias(small.model, cross_entropy, range(12), given, seed=0, round=2)
    assert other != results[0]
