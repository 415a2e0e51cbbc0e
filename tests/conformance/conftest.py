"""Every method that is listed, one after the other; an enhancement over each method that it can enhance."""

from typing import Any

import pytest

METHODS: list[dict[str, Any]] = [
    {"name": "fedra"},
    {"name": "all_large"},
    {"name": "all_small"},
    {"name": "inclusivefl"},
    {"name": "depthfl"},
    *({"name": "fedbrick", "over": {"name": base}, "server_epochs": 1} for base in ("fedra", "inclusivefl", "depthfl")),
]


def label(method: dict[str, Any]) -> str:
    return " over ".join([method["name"], *([method["over"]["name"]] if "over" in method else [])])


@pytest.fixture(params=METHODS, ids=label)
def chosen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The method as the changes to an experiment that choose it."""
    proxy = {"partition.proxy_share": 0.2} if request.param["name"] == "fedbrick" else {}
    return {"method": request.param, **proxy}


@pytest.fixture
def name(chosen: dict[str, Any]) -> str:
    return label(chosen["method"])
