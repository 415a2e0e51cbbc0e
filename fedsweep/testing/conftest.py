"""Hooks and fixtures that run each conformance test on the chosen methods, data sources, rules and metrics.

This module imports torch only inside functions, because pytest also loads it for tests that need no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fedsweep.common.yaml_values import Json


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, which need torch, except in a process that only distributes tests to other processes."""
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if distributes or config.option.showfixtures or config.option.markexpr == "quick":
        return
    fixtures = importlib.import_module("fedsweep.testing.fixtures")
    if not config.pluginmanager.is_registered(fixtures):
        config.pluginmanager.register(fixtures)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each class that an option such as `--method` names, or on all classes of this kind."""
    from fedsweep.testing.cases import asked, known_names, method_cases

    config, names = metafunc.config, metafunc.fixturenames
    if "chosen" in names:
        metafunc.parametrize("chosen", method_cases(config, ranked="ranked" in names), indirect=True)
    for kind in ("data", "aggregation", "metric"):
        if (fixture := f"{kind}_name") in names:
            metafunc.parametrize(fixture, asked(config, kind) or known_names(kind))


@pytest.fixture
def chosen(request: pytest.FixtureRequest, random_clip: Path) -> dict[str, Json]:
    """Return the changes that make an experiment use the method under test."""
    from fedsweep.testing.cases import changes_for, own_changes

    return {**changes_for(request.param, random_clip), **own_changes(request.config)}


@pytest.fixture
def name(chosen: dict[str, Any]) -> str:
    """Return the name of the test case."""
    from fedsweep.testing.cases import label

    return label(chosen["method"])


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty activation cache, so that the tests neither read nor fill the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSWEEP_CACHE", str(tmp_path_factory.mktemp("activations")))
        yield
