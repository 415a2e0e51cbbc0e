"""The runs in MLflow, which are a copy of the results folder and can be rebuilt."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from fedsweep.results import Outcome, Store, SweepManifest
from fedsweep.results.arms import Arm, Reference, ReferenceArm
from fedsweep.results.records import NOT_NEEDED
from fedsweep.tracking import Destination, experiment
from fedsweep.tracking.destination import tracking_uri
from fedsweep.tracking.experiment import PARENT
from fedsweep.tracking.parent_and_child_runs import METRICS, Runs
from fedsweep.tracking.sweep_description import git_commit
from fedsweep.tracking.trial_description import run_name
from fedsweep.tracking.ui import server_command
from tests.fixtures import NewStore
from tests.tracking.helpers import MANIFEST, PLAN, sweep_folder, trial


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, new_store: NewStore) -> Store:
    return new_store(tmp_path_factory.mktemp("store"))


def opened(store: Store, experiment: str, folder: Path, manifest: SweepManifest = MANIFEST) -> Runs:
    """Return the runs of an MLflow experiment in which the sweep with this manifest is open."""
    runs = Runs(Destination.of(store.root), experiment)
    runs.open_sweep(manifest, folder)
    return runs


@pytest.fixture
def runs(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    """Return the runs of an MLflow experiment that only this test uses; all tests share one database."""
    return opened(store, request.node.name, sweep_folder(tmp_path))


def child(runs: Runs) -> Any:
    (run,) = runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.kind` = 'trial'")
    return run


def steps(runs: Runs, metric: str = "accuracy/mean") -> Sequence[tuple[int, float]]:
    return [(one.step, one.value) for one in runs.client.get_metric_history(child(runs).info.run_id, metric)]


def test_each_round_is_written_once_however_often_it_is_synced(runs: Runs) -> None:
    for rounds in (1, 1, 2, 4, 4):
        runs.sync(trial(rounds))
    assert steps(runs) == [(i, i / 7) for i in range(4)]
    assert steps(runs, "seconds/round") == [(i, 0.5) for i in range(4)]


def test_a_new_process_continues_the_same_run(runs: Runs, store: Store, tmp_path: Path) -> None:
    runs.sync(trial(2))
    again = opened(store, runs.experiment.name, tmp_path)
    assert again.parent == runs.parent
    again.sync(trial(4, Outcome(outcome="finished", round=3)))
    assert steps(runs) == [(i, i / 7) for i in range(4)]
    assert child(runs).info.status == "FINISHED"


def test_all_resolved_values_are_parameters_under_their_dotted_names(runs: Runs) -> None:
    runs.sync(trial(1))
    expected = {
        "seed": "2",
        "lora.rank": "4",
        "lora.alpha": "null",
        "data.name": "digits",
        "data.domains": '["plain"]',
        "partition.name": "feature_skew",
        "method.name": "fedra",
    }
    assert child(runs).data.params == expected


@pytest.mark.parametrize(("outcome", "status"), [("finished", "FINISHED"), ("pruned", "KILLED"), ("failed", "FAILED")])
def test_outcomes_are_recorded_as_status_and_tags(runs: Runs, outcome: Any, status: str) -> None:
    error = "Traceback\nValueError: no" if outcome == "failed" else None
    runs.sync(trial(3, Outcome(outcome=outcome, round=2, error=error)))
    run = child(runs)
    assert run.info.status == status
    assert (run.data.tags["fedsweep.outcome"], run.data.tags["fedsweep.round"]) == (outcome, "2")
    assert run.data.tags.get("fedsweep.error") == ("ValueError: no" if error else None)
    assert run.data.metrics["megabytes/sent"] == pytest.approx(3 * 30 / 1e6)
    assert run.data.metrics["accuracy/mean_of_last_4"] == pytest.approx((1 + 2) / 7 / 2)


@pytest.mark.parametrize("kind", ["finished", "pruned"])
def test_a_trial_that_does_not_count_leaves_the_group_of_its_arm(runs: Runs, kind: Any) -> None:
    ended = trial(3, Outcome(outcome="finished", round=2) if kind == "finished" else None)
    runs.sync(ended)
    arm = child(runs).data.tags["arm"]
    assert arm.startswith("rank 4 ")
    condition = "tags.`fedsweep.kind` = 'trial' AND tags.`arm` != 'not counted'"
    assert len(runs.client.search_runs([runs.experiment.id], condition)) == 1
    runs.sync(replace(ended, outcome=Outcome(outcome=kind, round=2, reason=NOT_NEEDED)))
    assert child(runs).data.tags["arm"] == "not counted"
    assert len(runs.client.search_runs([runs.experiment.id], condition)) == 0
    assert child(runs).data.tags["fedsweep.outcome"] == kind


def test_the_provenance_of_a_trial_is_a_tag_from_its_start(runs: Runs) -> None:
    runs.sync(trial(1, plan=PLAN.model_copy(update={"marks": {"synthetic": "surrogate"}})))
    runs.sync(trial(1, plan=PLAN.model_copy(update={"key": "k2"})))
    found = runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.kind` = 'trial'")
    tags = {run.data.tags["fedsweep.key"]: run.data.tags.get("fedsweep.synthetic") for run in found}
    assert tags == {"k1": "surrogate", "k2": None}
    (run,) = runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.synthetic` = 'surrogate'")
    assert run.data.tags["fedsweep.outcome"] == "running"


def test_provenance_that_becomes_known_later_is_a_tag(runs: Runs, store: Store, tmp_path: Path) -> None:
    def at(marks: dict[str, str], session: Runs) -> tuple[str | None, str | None]:
        session.sync(trial(1, plan=PLAN.model_copy(update={"marks": marks})))
        tags = child(runs).data.tags
        return tags.get("fedsweep.gpus"), tags.get("fedsweep.out_of_memory")

    assert at({}, runs) == (None, None)
    assert at({"gpus": "0.25"}, runs) == ("0.25", None)
    again = opened(store, runs.experiment.name, tmp_path)
    assert at({"gpus": "0.5", "out_of_memory": "1"}, again) == ("0.5", "1")
    assert at({"gpus": "1", "out_of_memory": "2"}, again) == ("1", "2")


def test_an_interrupted_trial_is_not_left_running_and_runs_again_when_resumed(runs: Runs) -> None:
    runs.sync(trial(2))
    runs.interrupt(trial(2))
    assert (child(runs).info.status, child(runs).data.tags["fedsweep.outcome"]) == ("KILLED", "interrupted")
    runs._written.clear()
    runs.sync(trial(3))
    assert (child(runs).info.status, child(runs).data.tags["fedsweep.outcome"]) == ("RUNNING", "running")


def test_a_long_history_is_divided_into_requests_that_mlflow_accepts(runs: Runs) -> None:
    rounds = METRICS // 4 + 60
    runs.sync(trial(rounds))
    assert len(steps(runs)) == rounds


def test_children_are_below_their_parent_and_have_readable_names(runs: Runs) -> None:
    runs.sync(trial(1))
    run = child(runs)
    assert run.data.tags["mlflow.parentRunId"] == runs.parent
    assert run.info.run_name == run_name(PLAN) == "rank 4 · lr 0.01235 · seed 2"
    arm: Arm = {"method": {"name": "all_small", "depth": 3}, "federation.depths": [4, 4], "lora.patch_embed": True}
    plan = PLAN.model_copy(update={"arm": arm})
    assert run_name(plan) == "method all_small (depth 3) · depths [4, 4] · patch_embed true · seed 2"
    assert plan.label == "method=all_small (depth 3), federation.depths=[4, 4], lora.patch_embed=true"


def test_a_papers_values_are_no_parameter_but_their_source_is(store: Store, tmp_path: Path) -> None:
    values = {"accuracy/mean": 77.17, "accuracy/domain/clipart": 85.01}
    arms = tuple(ReferenceArm(arm={"lora.rank": rank}, values=values) for rank in range(200))
    paper = Reference(source="A Paper, Table 1", arms=arms)
    manifest = MANIFEST.model_copy(update={"id": "s3", "reference": paper})
    runs = opened(store, "a paper", sweep_folder(tmp_path), manifest)
    assert runs.parent is not None
    params = runs.client.get_run(runs.parent).data.params
    assert {name: value for name, value in params.items() if "reference" in name} == {"reference.source": paper.source}


@pytest.mark.parametrize("one_session", [True, False])
def test_trials_of_two_sweeps_with_the_same_content_are_two_runs(
    runs: Runs, store: Store, tmp_path: Path, one_session: bool
) -> None:
    runs.sync(trial(1))
    first, manifest = runs.parent, MANIFEST.model_copy(update={"id": "s2"})
    if one_session:
        runs.open_sweep(manifest, tmp_path)
        second = runs
    else:
        second = opened(store, runs.experiment.name, tmp_path, manifest)
    second.sync(trial(2))
    second.close_sweep("FINISHED", {})
    both = runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.kind` = 'trial'")
    assert {run.data.tags[PARENT] for run in both} == {first, second.parent}
    assert first != second.parent


def test_a_search_returns_all_pages(runs: Runs, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "PAGE", 2)
    for again in (False, True):
        session = opened(store, runs.experiment.name, tmp_path) if again else runs
        for number in range(5):
            session.sync(trial(1, plan=PLAN.model_copy(update={"key": f"k{number}"})))
    found = runs.experiment.search({"fedsweep.kind": "trial"})
    assert sorted(run.data.tags["fedsweep.key"] for run in found) == [f"k{number}" for number in range(5)]


def test_the_files_of_an_ended_trial_are_its_runs_artifacts(runs: Runs, tmp_path: Path) -> None:
    left = {name: tmp_path / name for name in ("tsne.csv", "tsne.png")}
    for path in left.values():
        path.write_text("x,y")

    def logged() -> set[str]:
        return {file.path for file in runs.client.list_artifacts(child(runs).info.run_id)}

    runs.sync(replace(trial(3), artifacts=left))
    assert logged() == set()
    ended = replace(trial(4, Outcome(outcome="finished", round=3)), artifacts=left)
    for _ in range(2):
        runs.sync(ended)
        assert logged() == set(left)
    runs.interrupt(ended)
    runs._written.clear()
    runs.sync(ended)  # the same trial is written a second time
    assert logged() == set(left)


def test_closing_a_sweep_attaches_the_report(runs: Runs, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "table.md").write_text("| arm |")
    runs.close_sweep("FINISHED", {"trials/finished": 4.0}, report)
    assert runs.parent is not None
    parent = runs.client.get_run(runs.parent)
    assert (parent.info.status, parent.data.metrics["trials/finished"]) == ("FINISHED", 4.0)
    assert [one.path for one in runs.client.list_artifacts(runs.parent, "report")] == ["report/table.md"]


def test_the_environment_is_an_artifact_of_the_parent(runs: Runs) -> None:
    assert runs.parent is not None
    text = Path(runs.client.download_artifacts(runs.parent, "environment.json")).read_text()
    assert {"python", "torch", "ray", "mlflow"} <= set(json.loads(text))


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git_commit()
    assert commit is None or len(commit.rstrip("+")) == 40
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None


def test_the_local_database_is_in_the_results_folder(store: Store, runs: Runs) -> None:
    assert (store.root / "mlflow.db").exists()
    assert MlflowClient(tracking_uri=tracking_uri(store.root)).get_experiment(runs.experiment.id) is not None
    command, environment = server_command(store.root, 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"


FINISHED = Outcome(outcome="finished", round=3)
WRITES = ("log_batch", "log_metric", "set_tag", "set_terminated", "create_run", "update_run", "log_text", "delete_run")
WRITES += ("log_inputs",)


class Death(BaseException):
    """An exception that simulates the end of the process or of the connection."""


def play(runs: Runs) -> None:
    """Write a trial to MLflow at its start, after two rounds and at its end."""
    for rounds in (0, 2):
        runs.sync(trial(rounds))
    runs.sync(trial(4, FINISHED))


def dying(runs: Runs, monkeypatch: pytest.MonkeyPatch, fatal: int, committed: bool) -> list[str]:
    """Make MLflow's client raise Death before write number `fatal`, or after it if `committed`.

    Writes are counted from 0. Return the list to which each write appends its name.
    """
    made: list[str] = []

    def of(name: str, real: Any) -> Any:
        def write(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) > fatal and not committed:
                raise Death
            answer = real(*args, **kwargs)
            if len(made) > fatal:
                raise Death
            return answer

        return write

    for name in WRITES:
        monkeypatch.setattr(runs.client, name, of(name, getattr(runs.client, name)))
    return made


def assert_whole(runs: Runs) -> None:
    """Check that each part of the trial is in MLflow exactly once."""
    assert steps(runs) == [(i, i / 7) for i in range(4)]
    assert steps(runs, "seconds/round") == [(i, 0.5) for i in range(4)]
    for summary in ("megabytes/sent", "accuracy/mean_of_last_4"):
        assert len(steps(runs, summary)) == 1
    run = child(runs)
    assert (run.data.params["lora.rank"], run.info.status) == ("4", "FINISHED")
    assert (run.data.tags["fedsweep.outcome"], run.data.tags["fedsweep.round"]) == ("finished", "3")
    assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["digits", "digits/feature_skew"]


@pytest.mark.parametrize(("fatal", "committed"), [(0, False), *((fatal, True) for fatal in range(6))])
def test_after_a_crash_at_any_write_nothing_is_duplicated_or_missing(
    runs: Runs, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int, committed: bool
) -> None:
    """A process ends before its first write or after any write, and a second process writes the same trial."""
    with monkeypatch.context() as patch:
        dying(runs, patch, fatal, committed)
        with pytest.raises(Death):
            play(runs)
    again = opened(store, runs.experiment.name, tmp_path)
    again.sync(trial(4, FINISHED))
    assert_whole(runs)


def test_a_trial_needs_six_writes_and_no_reads(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    made = dying(runs, monkeypatch, 1000, committed=True)
    for name in ("search_runs", "get_run", "get_metric_history", "get_experiment_by_name"):
        monkeypatch.setattr(runs.client, name, lambda *_, name=name, **__: asked.append(name))
    play(runs)
    monkeypatch.undo()
    assert made == ["create_run", "log_inputs", "log_batch", "log_batch", "set_terminated", "log_batch"]
    assert asked == []
    assert_whole(runs)


def test_a_resumed_sweep_needs_no_request_for_trials_that_have_ended(
    runs: Runs, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [trial(4, FINISHED, PLAN.model_copy(update={"key": f"k{number}"})) for number in range(5)]
    for one in trials:
        runs.sync(one)
    again = opened(store, runs.experiment.name, tmp_path)
    for name in (*WRITES, "search_runs", "get_run", "get_metric_history"):
        monkeypatch.setattr(again.client, name, None)
    for one in trials:
        again.sync(one)


@pytest.mark.parametrize("fatal", [0, 1, 2, 4, 5])
def test_a_lost_response_within_a_session_duplicates_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    with monkeypatch.context() as patch:
        dying(runs, patch, fatal, committed=True)
        with pytest.raises(Death):
            play(runs)
    runs.sync(trial(4, FINISHED))
    assert_whole(runs)


def test_a_round_written_twice_is_one_point(runs: Runs) -> None:
    """A slow server may apply a write only after the same write has been sent again."""
    runs.sync(trial(3))
    runs._written["k1"] = replace(runs._written["k1"], step=-1)
    runs.sync(trial(4, FINISHED))
    assert_whole(runs)


def test_a_run_that_a_slow_server_creates_too_late_is_deleted(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        late.append((args, kwargs))
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(runs.client, "create_run", slow)
        with pytest.raises(TimeoutError):
            runs.sync(trial(0))
    runs.sync(trial(2))
    ((args, kwargs),) = late
    runs.client.create_run(*args, **kwargs)
    runs.sync(trial(4, FINISHED))
    assert_whole(runs)


def test_a_failed_trial_that_continues_is_running_again(runs: Runs) -> None:
    runs.sync(trial(2, Outcome(outcome="failed", round=1, error="MemoryError")))
    runs.sync(trial(3))
    assert (child(runs).info.status, child(runs).data.tags["fedsweep.outcome"]) == ("RUNNING", "running")
    runs.sync(trial(4, FINISHED))
    assert child(runs).info.status == "FINISHED"


def test_an_experiment_deleted_on_the_page_is_restored(runs: Runs, store: Store, tmp_path: Path) -> None:
    runs.client.delete_experiment(runs.experiment.id)
    again = opened(store, runs.experiment.name, tmp_path)
    again.sync(trial(1))
    assert child(again).info.status == "RUNNING"
