"""Model versions in MLflow's registry, in a local database and on a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.tracking import Destination, Recorder, Registration
from tests.tracking.helpers import MANIFEST, PLAN, finished, sweep_folder
from tests.tracking.servers import mlflow_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["database", "server"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Destination]]:
    """Yield a results folder, which contains a single run and one trial in two sweeps, and its MLflow destination."""
    store = Store(tmp_path_factory.mktemp("store"))
    if request.param == "database":
        yield record(store, Destination.of(store.root))
        return
    with mlflow_server(tmp_path_factory.mktemp("server")) as server:
        yield record(store, Destination.of(store.root, server.url))


def record(store: Store, destination: Destination) -> tuple[Store, Destination]:
    for sweep in ("s1", "s2"):
        with Recorder(store, "tiny", destination) as recorder:
            recorder.open_sweep(MANIFEST.model_copy(update={"id": sweep}), sweep_folder(store.root / sweep))
            recorder.sync(finished(3))
    with Recorder(store, "alone", destination) as recorder:
        recorder.sync(finished(2, PLAN.model_copy(update={"key": "r1"})))
    return store, destination


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "backbone").mkdir(parents=True)
    (tmp_path / "out" / "export.json").write_text("{}")
    (tmp_path / "out" / "backbone" / "model.safetensors").write_bytes(b"tensors")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("experiment", "key", "sweep"), [("tiny", "k1", "s1"), ("tiny", "k1", "s2"), ("alone", "r1", None)]
)
def test_a_folder_is_registered_as_a_model_version_of_its_trials_run(place, folder, tmp_path, experiment, key, sweep):
    _, destination = place
    name = f"digits of {sweep}"
    registration = Registration(destination, name, experiment, key, sweep)
    assert registration.add(folder, "export-3", {"fedsweep.round": "3"}) == "1"
    assert registration.add(folder, "export-3", {}) == "2"
    client = destination.client()
    version = client.get_model_version(name, "1")
    assert version.tags == {"fedsweep.round": "3"}
    run = client.get_run(version.run_id)
    assert run.data.tags["fedsweep.key"] == key
    if sweep is not None:
        assert client.get_run(run.data.tags["mlflow.parentRunId"]).data.tags["fedsweep.sweep"] == sweep
    assert version.source == f"runs:/{run.info.run_id}/export-3"
    back = Path(client.download_artifacts(run.info.run_id, "export-3", str(tmp_path)))
    assert (back / "backbone" / "model.safetensors").read_bytes() == b"tensors"


@pytest.mark.parametrize(
    ("experiment", "key", "sweep"), [("tiny", "k2", "s1"), ("tiny", "k1", "s3"), ("other", "k1", None)]
)
def test_a_trial_without_a_run_is_an_error_before_anything_is_written(place, experiment, key, sweep):
    with pytest.raises(UserError) as refusal:
        Registration(place[1], "digits", experiment, key, sweep)
    assert str(refusal.value) == f"MLflow has no run of trial {key}; `fedsweep ui --deliver` creates it."


def test_a_failed_registration_keeps_the_folder(place, folder):
    registration = Registration(place[1], "digits", "tiny", "k1", "s1")
    registration.run_id = "0" * 32
    with pytest.raises(UserError, match=r"was exported to .*, but MLflow did not register it: "):
        registration.add(folder, "export-3", {})
    assert (folder / "export.json").exists()
