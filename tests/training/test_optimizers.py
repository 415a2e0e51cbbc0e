"""SGD and Adam, compared with their papers (tests/references/sgd.py, adam.py) and with torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.testing.compare import identical
from fedsweep.training.optimizers import SGD, Adam, AdamConfig, SGDConfig, clipped, plain_adam
from tests.references import adam as adam_reference
from tests.references import sgd as sgd_reference

STEPS = st.lists(st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5), min_size=1, max_size=6)
SHAPES = [(8, 5), (7,), (1, 3, 2)]


def drawn(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


@given(
    STEPS,
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.0, 1e-5, 0.1]),
    st.sampled_from([None, 0.5, 10.0]),
)
def test_sgd_follows_its_equations(steps, momentum, weight_decay, clip_norm):
    start = [np.array([1.0, -2.0], dtype=np.float32), np.array([[0.5, 3.0, -1.0]], dtype=np.float32)]
    gradients = [[np.array(step[:2], dtype=np.float32), np.array([step[2:]], dtype=np.float32)] for step in steps]
    parameters = [torch.tensor(one) for one in start]
    sgd = SGD(SGDConfig(lr=0.1, momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm), parameters)
    for step in gradients:
        sgd.step([torch.tensor(one) for one in step])
    expected = sgd_reference.descend(start, gradients, 0.1, momentum, weight_decay, clip_norm)
    for parameter, value in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.numpy(), value, rtol=1e-5, atol=1e-5)


def assert_equal_steps(
    config: SGDConfig | AdamConfig, theirs: torch.optim.Optimizer, parameters: list[Tensor], steps: int
) -> None:
    """Check after every step that both optimizers give the same parameters; large and small gradients alternate."""
    values = [one.detach().clone() for one in parameters]
    ours = config.over(values)
    for step in range(steps):
        gradients = drawn(100 + step, scale=0.05 if step % 2 else 1.0)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        ours.step([gradient.clone() for gradient in gradients])
        theirs.step()
        assert identical(values, [one.data for one in parameters])


@pytest.mark.parametrize("clip_norm", [None, 0.7, 100.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_is_bit_identical_to_torchs(momentum, weight_decay, clip_norm):
    parameters = [torch.nn.Parameter(one) for one in drawn(0)]
    config = SGDConfig(lr=0.03, momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm)
    theirs = torch.optim.SGD(parameters, lr=0.03, momentum=momentum, weight_decay=weight_decay)
    assert_equal_steps(config, theirs, parameters, 6)


@pytest.mark.parametrize("clip_norm", [None, 0.7, 100.0])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.98), 1e-6), ((0.9, 0.999), 1e-8), ((0.0, 0.0), 1e-3)])
def test_adam_is_bit_identical_to_torchs(betas, eps, weight_decay, decoupled, clip_norm):
    parameters = [torch.nn.Parameter(one) for one in drawn(0)]
    shared = {"lr": 0.03, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **shared)
    assert_equal_steps(AdamConfig(**shared, decoupled=decoupled, clip_norm=clip_norm), theirs, parameters, 10)


def test_plain_adam_is_bit_identical_to_torchs_adam_with_its_defaults():
    parameters, values = ([torch.nn.Parameter(one) for one in drawn(0)] for _ in range(2))
    ours, theirs = plain_adam(0.03, values), torch.optim.Adam(parameters, lr=0.03)
    for step in range(6):
        gradients = drawn(100 + step, scale=10.0 ** (step % 3))  # norms from about 7 to about 700
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        ours.step(gradients)
        theirs.step()
        assert identical([one.data for one in values], [one.data for one in parameters])


@pytest.mark.parametrize("clip_norm", [None, 0.7, 100.0])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.5, 0.9)])
def test_adam_follows_its_algorithm(betas, weight_decay, decoupled, clip_norm):
    start, gradients = drawn(0), [drawn(1 + step, scale=0.05 if step % 2 else 1.0) for step in range(8)]
    parameters = [one.clone() for one in start]
    shared = {"lr": 0.02, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay, "decoupled": decoupled}
    adam = Adam(AdamConfig(**shared, clip_norm=clip_norm), parameters)
    for step in gradients:
        adam.step(step)
    arrays = [[one.numpy() for one in step] for step in gradients]
    expected = adam_reference.descend([one.numpy() for one in start], arrays, **shared, clip_norm=clip_norm)
    for parameter, value, begun in zip(parameters, expected, start, strict=True):
        np.testing.assert_allclose(parameter.numpy(), value, rtol=1e-5, atol=1e-6)
        assert np.abs(value - begun.numpy()).max() > 0.02


def test_both_kinds_of_decay_and_clipping_change_the_result():
    ends = []
    for changes in ({}, {"decoupled": True}, {"weight_decay": 0.0}, {"clip_norm": 0.1}):
        parameters = drawn(0)
        adam = Adam(AdamConfig(**{"lr": 0.02, "weight_decay": 0.5, "clip_norm": None, **changes}), parameters)
        for step in range(3):
            adam.step(drawn(1 + step))
        ends.append(torch.cat([one.flatten() for one in parameters]))
    gaps = torch.cdist(torch.stack(ends), torch.stack(ends)) + torch.eye(4)
    assert gaps.min() > 1e-3


@pytest.mark.parametrize("config", [SGDConfig(lr=0.1), AdamConfig(lr=0.1)], ids=lambda config: config.name)
def test_parameters_change_in_place_and_gradients_do_not_change(config):
    parameters, gradients = drawn(0), drawn(1, scale=100.0)
    places, given_gradients = [one.data_ptr() for one in parameters], [one.clone() for one in gradients]
    stepper = config.over(parameters)
    for _ in range(2):
        stepper.step(gradients)
    assert [one.data_ptr() for one in parameters] == places
    assert identical(gradients, given_gradients)
    assert not any(torch.equal(one, begun) for one, begun in zip(parameters, drawn(0), strict=True))


@pytest.mark.parametrize("config", [SGDConfig(lr=0.1), AdamConfig(lr=0.1)], ids=lambda config: config.name)
def test_a_new_optimizer_has_no_memory(config):
    ends = []
    for earlier in (0, 3):
        used, parameters = config.over(drawn(5)), drawn(0)
        for step in range(earlier):
            used.step(drawn(20 + step))
        stepper = config.over(parameters)
        for step in range(2):
            stepper.step(drawn(1 + step))
        ends.append(parameters)
    assert identical(*ends)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_clipped_gradients_keep_their_direction_and_have_at_most_that_norm(scale):
    gradients = drawn(3, scale)
    whole, short = (
        torch.cat([one.flatten() for one in part]).double() for part in (gradients, clipped(gradients, 2.0))
    )
    assert short.norm().item() == pytest.approx(min(whole.norm().item(), 2.0), rel=1e-5)
    torch.testing.assert_close(short / short.norm(), whole / whole.norm())
    assert identical(clipped(gradients, None), gradients)
    assert identical(clipped([torch.zeros(3)], 1.0), [torch.zeros(3)])


def test_a_run_chooses_its_optimizer_by_name(experiment):
    assert experiment.override({"optimizer": "adam"}, "run").optimizer == AdamConfig()
    assert experiment.override({"optimizer": "sgd"}, "run").optimizer == SGDConfig()
    changed = {"optimizer": "adam", "optimizer.betas": [0.8, 0.9], "optimizer.decoupled": True}
    assert experiment.override(changed, "run").optimizer == AdamConfig(betas=(0.8, 0.9), decoupled=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "adm"}, "`optimizer.name` must be one of sgd, adam, but it is `adm`; did you mean `adam`?"),
        ({"optimizer": {"lr": 0.1}}, "`optimizer` must have a `name`."),
        (
            {"optimizer": "adam", "optimizer.momentum": 0.9},
            "`optimizer.momentum` is not a hyperparameter of this run; did you mean `optimizer.name` or "
            "`optimizer.betas` or `optimizer.eps`?",
        ),
        (
            {"optimizer": "adam", "optimizer.betas": [0.9, 1.0]},
            "`optimizer.betas.1` must be less than 1, but it is 1.0.",
        ),
        ({"optimizer": "adam", "optimizer.betas": [0.9]}, "`optimizer.betas.1` is missing."),
        ({"optimizer": "adam", "optimizer.eps": 0.0}, "`optimizer.eps` must be greater than 0, but it is 0.0."),
        (
            {"optimizer": "adam", "optimizer.weight_decay": -0.1},
            "`optimizer.weight_decay` must be greater than or equal to 0, but it is -0.1.",
        ),
        ({"optimizer.lr": 0.0}, "`optimizer.lr` must be greater than 0, but it is 0.0."),
        ({"optimizer.momentum": 1.0}, "`optimizer.momentum` must be less than 1, but it is 1.0."),
    ],
)
def test_an_invalid_optimizer_is_one_error_message(experiment, changes, sentence):
    with pytest.raises(UserError) as refusal:
        experiment.override(changes, "run")
    assert str(refusal.value) == f"run: {sentence}"
