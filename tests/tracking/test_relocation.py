"""A copied or moved results folder, whose artifacts MLflow shows instead of those of the original."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Destination, Recorder, relocation
from tests.fixtures import NewStore
from tests.tracking.helpers import MANIFEST, sweep_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, new_store: NewStore) -> Store:
    store = new_store(tmp_path_factory.mktemp("the original é"))
    recorder = Recorder(store, "group/tiny")
    recorder.open_sweep(MANIFEST, sweep_folder(tmp_path_factory.mktemp("sweep")))
    assert recorder.deliver()
    return store


def addresses(root: Path) -> list[str]:
    client = Destination.of(root).client()
    experiment = client.get_experiment_by_name("group/tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return [experiment.artifact_location, run.info.artifact_uri]


def test_a_copy_has_the_addresses_of_its_own_artifacts(original: Store, tmp_path: Path) -> None:
    before, copy = addresses(original.root), tmp_path / "a copy"
    shutil.copytree(original.root, copy)
    assert all(one.startswith(f"{(copy / 'artifacts').as_uri()}/group/tiny") for one in addresses(copy))
    assert addresses(original.root) == before
    assert all(one.startswith(f"{(original.root / 'artifacts').as_uri()}/group/tiny") for one in before)


def test_a_link_to_a_results_folder_is_not_a_copy(original: Store, tmp_path: Path) -> None:
    before = addresses(original.root)
    (tmp_path / "link").symlink_to(original.root)
    assert addresses(tmp_path / "link") == before


def test_a_copy_that_cannot_be_corrected_is_an_error(
    original: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(original.root, tmp_path / "copy")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(f"file:{path}?mode=ro", timeout, uri=True))
    with pytest.raises(UserError) as refused:
        relocation.relocate(tmp_path / "copy")
    assert str(refused.value) == (
        f"the results folder {tmp_path / 'copy'} is a copy, and MLflow's addresses of its artifacts must be corrected, "
        "but mlflow.db cannot be written: attempt to write a readonly database."
    )
