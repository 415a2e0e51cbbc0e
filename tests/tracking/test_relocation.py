"""A copied or moved results folder, whose artifacts MLflow shows instead of those of the original."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked
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


def test_a_read_only_copy_is_opened_with_a_warning(
    original: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, copy = addresses(original.root), tmp_path / "copy"
    shutil.copytree(original.root, copy)
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda path, timeout: connect(f"file:{path}?mode=ro", timeout, uri=True))
        relocation.relocate(copy)
        relocation.relocate(copy)
    assert capsys.readouterr().err == (
        f"fedsweep: warning: the results folder {copy} was copied or moved and is read-only, so MLflow shows its "
        "metrics, but may not find its artifacts.\n"
    )
    with contextlib.closing(connect(copy / "mlflow.db")) as connection:
        assert before[0] in {one for (one,) in connection.execute("SELECT artifact_location FROM experiments")}


def test_addresses_are_not_replaced_while_a_sweep_is_running(
    original: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep may use the same folder under another path, such as a path in a container."""
    before, copy = addresses(original.root), tmp_path / "copy"
    shutil.copytree(original.root, copy)
    sweep = copy / "sweeps" / "group" / "tiny" / "s1"
    sweep.mkdir(parents=True)
    with locked(sweep / ".lock", "taken"):
        assert addresses(copy) == before
        assert capsys.readouterr().err == (
            f"fedsweep: warning: the results folder {copy} was copied, moved or mounted at another path, and MLflow "
            "may not find its artifacts until sweep s1, which is running in it, has ended.\n"
        )
    assert addresses(copy) != before
    assert capsys.readouterr().err == ""


def test_a_damaged_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    with pytest.raises(UserError) as caught:
        relocation.relocate(tmp_path)
    assert str(caught.value) == (f"MLflow's database {tmp_path / 'mlflow.db'} cannot be used: file is not a database.")
