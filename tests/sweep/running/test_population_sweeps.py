"""Whole sweeps with populations, through the command line, Ray and MLflow."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests.sweep.helpers import (
    POPULATION,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    kill,
    newest,
    runs,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = pytest.mark.slow

SIZE, ROUNDS = 4, 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep of a population, one member after the other, and return its working directory."""
    folder = tmp_path_factory.mktemp("population")
    write_space(folder, "people", POPULATION)
    fedsweep(folder, "tune", "people", "--at-once", "1")
    return folder


def test_members_finish_with_complete_histories_and_mlflow_equals_the_store(undisturbed: Path) -> None:
    trials = newest(undisturbed, "people").trials()
    ways = [trial.outcome and trial.outcome.outcome for trial in trials]
    children = [trial for trial in trials if trial.plan.start]
    assert ways.count("finished") == SIZE
    assert len(children) == ways.count("pruned") >= 2
    for trial in trials:
        assert [record.round for record in trial.history] == list(range(trial.last_round + 1))
    by_key = {trial.plan.key: trial for trial in trials}
    for child in children:
        assert child.plan.start is not None
        parent, shared = by_key[child.plan.start.key], child.plan.start.round + 1
        assert list(child.history[:shared]) == list(parent.history[:shared])
    assert_mlflow_equals_store(undisturbed, "people")
    _, shown, _ = runs(undisturbed, "people")
    tags = {run.data.tags["fedsweep.key"]: run.data.tags.get("fedsweep.start") for run in shown}
    assert sum(tag is not None for tag in tags.values()) == len(children)


def test_a_member_that_was_never_replaced_equals_the_run_of_its_configuration(undisturbed: Path) -> None:
    """Other members and their copies do not change a single bit of the run."""
    trials = newest(undisturbed, "people").trials()
    trial = next(one for one in trials if one.plan.start is None and one.last_round == ROUNDS)
    changes = {**POPULATION["fixed"], **trial.plan.arm}
    words = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    done = fedsweep(undisturbed, "run", "fedra_digits", *words, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [{"round": record.round, **record.metrics} for record in trial.history]


def test_a_child_differs_from_its_parent_from_its_own_first_round_on(undisturbed: Path) -> None:
    trials = {trial.plan.key: trial for trial in newest(undisturbed, "people").trials()}
    for child in trials.values():
        if (begun := child.plan.start) is not None:
            own, parents = child.history[begun.round + 1], trials[begun.key].history[begun.round + 1]
            assert own.round == parents.round
            assert own.metrics != parents.metrics


def test_the_report_contains_the_schedule_of_every_member(undisturbed: Path) -> None:
    sweep = newest(undisturbed, "people")
    rows = list(csv.DictReader(io.StringIO((sweep.folder / "report" / "population.csv").read_text())))
    trials = {trial.plan.number: trial for trial in sweep.trials()}
    assert len(rows) == SIZE * ROUNDS
    for row in rows:
        played, member = trials[int(row["trial"])], trials[int(row["member"])]
        for name, value in played.plan.arm.items():
            assert float(row[name]) == value
        assert float(row["accuracy/mean"]) == member.history[int(row["round"])].metrics["accuracy/mean"]
    assert (sweep.folder / "report" / "population.png").exists()
    assert "trials continued from the state of another trial" in (sweep.folder / "report" / "table.md").read_text()


def test_killed_and_resumed_equals_undisturbed(undisturbed: Path, tmp_path: Path) -> None:
    """The sweep is killed in the second generation; `test_population_state.py` tests other moments."""
    write_space(tmp_path, "people", POPULATION)
    process = start(tmp_path, "tune", "people")
    wait_for_rounds(tmp_path, "people", 10, process)
    kill(process)
    fedsweep(tmp_path, "tune", "people", "--resume")
    assert table(tmp_path, "people") == table(undisturbed, "people")
    assert histories(newest(tmp_path, "people")) == histories(newest(undisturbed, "people"))
    assert_mlflow_equals_store(tmp_path, "people")
    for name in ("population.csv", "population.png"):
        reports = [newest(folder, "people").folder / "report" / name for folder in (tmp_path, undisturbed)]
        assert reports[0].read_bytes() == reports[1].read_bytes()
