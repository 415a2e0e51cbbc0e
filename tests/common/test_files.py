"""Atomic file writes that are interrupted."""

import os
from pathlib import Path

import pytest

from fedsweep.common.files import write_atomically


@pytest.mark.parametrize("late", [False, True], ids=["before the replacement", "after the replacement"])
def test_an_interrupted_write_leaves_one_whole_file_and_is_raised(tmp_path, monkeypatch, late):
    path, replace = tmp_path / "result", os.replace
    path.write_bytes(b"old")

    def interrupted(source: str, target: Path) -> None:
        if late:
            replace(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"result": b"new" if late else b"old"}
