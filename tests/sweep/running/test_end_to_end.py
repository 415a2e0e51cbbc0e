"""Whole sweeps through the command line, Ray and MLflow."""

import csv
import io
import json
import os
import signal
from pathlib import Path

import pytest

from fedsweep.common.config import flat
from fedsweep.federation.run_config import RunConfig
from tests.sweep.helpers import (
    GRID,
    ROUNDS,
    SMALL,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    kill,
    newest,
    played,
    runs,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = pytest.mark.slow


OVERRIDES = ["optimizer.lr=0.05"]
"""The overrides of the command that starts a sweep; a resumed sweep keeps them."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep of the small grid with an override and system metrics, and return its working directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_space(folder, "tiny", GRID)
    fedsweep(folder, "tune", "tiny", *OVERRIDES, "--system-metrics", "--at-once", "1")
    return folder


def test_every_trial_finishes_and_mlflow_equals_the_store(undisturbed: Path) -> None:
    trials = newest(undisturbed, "tiny").trials()
    assert [trial.outcome and trial.outcome.outcome for trial in trials] == ["finished"] * 4
    assert all([record.round for record in trial.history] == list(range(ROUNDS + 1)) for trial in trials)
    assert_mlflow_equals_store(undisturbed, "tiny")


def test_mlflow_contains_the_system_metrics_of_each_round(undisturbed: Path) -> None:
    _, children, client = runs(undisturbed, "tiny")
    for run in children:
        for metric in ("system/cpu_utilization_percentage", "system/process_memory_usage_megabytes"):
            written = client.get_metric_history(run.info.run_id, metric)
            assert sorted(one.step for one in written) == list(range(ROUNDS + 1))


def test_lora_rank_has_one_name_from_yaml_to_table(undisturbed: Path) -> None:
    """The dotted name is the same in YAML, Ray, MLflow and the table, and its value sets the shape of the tensors."""
    from safetensors import safe_open

    sweep = newest(undisturbed, "tiny")
    _, children, _ = runs(undisturbed, "tiny")
    ranks = set()
    for trial in sweep.trials():
        rank = trial.plan.arm["lora.rank"]
        with safe_open(sweep.trial(trial.plan.key).checkpoint, framework="numpy") as file:
            name = "state/adapter/backbone.blocks.0.attn.proj.lora_A.default.weight"
            assert file.get_tensor(name).shape == (rank, 64)
        (run,) = [run for run in children if run.data.tags["fedsweep.key"] == trial.plan.key]
        assert run.data.params["lora.rank"] == str(rank)
        resolved = flat(RunConfig.of(trial.plan.config, "test"))
        assert {name: json.loads(value) for name, value in _values(run).items()} == resolved
        ranks.add(rank)
    assert ranks == {1, 4}
    assert [row["lora.rank"] for row in csv.DictReader(io.StringIO(table(undisturbed, "tiny")))] == ["1", "4"]


def _values(run: object) -> dict[str, str]:
    """Return MLflow's parameters of a run as JSON texts; MLflow stores strings without quotes."""
    params: dict[str, str] = run.data.params  # type: ignore[attr-defined]

    def as_json(value: str) -> str:
        try:
            json.loads(value)
        except json.JSONDecodeError:
            return json.dumps(value)
        return value

    return {name: as_json(value) for name, value in params.items()}


def test_the_parent_run_contains_files_versions_and_the_report(undisturbed: Path) -> None:
    parents, children, client = runs(undisturbed, "tiny")
    (parent,) = parents
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"search_space.yaml", "experiment.yaml", "sweep.json", "environment.json", "report"} <= files
    reported = {file.path for file in client.list_artifacts(parent.info.run_id, "report")}
    assert {"report/table.csv", "report/table.md", "report/curves.png"} <= reported
    assert sorted(run.info.run_name for run in children) == [
        f"rank {rank} · seed {seed}" for rank in (1, 4) for seed in (0, 1)
    ]


def test_the_report_command_writes_the_same_table_again(undisturbed: Path) -> None:
    before = table(undisturbed, "tiny")
    (newest(undisturbed, "tiny").folder / "report" / "table.csv").unlink()
    done = fedsweep(undisturbed, "report", "tiny")
    assert table(undisturbed, "tiny") == before
    assert "95%" in done.stdout


def test_a_run_equals_the_trial_with_the_same_configuration(undisturbed: Path) -> None:
    """Ray, the worker process and earlier trials in this process do not change a single bit."""
    words = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]
    done = fedsweep(undisturbed, "run", "fedra_digits", *words, *OVERRIDES, "lora.rank=4", "seed=1", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (trial,) = [
        trial
        for trial in newest(undisturbed, "tiny").trials()
        if trial.plan.arm == {"lora.rank": 4} and trial.plan.seed == 1
    ]
    assert lines == [{"round": record.round, **record.metrics} for record in trial.history]


def test_interrupted_killed_and_resumed_equals_undisturbed(undisturbed: Path, tmp_path: Path) -> None:
    write_space(tmp_path, "tiny", GRID)
    process = start(tmp_path, "tune", "tiny", "--at-once", "1", *OVERRIDES)  # one by one, so that some trials are left
    wait_for_rounds(tmp_path, "tiny", 1, process)
    os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130, out + error
    assert "--resume" in out
    assert "Traceback" not in out + error
    _, children, _ = runs(tmp_path, "tiny")
    assert "RUNNING" not in {run.info.status for run in children}

    process = start(tmp_path, "tune", "tiny", "--resume", "--at-once", "1")
    wait_for_rounds(tmp_path, "tiny", played(tmp_path, "tiny") + 1, process)
    kill(process)
    left = [trial for trial in newest(tmp_path, "tiny").trials() if trial.outcome is None]
    assert left, "the sweep ended before it was killed"
    fedsweep(tmp_path, "tune", "tiny", "--resume")
    assert table(tmp_path, "tiny") == table(undisturbed, "tiny")
    assert histories(newest(tmp_path, "tiny")) == histories(newest(undisturbed, "tiny"))
    assert_mlflow_equals_store(tmp_path, "tiny")
    parents, _, _ = runs(tmp_path, "tiny")
    assert len(parents) == 1

    # A complete sweep is not run again, but a resume may change the columns of its report.
    done = fedsweep(tmp_path, "tune", "tiny", "--resume", "--columns", "megabytes_up,parameters_trained")
    assert "trained parameters" in done.stdout
    assert "MB sent" not in done.stdout
    assert newest(tmp_path, "tiny").manifest().columns == ("megabytes_up", "parameters_trained")
    assert histories(newest(tmp_path, "tiny")) == histories(newest(undisturbed, "tiny"))
