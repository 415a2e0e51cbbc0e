"""The hyperparameters that population based training may change without changing the model of a saved state."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.federation.rounds import Federation, RoundResult, federate
from fedsweep.sweep.space.settings import MOVABLE
from tests.conformance.conftest import SMALL_GATE, SMALL_SERVER

pytestmark = pytest.mark.usefixtures("read_once")

SURROGATES = {"synthetic": {"name": "surrogate", "share": 0.01}, "partition.proxy_share": 0.2}
LONGER = {**SMALL_SERVER, "server": {"warmup_epochs": 1, "epochs": 8, "batch_size": 8}}
CLIENTS = {"partition.validation_share": 0.02, "partition.test_share": 0.02}
ONE_BLOCK: dict[str, Any] = {"name": "fedms", "global_rounds": 0, **SMALL_GATE}
BRICK: dict[str, Any] = {"method": {"name": "fedbrick", "server_epochs": 1}, "partition.proxy_share": 0.2}
BRICK_OVER = {
    base: {**BRICK, "method": {**BRICK["method"], "over": {"name": base}}} for base in ("inclusivefl", "depthfl")
}
CASES: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"lora.dropout": 0.1}, {"optimizer.lr": 0.03, "optimizer.momentum": 0.5, "optimizer.weight_decay": 0.01}),
    ({"lora.dropout": 0.1}, {"optimizer.clip_norm": 0.01, "lora.dropout": 0.3}),
    ({"optimizer": {"name": "adam"}}, {"optimizer.eps": 0.01}),
    ({"base_optimizer": {"name": "fedprox"}}, {"base_optimizer.mu": 1.0}),
    ({"base_optimizer": {"name": "feddyn"}}, {"base_optimizer.alpha": 1.0}),
    ({"method": {"name": "inclusivefl"}}, {"method.beta": 0.9}),
    ({"method": {"name": "depthfl"}}, {"method.ramp": 2.0}),
    (BRICK, {"method.server_lr": 0.01, "method.lambda_w": 1.0, "method.lambda_theta": 1.0, "method.lambda_d": 1.0}),
    (BRICK_OVER["inclusivefl"], {"method.over.beta": 0.9}),
    (BRICK_OVER["depthfl"], {"method.over.ramp": 2.0}),
    (
        {"method": {"name": "fedag", **SMALL_SERVER}, **SURROGATES},
        {"method.gamma": 0.9, "method.strength": 5.0},
    ),
    # `delta` changes gradients only once training has raised the attention above the small default margin.
    (
        {"method": {"name": "fedag", "strength": 10.0, **LONGER}, **SURROGATES},
        {"method.delta": 0.9},
    ),
    # The initial threshold of -1 activates no block before it changes, because every gain in accuracy exceeds it.
    # Blocks that the new threshold activates are trained in the following round.
    (
        {"method": {**ONE_BLOCK, "sal": {"queue": 1, "threshold": -1.0}}, **CLIENTS, "federation.rounds": 4},
        {"method.sal.threshold": 1.0},
    ),
]


def changes_of(around: dict[str, Any], clip: Path) -> dict[str, Any]:
    changes = {"federation.rounds": 3, "local.steps": 3, **around}  # momentum needs more than one step
    if changes.get("method", {}).get("name") == "fedag":
        changes["method"] = {**changes["method"], "clip": {"name": "clip", "model": str(clip)}}
    if changes.get("method", {}).get("name") == "fedms":
        changes |= {"backbone": {"name": "clip", "model": str(clip)}, "lora.position": "mlp"}
    return changes


def same(one: RoundResult, other: RoundResult) -> bool:
    tensors = zip(one.state.adapter.values(), other.state.adapter.values(), strict=True)
    return one.metrics == other.metrics and all(torch.equal(*pair) for pair in tensors)


def test_every_movable_hyperparameter_has_a_case() -> None:
    assert sorted(name for _, changes in CASES for name in changes) == sorted(MOVABLE)


@pytest.mark.slow
@pytest.mark.parametrize(("around", "changes"), CASES, ids=lambda one: ", ".join(one))
def test_a_changed_value_keeps_the_metrics_of_the_state_and_changes_later_rounds(
    around: dict[str, Any], changes: dict[str, float], random_clip: Path, federation: Callable[..., Federation]
) -> None:
    around = changes_of(around, random_clip)
    _, _, second, *rest = federate(federation(around))
    for name, value in changes.items():
        other = federation({**around, name: value})
        evaluated = other.evaluate(second.state, 1)
        assert evaluated == {one: second.metrics[one] for one in evaluated}
        went = list(federate(other, second))
        assert [(one.round, one.metrics.keys()) for one in went] == [(one.round, one.metrics.keys()) for one in rest]
        assert not all(map(same, went, rest)), f"{name} does not change later rounds"


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"lora.scaling": 3.0}])
def test_an_unmovable_hyperparameter_changes_the_metrics_of_the_state(
    change: dict[str, float], random_clip: Path, federation: Callable[..., Federation]
) -> None:
    around = changes_of({}, random_clip)
    _, first = islice(federate(federation(around)), 2)
    evaluated = federation({**around, **change}).evaluate(first.state, 1)
    assert evaluated != {one: first.metrics[one] for one in evaluated}
