"""Sweeps that write their results to an object store, which is a server on this machine."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store, SweepStore
from fedsweep.tracking import Destination, deliver_all
from fedsweep.tracking.single_run import record_run
from tests.sweep.helpers import GRID, SMALL, histories, launch, newest, play_alone, start, table, write_space
from tests.sweep.objects import BUCKET, URI, machine, object_store, objects

pytestmark = pytest.mark.slow

client = pytest.fixture(object_store, scope="module")


def seen(folder: Path) -> SweepStore:
    """Return the sweep as a machine without a local copy reads it; `folder` is that machine's cache."""
    with pytest.MonkeyPatch.context() as patch:
        machine(folder, patch)
        return Store.at(URI).find("tiny")


def wait_for_an_outcome(client: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        if any(name.endswith("outcome.json") for name in objects(client)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no trial ended within 280 seconds")


def test_a_sweep_in_an_object_store_equals_one_in_a_folder_after_its_machine_is_lost(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_space(tmp_path, "tiny", GRID)
    play_alone(tmp_path, "tiny")
    machine(tmp_path / "lost", monkeypatch)
    process = start(tmp_path, "tune", "tiny", "--store", URI)
    wait_for_an_outcome(client, process)
    held = [name for name in objects(client) if name.endswith("/.lease")]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(held) == 1
    shutil.rmtree(tmp_path / "lost")
    assert [one for one in seen(tmp_path / "looker").trials() if one.outcome is None], "the sweep had ended"

    machine(tmp_path / "other", monkeypatch)
    with seen(tmp_path / "looker").remote.exclusively("the sweep"):  # a killed process of this machine is no obstacle
        refused = launch(tmp_path, "tune", "tiny", "--store", URI, "--resume", code=2)
    told = f"fedsweep: sweep {held[0].split('/')[2]} is being run by a process on {os.uname()[1]}; wait until that "
    assert refused.stderr.splitlines()[-1].startswith(told)
    done = launch(tmp_path, "tune", "tiny", "--store", URI, "--resume")
    assert f"fedsweep ui --store {URI}" in " ".join(done.stdout.split())

    there = seen(tmp_path / "looker")
    assert (there.folder / "report" / "table.csv").read_text() == table(tmp_path, "tiny")
    assert histories(there) == histories(newest(tmp_path, "tiny"))
    name = next(name for name in objects(client) if name.endswith("checkpoint.safetensors"))
    fetched = there.folder / Path(name).relative_to(f"sweeps/tiny/{there.folder.name}")
    assert 0 < fetched.stat().st_size < objects(client)[name] / 2, "a report must not download tensors"
    names = [Path(name) for name in objects(client)]
    assert not [one for one in names if any(part.startswith(".") for part in one.parts) or "ray" in one.parts]
    assert not [one for one in names if one.name == "mlflow.db"]
    assert not any(b"unguessable" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    machine(tmp_path / "reader", monkeypatch)
    store = Store.at(URI)
    own = Destination.of(store.root)
    assert list(deliver_all(store, own)) == [(f"tiny {there.folder.name}", {})]
    found = own.client().get_experiment_by_name("tiny")
    assert len(own.client().search_runs([found.experiment_id])) == 5, "MLflow must have a parent and four trials"


def test_a_run_is_sent_to_the_object_store_after_each_round(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "one", monkeypatch)
    changes = {**SMALL, "federation.rounds": 1}
    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "test").override(changes, "test")
    trial, _ = record_run("fedra_digits", config, Store.at(URI), "cpu", lambda _: None)
    assert not trial.remote.unsent
    machine(tmp_path / "two", monkeypatch)
    (run,) = Store.at(URI).runs()
    assert [one.round for one in run.read().history] == [0, 1]
    outcome = run.outcome()
    assert outcome is not None
    assert outcome.outcome == "finished"


def test_a_missing_bucket_is_one_error_message(client: Any, tmp_path: Path) -> None:
    done = launch(tmp_path, "tune", "ablations/lora_rank", "--store", "s3://nowhere/runs", code=2)
    said = "fedsweep: the store s3://nowhere/runs cannot be used: there is no bucket `nowhere`."
    assert done.stderr.splitlines()[-1] == said


def test_an_endpoint_in_the_uri_is_used_and_one_without_a_server_is_an_error(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    words = "scheme=http&region=us-east-1"
    assert Store.at(f"s3://{BUCKET}/my/runs?endpoint_override={endpoint}&{words}").uri
    with pytest.raises(UserError, match=r"^the store s3://.* cannot be reached: .*\.$"):
        Store.at(f"s3://{BUCKET}/my/runs?endpoint_override=127.0.0.1:9&{words}")
