"""The schedules of a population in its lineages, in population.csv and in the figure."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsweep.report import write_report
from fedsweep.report.figures import population as figure
from fedsweep.report.population_schedule import Lineage, best, played, schedule_sentences, schedules
from fedsweep.results import Start, TrialRecord
from tests.report.helpers import accepts_columns

POPULATION: dict[str, Any] = {
    "scheduler": "pbt", "search": "random", "varied": ("optimizer.lr",), "baseline": None, "seeds": (0,), "rounds": 6,
}  # fmt: skip


@pytest.fixture
def population(trials: Any) -> list[TrialRecord]:
    """Return five trials of a population.

    After round 2, trial 3 replaces trial 1 and continues trial 0. After round 4, trial 4 replaces trial 2 and continues
    trial 3.
    """
    first = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    child = [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8]
    trials.add({"optimizer.lr": 0.1}, 0, first)
    trials.add({"optimizer.lr": 0.01}, 0, [0.1, 0.1, 0.1], "pruned")
    trials.add({"optimizer.lr": 0.02}, 0, [0.1, 0.1, 0.2, 0.2, 0.2], "pruned")
    trials.add({"optimizer.lr": 0.08}, 0, child)
    trials.add({"optimizer.lr": 0.064}, 0, [*child[:5], 0.8, 0.9])
    starts = {3: Start(key="k0", round=2), 4: Start(key="k3", round=4)}
    return [
        replace(one, plan=one.plan.model_copy(update={"start": starts.get(one.plan.number)})) for one in trials.records
    ]


def test_a_lineage_starts_with_its_oldest_ancestor(population: list[TrialRecord], manifest: Callable[..., Any]) -> None:
    found = {one.end.plan.number: one for one in played(manifest(**POPULATION), population)}
    assert {number: one.values("optimizer.lr") for number, one in found.items()} == {
        0: [(1, 6, 0.1)],
        3: [(1, 2, 0.1), (3, 6, 0.08)],
        4: [(1, 2, 0.1), (3, 4, 0.08), (5, 6, 0.064)],
    }


def test_population_csv_contains_every_round_of_every_member(
    population: list[TrialRecord], manifest: Callable[..., Any], tmp_path: Path
) -> None:
    made = write_report(manifest(**POPULATION), population, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "population.csv").read_text())))
    assert [row["round"] for row in rows] == [str(round) for round in range(1, 7)] * 3
    accepts_columns(manifest(**POPULATION), population, rows[0])
    ours = [row for row in rows if row["member"] == "4"]
    assert [row["trial"] for row in ours] == ["0", "0", "3", "3", "4", "4"]
    assert [float(row["optimizer.lr"]) for row in ours] == [0.1, 0.1, 0.08, 0.08, 0.064, 0.064]
    assert [float(row["accuracy/mean"]) for row in ours] == [0.2, 0.3, 0.5, 0.6, 0.8, 0.9]
    assert tmp_path / "population.csv" in made.paths
    assert "population" in [one.name for one in made.figures]


def test_the_best_schedule_is_described(population: list[TrialRecord], manifest: Callable[..., Any]) -> None:
    said = schedule_sentences(manifest(**POPULATION), population)
    assert said[0].startswith("Population: 2 of 5 trials continued from the state of another trial")
    assert said[1] == "Schedule of the best member: lr 0.1 from round 1, 0.08 from round 3, 0.064 from round 5."
    smallest = best(minimised := manifest(**POPULATION, mode="min"), played(minimised, population))
    assert smallest is not None
    assert smallest.end.plan.number == 0


def test_other_sweeps_have_no_schedules(
    population: list[TrialRecord], manifest: Callable[..., Any], tmp_path: Path
) -> None:
    of_another = manifest(**{**POPULATION, "scheduler": "none"})
    assert schedule_sentences(of_another, population) == []
    assert schedules(of_another, population) is None
    assert figure.draw(of_another, population) is None
    assert [*tmp_path.iterdir()] == []


def test_an_unfinished_population_can_be_reported(
    population: list[TrialRecord], manifest: Callable[..., Any], tmp_path: Path
) -> None:
    """The sweep was stopped before trial 4 completed a round of its own."""
    only = [replace(one, outcome=None, history=one.history[:5]) for one in population if one.plan.number in (0, 3, 4)]
    assert Lineage.of(only[2], {one.plan.key: one for one in only}).values("optimizer.lr")[-1] == (3, 4, 0.08)
    assert len((schedules(manifest(**POPULATION), only) or "").splitlines()) > 1
    assert figure.draw(manifest(**POPULATION), only)
