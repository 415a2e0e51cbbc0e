"""Stores whose MLflow database is there already: to create one takes more than a second."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.results import Store
from fedsweep.tracking import Destination

NewStore = Callable[[Path], Store]


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> NewStore:
    """Return a function that makes a store with an empty database in a folder."""
    root = tmp_path_factory.mktemp("empty")
    Destination.of(root).client().search_experiments()

    def make(folder: Path) -> Store:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "mlflow.db", folder)
        return Store(folder)

    return make
