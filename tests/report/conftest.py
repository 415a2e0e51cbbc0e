"""Fixtures for constructed sweeps, in which each test states the results of all arms and seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from matplotlib import style

from fedsweep.report.arm_statistics import domain_metric
from fedsweep.report.figures import STYLE
from fedsweep.results import Outcome, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.results.tsne_files import Embedding, Point

DOMAINS = ("photo", "sketch")


def make_manifest(**changes: Any) -> SweepManifest:
    """Return the manifest of a rank ablation with 4 rounds, seeds 0 to 2 and baseline rank 8, with changed fields."""
    fields: dict[str, Any] = {
        "id": "20260101-a1",
        "name": "ablations/lora_rank",
        "experiment": "fedra_digits",
        "created": "2026-01-01T00:00:00Z",
        "metric": "accuracy/mean",
        "mode": "max",
        "rounds": 4,
        "varied": ("lora.rank",),
        "baseline": {"lora.rank": 8},
        "seeds": (0, 1, 2),
        "scheduler": "none",
        "search": "grid",
        "domains": DOMAINS,
        "digests": {},
    }
    return SweepManifest(**{**fields, **changes})


def make_history(
    values: Sequence[float], metric: str = "accuracy/mean", held_out: Sequence[str] = ()
) -> list[RoundRecord]:
    """Return one record per round, starting with round 0, in which `metric` has the given values.

    Each round from round 1 on sends 1.5 MB. The accuracy on photo is 0.1 above the value of the round, and the accuracy
    on sketch is 0.1 below it. If domains are held out, accuracy/mean is 0.02 above the value and
    accuracy/out_of_domain_mean is 0.2 below it, unless `metric` is one of the two.
    """
    records = []
    for number, value in enumerate(values):
        metrics = {
            "accuracy/worst_domain": value - 0.1,
            domain_metric("photo", "photo" in held_out): value + 0.1,
            domain_metric("sketch", "sketch" in held_out): value - 0.1,
            **({"accuracy/mean": value + 0.02, "accuracy/out_of_domain_mean": value - 0.2} if held_out else {}),
            metric: value,
        }
        costs = {"bytes/down": 1e6, "bytes/up": 5e5} if number else {}
        records.append(RoundRecord(number, {**metrics, **costs}, 0.1))
    return records


class Trials:
    """A collection of made-up trials, numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.records: list[TrialRecord] = []

    def add(
        self,
        arm: dict[str, Any] | int,
        seed: int,
        values: Sequence[float],
        outcome: str | None = "finished",
        metric: str = "accuracy/mean",
        held_out: Sequence[str] = (),
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add a trial whose `metric` has these values from round 0 on; an integer `arm` is a rank."""
        settings = {"lora.rank": arm} if isinstance(arm, int) else arm
        number = len(self.records)
        plan = TrialPlan(key=f"k{number}", number=number, arm=settings, seed=seed, config={}, marks=dict(marks))
        ended = None if outcome is None else Outcome(outcome=outcome, round=len(values) - 1)  # type: ignore[arg-type]
        self.records.append(TrialRecord(plan, ended, make_history(values, metric, held_out)))

    def arms(self, finals: dict[int, Sequence[float]]) -> "Trials":
        """Add finished trials, and return self; `finals` maps each rank to the final values of seeds 0, 1, ..."""
        for rank, ends in finals.items():
            for seed, end in enumerate(ends):
                self.add(rank, seed, [0.2, 0.3, 0.4, 0.5, end])
        return self


@pytest.fixture
def trials() -> Trials:
    """Return an empty collection of trials."""
    return Trials()


@pytest.fixture
def tables(tmp_path: Path) -> Callable[[Sequence[TrialRecord]], list[TrialRecord]]:
    """Return a function that adds the same t-SNE table, with three classes in two domains, to every trial."""

    def give(records: Sequence[TrialRecord]) -> list[TrialRecord]:
        cells = [(label, domain) for label in ("cat", "dog", "owl") for domain in DOMAINS]
        points = [Point(place, place % 3, label, domain, place / 10) for place, (label, domain) in enumerate(cells)]
        (tmp_path / "tsne.csv").write_text(Embedding(tuple(points)).csv())
        return [replace(record, artifacts={"tsne.csv": tmp_path / "tsne.csv"}) for record in records]

    return give


@pytest.fixture
def drawn() -> Callable[..., Any]:
    """Return a function that draws a figure of the report and returns the Matplotlib figure, or None if it is empty."""

    def draw(function: Callable[..., Any], *what: Any) -> Any:
        with style.context(STYLE, after_reset=True):
            made = function(*what)
        return made and made.figure

    return draw


@pytest.fixture
def manifest() -> Callable[..., SweepManifest]:
    """Return the function `make_manifest`."""
    return make_manifest


@pytest.fixture(autouse=True)
def _coarse(coarse: None) -> None:
    """Write PNG files of low resolution in all tests of reports."""
