"""What every process of the tests needs; the fixtures stand in `tests/fixtures.py`."""

import gc

import pytest
from hypothesis import settings

settings.register_profile("fedsweep", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fedsweep")


def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands tests out needs no fixtures, nor the seconds in which their libraries load."""
    alone = config.option.showfixtures or not config.getoption("numprocesses", None)
    if alone or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later garbage collection: millions of objects that live to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let them go again, or libraries in C++ report leaks at the end."""
    gc.unfreeze()
