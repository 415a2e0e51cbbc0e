"""The cases on which the conformance tests run: methods with small hyperparameters, data sources, metrics and rules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from fedsweep.common.plugins import name_of
from fedsweep.common.yaml_values import Json, parse_overrides
from fedsweep.data.data_config import data_sources
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.methods import ALL, FederatedMethod, MethodConfig
from fedsweep.methods.capabilities import PersonalModels, UnequalRanks
from fedsweep.training.aggregation_rules import aggregation_rules
from fedsweep.training.round_metrics import BUILT_IN, round_metrics

UPDATES = ("joint", "alternating")
SMALL_GATE = {"sal": {"queue": 1, "threshold": 1.0}, "gate": {"trunk": {"name": "digits_resnet"}}}
SMALL_SERVER = {"server": {"warmup_epochs": 1, "epochs": 1, "batch_size": 8}, "adapters": {"attention": 8}}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ft": [{}, {"synthetic_epochs": 1}],
    "promptfl": [{"context": 4}],
    "fedag": [{**SMALL_SERVER, "server": SMALL_SERVER["server"] | {"update": how}} for how in UPDATES],
    "fedms": [{"global_rounds": rounds, **SMALL_GATE} for rounds in (1, 0)],
    "fedbrick": [{"over": {"name": base}, "server_epochs": 1} for base in ("fedra", "inclusivefl", "depthfl")],
}
"""For each method, the hyperparameters of its test cases; a method that is not listed runs with its defaults."""
NAMES = [method.model_fields["name"].default for method in ALL]
METHODS = [{"name": name, **settings} for name in NAMES for settings in SETTINGS.get(name, [{}])]


def label(method: Mapping[str, Any]) -> str:
    """Return a short name of a test case: the method, and the hyperparameters in which its cases differ."""
    stages = f" after {method['global_rounds']} rounds" if "global_rounds" in method else ""
    tuned = " and the server" if "synthetic_epochs" in method else ""
    update = f" by {method['server']['update']} updates" if "server" in method else ""
    return (
        " over ".join([method["name"], *([method["over"]["name"]] if "over" in method else [])])
        + stages
        + tuned
        + update
    )


SLOW = ("fedms after 1 rounds", "fedbrick over fedra", "fedbrick over inclusivefl", "fedag by alternating updates")
"""Cases that resemble a faster case of the default tier. Each takes as long as several other methods."""


def method_of(settings: Mapping[str, Any]) -> FederatedMethod:
    """Return the method with these hyperparameters and this `name`."""
    method: FederatedMethod = TypeAdapter(MethodConfig).validate_python(dict(settings))
    return method


def changes_for(settings: Mapping[str, Any], clip: Path) -> dict[str, Json]:
    """Return the changes that make an experiment use a method, with all that the method needs.

    Args:
        settings: The name and the hyperparameters of the method.
        clip: The folder of a small CLIP checkpoint, for methods that need a text encoder.
    """
    if "server" in settings:
        settings = {**settings, "clip": {"name": "clip", "model": str(clip)}}
    method, changes = method_of(settings), dict[str, Json]({"method": dict(settings)})
    needs = method.needs
    if needs.proxy or needs.synthetic:
        changes["partition.proxy_share"] = 0.2
    if needs.synthetic:
        changes["synthetic"] = {"name": "surrogate", "share": 0.01}
    if needs.text:
        changes |= {"backbone": {"name": "clip", "model": str(clip)}, "lora.position": "mlp"}
    if needs.validation:
        changes["partition.validation_share"] = 0.02
    if isinstance(method, PersonalModels):
        changes |= {"partition.test_share": 0.02, "partition.tuning_share": 0.02}
    return changes


def asked(config: pytest.Config, option: str) -> list[str]:
    """Return the names that a command-line option gives, or an empty list without the option."""
    return list(config.getoption(option, None) or [])


def method_cases(config: pytest.Config, ranked: bool = False) -> list[Any]:
    """Return the test cases of the methods that `--method` names, or of all methods.

    If `ranked` is true, return only the cases of methods whose clients can have unequal ranks.
    """
    wanted = asked(config, "method")
    settings = [{"name": name, **one} for name in wanted or NAMES for one in SETTINGS.get(name, [{}])]
    if ranked:
        settings = [one for one in settings if isinstance(method_of(one), UnequalRanks)]
    return [
        pytest.param(one, id=label(one), marks=[pytest.mark.slow] if label(one) in SLOW and not wanted else [])
        for one in settings
    ]


EXCLUDED = {("data", name_of(PreparedData)): "it reads images from files that the tests do not have"}
"""The reasons for which classes cannot be tested, by kind and name."""


def known_names(kind: str) -> list[str]:
    """Return the names of all classes that can be tested with the option `--KIND`."""
    classes: dict[str, list[str]] = {
        "method": NAMES,
        "data": [name_of(one) for one in data_sources() if one is not PreparedData],
        "aggregation": [name_of(one) for one in aggregation_rules()],
        "metric": [*BUILT_IN, *round_metrics()],
    }
    return classes[kind]


def own_changes(config: pytest.Config, of_method: bool = True) -> dict[str, Json]:
    """Return the changes of the experiment that the options `--set NAME=VALUE` give, keyed by dotted name.

    `of_method` is false for tests that always run FedRA, which ignore changes of the method.
    """
    given = parse_overrides(asked(config, "set"))
    return {name: value for name, value in given.items() if of_method or not name.startswith("method.")}
