"""Schedule, parameter groups, moving average and mixing of a pre-training, compared with their formulas."""

import math

import numpy as np
import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from fedsweep.pretraining.config import AdamWConfig, MixConfig, ScheduleConfig
from fedsweep.pretraining.network import adamw, build_network, cosine, mixer


def rates(config: ScheduleConfig, lr: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = cosine(optimizer, config, lr, steps)
    found = []
    for step in range(steps):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(("warmup", "floor", "steps"), [(0.1, 0.0, 100), (0.25, 1e-4, 37), (0.0, 0.0, 5), (0.5, 0, 1)])
def test_the_learning_rate_rises_linearly_and_decays_as_a_cosine(warmup, floor, steps):
    found = rates(ScheduleConfig(warmup=warmup, floor=float(floor)), 0.01, steps)
    w = math.floor(warmup * steps)
    for step, rate in enumerate(found):
        if step < w:
            expected = 0.01 * (step + 1) / (w + 1)
        else:
            share = (step - w) / max(steps - w, 2)
            expected = floor + (0.01 - floor) * (1 + math.cos(math.pi * share)) / 2
        assert rate == pytest.approx(expected, rel=1e-9)
    assert found[w] == max(found) == 0.01
    assert min(found) > 0


def test_only_weight_matrices_decay(toy):
    network = build_network(toy, 3)
    optimizer = adamw(network, AdamWConfig(weight_decay=0.3))
    decay = {id(one): group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    names = dict(network.named_parameters())
    assert len(decay) == len(names) > 20
    for name, parameter in names.items():
        matrix = parameter.ndim > 1 and not name.endswith(("pos_embed", "cls_token"))
        assert decay[id(parameter)] == (0.3 if matrix else 0.0), name
    assert sorted(set(decay.values())) == [0.0, 0.3]


def test_the_moving_average_equals_its_formula():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    average = ModelEmaV3(layer, decay=0.9, use_warmup=True)
    expected = layer.weight.detach().double().numpy().copy()
    for step in range(1, 40):
        with torch.no_grad():
            layer.weight += torch.randn(2, 3)
        average.update(layer, step=step)
        kept = 0.0 if step == 1 else min(0.9, 1 - step ** (-2 / 3))  # the first step replaces the untrained weights
        expected = kept * expected + (1 - kept) * layer.weight.detach().double().numpy()
    np.testing.assert_allclose(average.module.weight.detach().numpy(), expected, rtol=1e-5)


def test_mixing_gives_equal_shares_of_pixels_and_classes():
    # Image i has brightness i everywhere, so the mean of a mixed image gives the shares of its two images.
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 8, 8).contiguous()
    labels = torch.arange(5)
    torch.manual_seed(0)
    for config in (MixConfig(mixup=1.0), MixConfig(cutmix=1.0), MixConfig(mixup=0.2, cutmix=1.0)):
        mix = mixer(config, 5)
        assert mix is not None
        for _ in range(10):
            mixed, shares = mix(images, labels)
            torch.testing.assert_close(shares.sum(1), torch.ones(5))
            torch.testing.assert_close(mixed.mean((1, 2, 3)), shares @ torch.arange(5.0), atol=1e-4, rtol=0)
    assert mixer(MixConfig(), 5) is None
