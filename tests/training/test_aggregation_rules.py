"""Aggregation rules of other installed packages."""

from typing import Any

import pytest
import torch
from pydantic import create_model

from fedsweep.common.errors import UserError
from fedsweep.federation.build_and_run import run
from fedsweep.federation.extended import aggregation_config
from fedsweep.federation.run_config import RunConfig
from fedsweep.testing.compare import identical
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean, lora_residual
from fedsweep.training.aggregation_rules import Mean, aggregation_rules
from fedsweep.types import ClientUpdate, LayerAllocation
from tests.plugin_packages import Install, install

__all__ = ["install"]
LARGEST = '''
from typing import Literal

from fedsweep.training.aggregation_rules import TensorRule


class Largest(TensorRule):
    """The largest value of all clients, multiplied by a factor."""

    name: Literal["largest"] = "largest"
    factor: float = 1.0

    def combine(self, shares, tensors):
        return self.factor * tensors.amax(0)
'''
POINT = {"aggregation": {"largest": "odd_package:Largest"}}


def sent(client: str, value: float) -> ClientUpdate:
    """Return the update of a client that trained `head` and the factors of one block."""
    names = ("head", "blocks.0.lora_A.default", "blocks.0.lora_B.default")
    shapes = ((2,), (1, 3), (4, 1))
    adapter = {name: torch.full(shape, value) for name, shape in zip(names, shapes, strict=True)}
    return ClientUpdate(client, LayerAllocation.of([0]), adapter, int(10 * value), {})


def test_without_plugins_the_rule_is_the_mean() -> None:
    assert aggregation_rules() == (Mean,)
    assert aggregation_config() is AggregationConfig
    assert AggregationConfig().rule == Mean()


def test_the_server_combines_the_tensors_with_the_rule_of_another_package(install: Install) -> None:
    install(LARGEST, POINT)
    chosen = aggregation_config().of({"rule": {"name": "largest", "factor": 2.0}}, "mine")
    updates = [sent("a", 1.0), sent("b", 3.0)]
    previous = {**{name: torch.zeros_like(one) for name, one in updates[0].adapter.items()}, "idle": torch.ones(2)}
    found = layerwise_mean(previous, updates, chosen)
    assert {name: set(one.flatten().tolist()) for name, one in found.items()} == {
        **{name: {6.0} for name in updates[0].adapter},
        "idle": {1.0},
    }
    # mean(B A) is (1 * 1 + 3 * 9) / 4 = 7 in each entry, and B' A' is 36
    assert lora_residual(previous, updates, chosen) == pytest.approx(29 / 7)
    averaged = aggregation_config().of({"rule": "mean"}, "mine")
    assert identical(
        layerwise_mean(previous, updates, averaged), layerwise_mean(previous, updates, AggregationConfig())
    )


@pytest.fixture
def extended(install: Install, tiny: RunConfig) -> Any:
    """Return the configuration of a small experiment, in which the rule `largest` can be selected."""
    install(LARGEST, POINT)
    kind: Any = create_model("RunConfig", __base__=RunConfig, aggregation=(aggregation_config(), ...))
    return kind.of({**tiny.model_dump(mode="json")}, "mine")


def test_a_run_uses_the_rule_and_names_its_package(extended: Any) -> None:
    changed = extended.override({"aggregation.rule": "largest", "federation.rounds": 1}, "mine")
    assert changed.aggregation.weights == extended.aggregation.weights
    assert changed.plugin_versions()["odd-package"].startswith("0.1 (code ")
    assert extended.plugin_versions() == {}
    (_, mean), (_, largest) = (list(run(one)) for one in (extended.override({"federation.rounds": 1}, ""), changed))
    assert not identical(mean.state.adapter, largest.state.adapter)


def test_what_needs_the_mean_is_not_combined_with_another_rule(extended: Any) -> None:
    for changes, said in (
        ({"base_optimizer": "feddyn"}, "feddyn corrects the mean of the clients' models, but `aggregation.rule` larg"),
        ({"aggregation.lora": "product_svd"}, "averages the products B A and needs `aggregation.rule` mean, but it is"),
    ):
        with pytest.raises(UserError, match=said):
            extended.override({"aggregation.rule": "largest", **changes}, "mine")
    with pytest.raises(UserError, match="one of mean, largest, but it is `large`; did you mean `largest`"):
        extended.override({"aggregation.rule": "large"}, "mine")
