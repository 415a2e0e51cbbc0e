"""Fixtures that run tests on every listed method, and on FedBRICK over each depth method."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from fedsweep.methods import ALL, FederatedMethod, MethodConfig

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


def label(method: dict[str, Any]) -> str:
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


def case(method: dict[str, Any]) -> Any:
    return pytest.param(method, id=label(method), marks=[pytest.mark.slow] if label(method) in SLOW else [])


@pytest.fixture(params=map(case, METHODS))
def chosen(request: pytest.FixtureRequest, random_clip: Path) -> dict[str, Any]:
    """Return the overrides that make an experiment use the method under test."""
    settings = request.param
    if "server" in settings:
        settings = {**settings, "clip": {"name": "clip", "model": str(random_clip)}}
    needs, changes = method_of(settings).needs, {"method": settings}
    if needs.proxy or needs.synthetic:
        changes["partition.proxy_share"] = 0.2
    if needs.synthetic:
        changes["synthetic"] = {"name": "surrogate", "share": 0.01}
    if needs.text:
        changes |= {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    if needs.validation:
        changes |= {"partition.validation_share": 0.02, "partition.test_share": 0.02}
    return changes


def method_of(settings: dict[str, Any]) -> FederatedMethod:
    method: FederatedMethod = TypeAdapter(MethodConfig).validate_python(settings)
    return method


@pytest.fixture
def name(chosen: dict[str, Any]) -> str:
    return label(chosen["method"])
