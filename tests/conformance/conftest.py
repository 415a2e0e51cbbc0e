"""Every method that is listed, one after the other; an enhancement over each method that it can enhance."""

from pathlib import Path
from typing import Any

import pytest

UPDATES = ("joint", "alternating")
SMALL_GATE = {"sal": {"queue": 1, "threshold": 1.0}, "gate": {"trunk": {"name": "digits_resnet"}}}
SMALL_SERVER = {"server": {"warmup_epochs": 1, "epochs": 1, "batch_size": 8}, "adapters": {"attention": 8}}
METHODS: list[dict[str, Any]] = [
    {"name": "fedra"},
    {"name": "all_large"},
    {"name": "all_small"},
    {"name": "inclusivefl"},
    {"name": "depthfl"},
    {"name": "ft"},
    {"name": "lfft"},
    {"name": "ft", "synthetic_epochs": 1},
    {"name": "promptfl", "context": 4},
    {"name": "fedclip"},
    {"name": "fedot"},
    {"name": "zero_shot"},
    *({"name": "fedag", **SMALL_SERVER, "server": SMALL_SERVER["server"] | {"update": how}} for how in UPDATES),
    *({"name": "fedms", "global_rounds": rounds, **SMALL_GATE} for rounds in (1, 0)),
    *({"name": "fedbrick", "over": {"name": base}, "server_epochs": 1} for base in ("fedra", "inclusivefl", "depthfl")),
]


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
"""Twins of one that the default tier has: they take as long as several other methods."""


def case(method: dict[str, Any]) -> Any:
    return pytest.param(method, id=label(method), marks=[pytest.mark.slow] if label(method) in SLOW else [])


@pytest.fixture(params=map(case, METHODS))
def chosen(request: pytest.FixtureRequest, random_clip: Path) -> dict[str, Any]:
    """The method as the changes to an experiment that choose it."""
    method = request.param
    needs: dict[str, Any] = {"partition.proxy_share": 0.2} if method["name"] in ("fedbrick", "fedag") else {}
    if method["name"] == "fedag" or "synthetic_epochs" in method:
        needs |= {"synthetic": {"name": "surrogate", "share": 0.01}, "partition.proxy_share": 0.2}
    if method["name"] == "fedag":
        method = {**method, "clip": {"name": "clip", "model": str(random_clip)}}
    if method["name"] in ("fedms", "promptfl", "fedclip", "zero_shot"):
        needs |= {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    if method["name"] == "fedms":
        needs |= {"partition.validation_share": 0.02, "partition.test_share": 0.02}
    return {"method": method, **needs}


@pytest.fixture
def name(chosen: dict[str, Any]) -> str:
    return label(chosen["method"])
