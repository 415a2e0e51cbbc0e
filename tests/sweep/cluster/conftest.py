"""Fixtures for tests of clusters."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove Ray's environment variables, and return an empty home folder; the environment is restored at the end."""
    for name in [name for name in os.environ if name.startswith(("RAY_", "TUNE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"HOME": str(tmp_path)})
    return tmp_path
