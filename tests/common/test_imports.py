"""Imports without the garbage collector."""

import gc
import subprocess
import sys

import pytest

from fedsweep.common.imports import without_collections


def test_the_collector_is_off_within_the_block_and_ignores_its_objects_afterwards():
    try:
        with without_collections():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()


def test_the_collector_is_on_again_after_a_failed_import():
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    gc.unfreeze()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_at_the_end_of_a_process_the_collector_frees_all_objects():
    """Otherwise, some extension modules print that their objects are never freed."""
    body = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from fedsweep.common.imports import without_collections\n"
        "with without_collections(): import json\n"
        "assert gc.get_freeze_count()"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
