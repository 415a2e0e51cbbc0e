"""Fixtures with a data folder and a tree of images for each test."""

from pathlib import Path

import pytest

from tests.preparation.helpers import write_tree


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder as the data folder, and return it."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write a tree of 2 domains x 3 classes x 10 images of 20 x 16 pixels, and return its root."""
    return write_tree(tmp_path / "tree")
