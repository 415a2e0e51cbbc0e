"""Runs on real MLflow servers, with lost responses, outages, artifacts over HTTP, and PostgreSQL as the database."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store, SweepStore
from fedsweep.tracking import Destination, Recorder, check_server, deliver_all, recorder
from fedsweep.tracking.ui import page_links
from tests.tracking.helpers import MANIFEST, PLAN, finished, trial
from tests.tracking.servers import POSTGRES, Proxy, Server, mlflow_server, postgres

pytestmark = pytest.mark.slow
WRITES = {"runs/create", "runs/log-batch", "runs/log-inputs", "runs/update"}
PLANS = [PLAN.model_copy(update={"key": f"k{number}", "number": number}) for number in range(4)]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(recorder, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(recorder, "PATIENCE", 60)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        with mlflow_server(folder) as started:
            yield started
        return
    if POSTGRES is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres() as database, mlflow_server(folder, database) as started:
        yield started


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Store, SweepStore]:
    store = Store(tmp_path / "mlruns")
    made = store.sweep(MANIFEST.name, MANIFEST.id)
    made.create(MANIFEST, {"search_space.yaml": "seed: 0\n", "experiment.yaml": "seed: 0\n"})
    return store, made


def assert_whole(made: Recorder, rounds: int = 3) -> None:
    """Check that MLflow has one parent, one ended run per trial, and each of `rounds` rounds once."""
    runs = made.runs
    found = runs.client.search_runs([runs.experiment.id])
    parents = [run for run in found if run.data.tags["fedsweep.kind"] == "sweep"]
    children = [run for run in found if run.data.tags["fedsweep.kind"] == "trial"]
    assert len(parents) == 1
    assert sorted(run.data.tags["fedsweep.key"] for run in children) == [plan.key for plan in PLANS]
    for run in children:
        assert (run.info.status, run.data.tags["fedsweep.outcome"]) == ("FINISHED", "finished")
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.params["lora.rank"] == "4"
        assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["digits", "digits/feature_skew"]
        for metric in ("accuracy/mean", "seconds/round", "bytes/up"):
            written = sorted(one.step for one in runs.client.get_metric_history(run.info.run_id, metric))
            assert written == list(range(rounds + 1)), metric
        for metric in ("megabytes/sent", "accuracy/mean_of_last_4"):
            assert len(runs.client.get_metric_history(run.info.run_id, metric)) == 1


def play(made: Recorder, folder: Path, pause: float = 0.0) -> None:
    made.open_sweep(MANIFEST, folder)
    for rounds in range(5):
        for plan in PLANS:
            made.sync(trial(rounds, plan=plan))
        threading.Event().wait(pause)
    for plan in PLANS:
        made.sync(finished(3, plan))


def test_lost_responses_duplicate_nothing(
    server: Server, sweep: tuple[Store, SweepStore], request: pytest.FixtureRequest
) -> None:
    """The server writes, but the first response to each type of write and a quarter of all responses are lost."""
    asked: Counter[str] = Counter()
    chance = random.Random(0)

    def lose(path: str) -> bool:
        asked[path] += 1
        return (asked[path] == 1 and path in WRITES) or chance.random() < 0.25

    store, stored = sweep
    with Proxy(server.url, lose) as proxy:
        made = Recorder(store, f"{request.node.name}", Destination.of(store.root, proxy.url))
        play(made, stored.folder, pause=0.2)
        made.close_sweep("FINISHED", {"trials/finished": 4.0})
        while not made.deliver():
            pass
    assert set(proxy.lost) >= WRITES
    made = Recorder(store, made.runs.experiment.name, Destination.of(store.root, server.url))
    assert_whole(made)


def test_artifacts_are_sent_through_the_server(
    server: Server, sweep: tuple[Store, SweepStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store, stored = sweep
    destination = Destination.of(store.root, server.url)
    check_server(destination, request.node.name)
    made = Recorder(store, request.node.name, destination)
    play(made, stored.folder)
    report = tmp_path / "report"
    report.mkdir()
    (report / "table.md").write_text("| arm |")
    made.close_sweep("FINISHED", {}, report)
    assert made.unsynced == {}
    assert_whole(made)
    client, parent = made.runs.client, made.runs.parent
    assert parent is not None
    assert {one.path for one in client.list_artifacts(parent)} == {
        "environment.json", "experiment.yaml", "report", "search_space.yaml", "sweep.json",
    }  # fmt: skip
    assert client.get_run(parent).info.artifact_uri.startswith("mlflow-artifacts:")
    assert Path(client.download_artifacts(parent, "report/table.md")).read_text() == "| arm |"
    assert list((server.folder / "artifacts").rglob("table.md"))
    assert not (store.root / "artifacts").exists()
    links = page_links(store, server.url, destination)
    assert links == {} or all(link.startswith(f"{server.url}/#/") for link in links.values())


def test_a_server_misses_nothing_after_an_outage(
    server: Server, sweep: tuple[Store, SweepStore], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stored = sweep
    made = Recorder(store, request.node.name, Destination.of(store.root, server.url))
    made.open_sweep(MANIFEST, stored.folder)
    made.sync(trial(1, plan=PLANS[0]))
    made.sync(trial(2, plan=PLANS[1]))
    threading.Event().wait(0.05)  # the thread is probably writing at this moment
    server.stop()
    play(made, stored.folder)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "PATIENCE", 0.5)
        assert not made.deliver()
    assert made.outage == f"the MLflow server {server.url} cannot be used: Connection refused."
    server.start()
    assert made.deliver()
    assert_whole(made)


def test_a_results_folder_is_delivered_to_another_server(server: Server, sweep: tuple[Store, SweepStore]) -> None:
    store, stored = sweep
    for plan in PLANS:
        kept = stored.trial(plan.key)
        kept.plan(plan)
    destination = Destination.of(store.root, server.url)
    for _ in range(2):
        assert list(deliver_all(store, destination)) == [("tiny s1", {})]
    made = Recorder(store, MANIFEST.name, destination)
    found = made.runs.client.search_runs([made.runs.experiment.id], "tags.`fedsweep.kind` = 'trial'")
    assert sorted(run.data.tags["fedsweep.key"] for run in found) == [plan.key for plan in PLANS]
    assert {run.data.tags["fedsweep.outcome"] for run in found} == {"interrupted"}


def test_a_server_with_artifacts_on_its_own_disk_is_rejected(tmp_path: Path) -> None:
    own_disk = mlflow_server(tmp_path, None, "--default-artifact-root", str(tmp_path / "there"))
    reason = r"stores the artifacts of `x` in .*there/1, a folder on the server's machine"
    with own_disk as started, pytest.raises(UserError, match=reason):
        check_server(Destination.of(tmp_path, started.url), "x")
