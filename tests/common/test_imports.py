"""Imports without the garbage collector."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from fedsweep.common.imports import without_collections


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    """Let the collector be on before and after each test, and ignore the objects that exist."""
    assert gc.isenabled()
    yield
    gc.enable()
    gc.freeze()


class Cycle:
    """An object that refers to itself, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_off_within_the_block_and_ignores_its_objects_afterwards(monkeypatch):
    before = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "imported_now", ModuleType("imported_now"))
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_without_a_new_import_the_collector_still_frees_all_garbage():
    """A program may call `tune` several times, and its own objects must not stay in memory."""
    cycle = Cycle()
    left = weakref.ref(cycle)
    with without_collections():
        import json  # noqa: F401
    del cycle
    gc.collect()
    assert left() is None


def test_the_collector_is_on_again_after_a_failed_import():
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


def test_at_the_end_of_a_process_the_collector_frees_all_objects():
    """Otherwise, some extension modules print that their objects are never freed."""
    body = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from fedsweep.common.imports import without_collections\n"
        "with without_collections(): import decimal\n"
        "assert gc.get_freeze_count()"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
