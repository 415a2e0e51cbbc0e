"""MLflow as a view of the store: written once, rebuilt at will."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from fedsweep.arms import Arm, Reference, ReferenceArm
from fedsweep.errors import UserError
from fedsweep.history import RoundRecord
from fedsweep.store import Outcome, Store, SweepManifest, TrialPlan, TrialRecord
from fedsweep.tracking import Recorder, check_writable, git_commit, run_name, server_command, tracking_uri
from fedsweep.tracking.recorder import BATCH

PLAN = TrialPlan(
    key="k1",
    number=0,
    arm={"lora.rank": 4, "optimizer.lr": 0.0123456},
    seed=2,
    config={"seed": 2, "lora": {"rank": 4, "alpha": None}, "data": {"domains": ["plain"]}, "method": {"name": "fedra"}},
)
MANIFEST = SweepManifest(
    id="s1",
    name="tiny",
    experiment="fedra_digits",
    created=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).isoformat(),
    metric="accuracy/mean",
    mode="max",
    rounds=3,
    varied=("lora.rank",),
    seeds=(2,),
    scheduler="none",
    search="grid",
    domains=("plain",),
    digests={},
)


def trial(rounds: int, outcome: Outcome | None = None, plan: TrialPlan = PLAN) -> TrialRecord:
    history = [
        RoundRecord(i, {"accuracy/mean": i / 7, "bytes/up": 10.0, "bytes/down": 20.0}, 0.5) for i in range(rounds)
    ]
    return TrialRecord(plan, outcome, history)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("store")
    return Store(root)


@pytest.fixture
def recorder(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Recorder:
    """An MLflow experiment of its own per test, in one database."""
    recorder = Recorder(store, request.node.name)
    for name in ("search_space.yaml", "experiment.yaml", "sweep.json"):
        (tmp_path / name).write_text("seed: 0\n")
    recorder.open_sweep(MANIFEST, tmp_path)
    return recorder


def child(recorder: Recorder) -> Any:
    (run,) = recorder.client.search_runs([recorder.experiment_id], "tags.`fedsweep.kind` = 'trial'")
    return run


def steps(recorder: Recorder, metric: str = "accuracy/mean") -> Sequence[tuple[int, float]]:
    return [(one.step, one.value) for one in recorder.client.get_metric_history(child(recorder).info.run_id, metric)]


def test_each_round_is_written_once_however_often_it_is_synced(recorder: Recorder) -> None:
    for rounds in (1, 1, 2, 4, 4):
        recorder.sync(trial(rounds))
    assert steps(recorder) == [(i, i / 7) for i in range(4)]
    assert steps(recorder, "seconds/round") == [(i, 0.5) for i in range(4)]


def test_a_new_process_finds_the_run_and_goes_on(recorder: Recorder, store: Store, tmp_path: Path) -> None:
    recorder.sync(trial(2))
    again = Recorder(store, recorder.client.get_experiment(recorder.experiment_id).name)
    again.open_sweep(MANIFEST, tmp_path)
    assert again.parent == recorder.parent
    again.sync(trial(4, Outcome(outcome="finished", round=3)))
    assert steps(recorder) == [(i, i / 7) for i in range(4)]
    assert child(recorder).info.status == "FINISHED"


def test_all_resolved_values_are_parameters_under_their_dotted_names(recorder: Recorder) -> None:
    recorder.sync(trial(1))
    expected = {
        "seed": "2",
        "lora.rank": "4",
        "lora.alpha": "null",
        "data.domains": '["plain"]',
        "method.name": "fedra",
    }
    assert child(recorder).data.params == expected


@pytest.mark.parametrize(("outcome", "status"), [("finished", "FINISHED"), ("pruned", "KILLED"), ("failed", "FAILED")])
def test_outcomes_are_told_by_status_and_tags(recorder: Recorder, outcome: Any, status: str) -> None:
    error = "Traceback\nValueError: no" if outcome == "failed" else None
    recorder.sync(trial(3, Outcome(outcome=outcome, round=2, error=error)))
    run = child(recorder)
    assert run.info.status == status
    assert (run.data.tags["fedsweep.outcome"], run.data.tags["fedsweep.round"]) == (outcome, "2")
    assert run.data.tags.get("fedsweep.error") == ("ValueError: no" if error else None)
    assert run.data.metrics["megabytes/sent"] == pytest.approx(3 * 30 / 1e6)
    assert run.data.metrics["accuracy/mean_of_last_4"] == pytest.approx((1 + 2) / 7 / 2)


def test_what_a_trial_says_of_itself_is_a_tag_from_its_start(recorder: Recorder) -> None:
    recorder.sync(trial(1, plan=PLAN.model_copy(update={"marks": {"synthetic": "surrogate"}})))
    recorder.sync(trial(1, plan=PLAN.model_copy(update={"key": "k2"})))
    found = recorder.client.search_runs([recorder.experiment_id], "tags.`fedsweep.kind` = 'trial'")
    tags = {run.data.tags["fedsweep.key"]: run.data.tags.get("fedsweep.synthetic") for run in found}
    assert tags == {"k1": "surrogate", "k2": None}
    (run,) = recorder.client.search_runs([recorder.experiment_id], "tags.`fedsweep.synthetic` = 'surrogate'")
    assert run.data.tags["fedsweep.outcome"] == "running"


def test_an_interrupted_trial_is_not_left_running_and_runs_again_when_resumed(recorder: Recorder) -> None:
    recorder.sync(trial(2))
    recorder.interrupt(trial(2))
    assert (child(recorder).info.status, child(recorder).data.tags["fedsweep.outcome"]) == ("KILLED", "interrupted")
    recorder._written.clear()
    recorder.sync(trial(3))
    assert (child(recorder).info.status, child(recorder).data.tags["fedsweep.outcome"]) == ("RUNNING", "running")


def test_a_long_history_is_cut_into_requests_that_mlflow_takes(recorder: Recorder) -> None:
    rounds = BATCH // 4 + 60
    recorder.sync(trial(rounds))
    assert len(steps(recorder)) == rounds


def test_children_hang_below_their_parent_and_have_names_for_people(recorder: Recorder) -> None:
    recorder.sync(trial(1))
    run = child(recorder)
    assert run.data.tags["mlflow.parentRunId"] == recorder.parent
    assert run.info.run_name == run_name(PLAN) == "rank 4 · lr 0.01235 · seed 2"
    arm: Arm = {"method": {"name": "all_small", "depth": 3}, "federation.depths": [4, 4], "lora.patch_embed": True}
    plan = PLAN.model_copy(update={"arm": arm})
    assert run_name(plan) == "method all_small (depth 3) · depths [4, 4] · patch_embed true · seed 2"
    assert plan.label == "method=all_small (depth 3), federation.depths=[4, 4], lora.patch_embed=true"


def test_a_long_table_of_a_paper_is_no_parameter_but_its_source_is(recorder: Recorder, tmp_path: Path) -> None:
    values = {"accuracy/mean": 77.17, "accuracy/domain/clipart": 85.01}
    arms = tuple(ReferenceArm(arm={"lora.rank": rank}, values=values) for rank in range(200))
    paper = Reference(source="A Paper, Table 1", arms=arms)
    recorder.open_sweep(MANIFEST.model_copy(update={"id": "s3", "reference": paper}), tmp_path)
    assert recorder.unsynced == {}
    assert recorder.parent is not None
    params = recorder.client.get_run(recorder.parent).data.params
    assert {name: value for name, value in params.items() if "reference" in name} == {"reference.source": paper.source}


def test_trials_of_two_sweeps_with_the_same_content_are_two_runs(recorder: Recorder, tmp_path: Path) -> None:
    recorder.sync(trial(1))
    recorder._written.clear()
    recorder.open_sweep(MANIFEST.model_copy(update={"id": "s2"}), tmp_path)
    recorder.sync(trial(2))
    runs = recorder.client.search_runs([recorder.experiment_id], "tags.`fedsweep.kind` = 'trial'")
    assert len(runs) == 2


def test_the_files_of_an_ended_trial_are_its_runs_artifacts(recorder: Recorder, tmp_path: Path) -> None:
    left = {name: tmp_path / name for name in ("tsne.csv", "tsne.png")}
    for path in left.values():
        path.write_text("x,y")

    def logged() -> set[str]:
        return {file.path for file in recorder.client.list_artifacts(child(recorder).info.run_id)}

    recorder.sync(replace(trial(3), artifacts=left))
    assert logged() == set()
    ended = replace(trial(4, Outcome(outcome="finished", round=3)), artifacts=left)
    for _ in range(2):
        recorder.sync(ended)
        assert logged() == set(left)
    recorder.interrupt(ended)
    recorder._written.clear()
    recorder.sync(ended)  # logged a second time
    assert (logged(), recorder.unsynced) == (set(left), {})


def test_closing_a_sweep_attaches_the_report(recorder: Recorder, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "table.md").write_text("| arm |")
    recorder.close_sweep("FINISHED", {"trials/finished": 4.0}, report)
    assert recorder.parent is not None
    parent = recorder.client.get_run(recorder.parent)
    assert (parent.info.status, parent.data.metrics["trials/finished"]) == ("FINISHED", 4.0)
    assert [one.path for one in recorder.client.list_artifacts(recorder.parent, "report")] == ["report/table.md"]


def test_the_environment_is_an_artifact_of_the_parent(recorder: Recorder) -> None:
    assert recorder.parent is not None
    text = Path(recorder.client.download_artifacts(recorder.parent, "environment.json")).read_text()
    assert {"python", "torch", "ray", "mlflow"} <= set(json.loads(text))


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git_commit()
    assert commit is None or len(commit.rstrip("+")) == 40
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None


def test_a_store_is_a_database_and_a_folder(store: Store, recorder: Recorder) -> None:
    assert (store.root / "mlflow.db").exists()
    assert MlflowClient(tracking_uri=tracking_uri(store.root)).get_experiment(recorder.experiment_id) is not None
    command, environment = server_command(store.root, 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize("fault", ["a file", "not a database"])
def test_a_store_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path, fault: str) -> None:
    root = tmp_path / "mlruns"
    if fault == "a file":
        root.write_text("")
    else:
        root.mkdir()
        (root / "mlflow.db").write_bytes(b"no database at all, and longer than a header" * 40)
    with pytest.raises(UserError, match=r"^the tracking store .*mlruns cannot be written: [^\n]+\.$"):
        check_writable(root)


FINISHED = Outcome(outcome="finished", round=3)
WRITES = ("log_batch", "log_metric", "set_tag", "set_terminated", "create_run", "update_run", "log_text")


@pytest.mark.parametrize("fatal", range(12))
def test_a_death_at_any_write_leaves_nothing_doubled_or_missing(
    recorder: Recorder, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    """The process dies before its n-th write to MLflow; another one syncs the same trial to its end."""

    class Death(BaseException):
        pass

    count = 0

    def dying(real: Any) -> Any:
        def write(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > fatal:
                raise Death
            return real(*args, **kwargs)

        return write

    with monkeypatch.context() as patch:
        for name in WRITES:
            patch.setattr(recorder.client, name, dying(getattr(recorder.client, name)))
        try:
            recorder.sync(trial(2))
            recorder.sync(trial(4, FINISHED))
        except Death:
            pass
    again = Recorder(store, recorder.client.get_experiment(recorder.experiment_id).name)
    again.open_sweep(MANIFEST, tmp_path)
    again.sync(trial(4, FINISHED))
    assert again.unsynced == {}
    assert steps(recorder) == [(i, i / 7) for i in range(4)]
    for summary in ("megabytes/sent", "accuracy/mean_of_last_4"):
        assert len(steps(recorder, summary)) == 1
    run = child(recorder)
    assert run.data.params["lora.rank"] == "4"
    assert (run.info.status, run.data.tags["fedsweep.outcome"], run.data.tags["fedsweep.round"]) == (
        "FINISHED",
        "finished",
        "3",
    )


def test_trouble_with_mlflow_is_kept_and_mended_by_the_next_sync(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.sync(trial(2))
    with monkeypatch.context() as patch:
        patch.setattr(recorder.client, "set_terminated", lambda *_: 1 / 0)
        recorder.sync(trial(4, FINISHED))
    assert "ZeroDivisionError" in recorder.unsynced["k1"]
    recorder.sync(trial(4, FINISHED))
    assert recorder.unsynced == {}
    assert steps(recorder) == [(i, i / 7) for i in range(4)]
    assert child(recorder).info.status == "FINISHED"


def test_a_failed_trial_that_goes_on_is_running_again(recorder: Recorder) -> None:
    recorder.sync(trial(2, Outcome(outcome="failed", round=1, error="MemoryError")))
    recorder.sync(trial(3))
    assert (child(recorder).info.status, child(recorder).data.tags["fedsweep.outcome"]) == ("RUNNING", "running")
    recorder.sync(trial(4, FINISHED))
    assert child(recorder).info.status == "FINISHED"


def test_an_experiment_deleted_on_the_page_comes_back(recorder: Recorder, store: Store) -> None:
    name = recorder.client.get_experiment(recorder.experiment_id).name
    recorder.client.delete_experiment(recorder.experiment_id)
    again = Recorder(store, name)
    again.sync(trial(1))
    assert again.unsynced == {}
