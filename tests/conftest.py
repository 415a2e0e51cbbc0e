"""Hooks and fixtures of every test process; the fixtures that need torch are in `tests/fixtures.py`."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fedsweep", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fedsweep")

OUTSIDE = ("FEDSWEEP_", "MLFLOW_", "OPTUNA_", "RAY_", "TUNE_", "WANDB_")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
"""Ray reads this variable on import. Otherwise, `uv run` would make workers start in a copy of the repository."""
ROOT = Path(__file__).parents[1]
QUICK = (
    "fedsweep/common",
    "fedsweep/results",
    "tests/common/test_randomness.py",
    "tests/common/test_yaml_values.py",
    "tests/preparation/layouts",
    "tests/preparation/test_plan.py",
    "tests/preparation/test_split.py",
    "tests/preparation/test_tables.py",
    "tests/report",
    "tests/results/test_arms.py",
    "tests/results/test_history.py",
    "tests/results/test_lease.py",
    "tests/results/test_pareto.py",
    "tests/sweep/cluster/test_image.py",
    "tests/sweep/cluster/test_recipes.py",
    "tests/sweep/pruning/test_arm_rules.py",
    "tests/sweep/pruning/test_arm_state.py",
    "tests/sweep/pruning/test_single_trials.py",
    "tests/sweep/space/test_axes.py",
    "tests/sweep/space/test_conditions.py",
    "tests/test_layers.py",
    "tests/test_prose.py",
    "tests/test_repository.py",
    "tests/tracking/test_sweep_description.py",
)
"""Folders and modules whose tests need no torch: `pytest -m quick`."""
NOT_QUICK = tuple(
    f"tests/report/test_{name}.py" for name in ("formats", "panels", "held_out", "importance", "page_svg", "provenance")
)


def only_quick(config: pytest.Config) -> bool:
    """Return whether this run selects only the quick tests, which do not import torch."""
    return bool(config.option.markexpr == "quick")


def is_quick(path: Path) -> bool:
    """Return whether the tests of a module are in the quick tier."""
    name = path.relative_to(ROOT).as_posix()
    return name not in NOT_QUICK and any(name == one or name.startswith(f"{one}/") for one in QUICK)


class QuickCollection:
    """A plugin that collects only quick test modules, also in `fedsweep/`, because other modules import torch."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore test modules outside the quick tier, but keep the folders that contain them."""
        name = f"{collection_path.relative_to(ROOT).as_posix()}/" if collection_path != ROOT else ""
        return None if is_quick(collection_path) or any(one.startswith(name) for one in QUICK) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests."""
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("slow", "gpu", "pretrained"))
        if not marked and is_quick(item.path):
            item.add_marker("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures that need torch, except in a process that only distributes tests to other processes."""
    alone = config.option.showfixtures or not config.getoption("numprocesses", None)
    if only_quick(config):
        config.pluginmanager.register(QuickCollection())
    elif alone or hasattr(config, "workerinput"):
        fixtures = importlib.import_module("fedsweep.testing.fixtures")
        if not config.pluginmanager.is_registered(fixtures):
            config.pluginmanager.register(fixtures)
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    """Exclude the millions of imported objects from garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Include imported objects in garbage collection again, because C++ libraries would report leaks otherwise."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def clean_process(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Remove environment variables of fedsweep and its libraries; check that the quick tier has not imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(OUTSIDE)]:
            patch.delenv(name)
        # By default, Ray gives its workers a low priority, so that they wait for all tests that run at the same time.
        patch.setenv("RAY_worker_niceness", "0")
        # Ray reads the mode once in a process. If a later test changed it, a start of Ray would wait for two minutes.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("FEDSWEEP_CACHE", str(tmp_path_factory.mktemp("activations")))
        yield
    assert not only_quick(pytestconfig) or "torch" not in sys.modules, "a test of the quick tier imported torch"


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write PNG files with a sixteenth of the pixels, because their compression takes most of a figure's time."""
    from fedsweep.report.figures import canvas

    monkeypatch.setattr(canvas, "DPI", canvas.DPI // 4)
