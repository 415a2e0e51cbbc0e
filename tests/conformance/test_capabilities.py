"""Every capability is used, and no method overrides a function of a capability that it does not inherit."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import fedsweep
from fedsweep.methods import ALL, FederatedMethod
from fedsweep.methods.capabilities import Capability, LoraRule, UnequalRanks
from fedsweep.methods.fedbrick.method import DepthMethod, FedBRICK

PACKAGE = Path(fedsweep.__file__).parent
MARKERS = (LoraRule, UnequalRanks)
"""Capabilities that declare properties of a method, and have no functions to override."""
CAPABILITIES = [
    one
    for one in vars(inspect.getmodule(Capability)).values()
    if inspect.isclass(one) and issubclass(one, Capability) and one not in (Capability, *MARKERS)
    if not issubclass(one, FederatedMethod)  # without base classes of methods
]


def verbs(capability: type[Capability]) -> set[str]:
    return {name for name in vars(capability) if not name.startswith("_")}


def test_all_capabilities_are_found():
    assert len(CAPABILITIES) == 11
    for marker in MARKERS:
        assert any(issubclass(method, marker) for method in ALL)
        assert not any(callable(value) for name, value in vars(marker).items() if not name.startswith("_"))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: one.__name__)
def test_a_capability_is_used_by_a_method_and_by_the_caller(capability):
    assert verbs(capability)
    owners = [method for method in ALL if issubclass(method, capability)]
    assert owners
    overridden = {
        verb for owner in owners for verb in verbs(capability) if getattr(owner, verb) is not getattr(capability, verb)
    }
    assert overridden == verbs(capability)
    engine = [path for path in PACKAGE.rglob("*.py") if path.parts[len(PACKAGE.parts)] != "methods"]
    text = "".join(path.read_text() for path in [*engine, PACKAGE / "methods" / "capabilities.py"])
    assert f"{capability.__name__}.of_method(" in text


@pytest.mark.parametrize("marker", MARKERS, ids=lambda one: one.__name__)
def test_a_marker_is_used_by_a_method_and_by_the_engine(marker):
    assert not any(callable(getattr(marker, verb)) for verb in verbs(marker))
    assert any(issubclass(method, marker) for method in ALL)
    engine = [path for path in PACKAGE.rglob("*.py") if path.parts[len(PACKAGE.parts)] != "methods"]
    assert any(re.search(rf"isinstance\([^()]*, {marker.__name__}\)", path.read_text()) for path in engine)


@pytest.mark.parametrize("method", ALL, ids=lambda one: one.__name__)
def test_a_method_has_a_capability_if_and_only_if_it_overrides_one_of_its_functions(method):
    for capability in CAPABILITIES:
        inherited = [one for one in method.__mro__ if issubclass(one, FederatedMethod)]
        own = {verb for verb in verbs(capability) if any(verb in vars(one) for one in inherited)}
        assert bool(own) == issubclass(method, capability), capability.__name__


@pytest.mark.parametrize(
    ("changes", "stand_ins"),
    [({"method": "fedra"}, False), ({"method": "fedbrick", "partition.proxy_share": 0.1}, True)],
)
def test_only_a_method_with_stand_ins_promises_their_metrics(experiment, changes, stand_ins):
    config = experiment.override({**changes, "evaluation.metrics": ["structural_bias"]}, "test")
    found = {name.removeprefix("structural_bias/") for name in config.metrics() if name.startswith("structural_bias/")}
    assert found >= {"gradient", "jacobian/identity"}
    assert {name for name in found if "brick" in name} == ({"jacobian/brick", "brick_error"} if stand_ins else set())


def test_fedbrick_passes_on_every_capability_of_a_depth_method():
    depth_methods = get_args(get_args(DepthMethod)[0])
    assert len(depth_methods) == 3
    for method in depth_methods:
        for capability in CAPABILITIES:
            assert not issubclass(method, capability) or issubclass(FedBRICK, capability)
