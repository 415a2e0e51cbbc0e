"""Two objectives in a report: the column, the sentence and the figure, for samples and for arms over seeds."""

import csv
import io
from dataclasses import replace

import pytest

from fedsweep.front import Against
from fedsweep.history import RoundRecord
from fedsweep.report import frame, front, write_report
from fedsweep.report.statistics import summarise
from fedsweep.report.table import AblationTable

SENT = Against(metric="megabytes/sent", mode="min")
ENDS = {1: (0.5, 1.0), 2: (0.6, 2.0), 4: (0.6, 3.0), 8: (0.7, 4.0), 16: (0.55, 9.0)}
"""Accuracy and MB of each rank; 4 sends more than 2 for the same accuracy."""


@pytest.fixture
def fill(trials):
    """Gives each rank a finished trial for each seed, whose values average to `ENDS`."""

    def give(seeds=(0,), ends=ENDS):
        for rank, (accuracy, megabytes) in ends.items():
            for place, seed in enumerate(seeds):
                off = place - (len(seeds) - 1) / 2
                trials.add(rank, seed, [0.2, accuracy + 0.02 * off])
                sent = {"bytes/up": 1e6 * (megabytes - 0.5 + 0.1 * off), "bytes/down": 5e5}
                first, last = trials.records[-1].history
                history = [first, RoundRecord(1, {**last.metrics, **sent}, 10.0 / rank)]
                trials.records[-1] = replace(trials.records[-1], history=history)
        return trials

    return give


def table_of(manifest, trials):
    return AblationTable(manifest, summarise(manifest, trials.records))


def marked(table):
    return {int(row["lora.rank"]) for row in table.cells() if row["efficient"] == "yes"}


def test_efficient_samples_are_marked_named_and_drawn(manifest, fill, tmp_path):
    sweep = manifest(baseline=None, seeds=(0,), against=SENT)
    trials = fill()
    trials.add(32, 0, [0.2, 0.99], "pruned")
    table = table_of(sweep, trials)
    assert marked(table) == {1, 2, 8}
    best, caution = table.findings()
    assert best == (
        "Efficient in accuracy/mean against megabytes/sent, 3 of 5 arms: "
        "rank 1 (50.00%, 1.000 MB); rank 2 (60.00%, 2.000 MB); rank 8 (70.00%, 4.000 MB)."
    )
    assert caution.startswith("They were chosen from 6 arms")
    assert any(
        "Second objective: megabytes/sent, summed over all rounds, lower is better." in one for one in table.caption()
    )
    rows = {int(row["lora.rank"]): row["efficient"] for row in csv.DictReader(io.StringIO(frame.csv(table)))}
    assert rows == {1: "True", 2: "True", 4: "False", 8: "True", 16: "False", 32: "False"}
    report = write_report(sweep, trials.records, tmp_path)
    assert report.front in report.paths
    assert report.front.stat().st_size > 10_000


def test_arms_of_a_grid_are_compared_by_their_means_over_seeds(manifest, fill):
    table = table_of(manifest(against=SENT), fill(seeds=(0, 1, 2)))
    assert marked(table) == {1, 2, 8}
    assert table.findings()[-1].startswith("Efficient in accuracy/mean against megabytes/sent, 3 of 5 arms:")
    assert len(table.findings()) == 5


def test_another_second_objective_has_a_column(manifest, fill):
    """More rank takes less time here, so that only what is fast or accurate is kept."""
    against = Against(metric="seconds/round", mode="min")
    table = table_of(manifest(baseline=None, against=against), fill())
    assert marked(table) == {8, 16}
    assert {int(row["lora.rank"]): row["seconds/round"] for row in table.cells()}[16] == "0.725"
    assert next(csv.DictReader(io.StringIO(frame.csv(table))))["seconds/round"] == "1.35"


def test_the_figure_joins_the_efficient_arms_by_what_they_beat(manifest, fill, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(front.figures, "save", lambda figure, path: kept.append(figure))
    sweep = manifest(baseline=None, against=SENT)
    assert front.draw(sweep, summarise(sweep, fill().records), tmp_path / "front.png")
    others, points, border = kept[0].axes[0].lines
    assert sorted(zip(*others.get_data(), strict=True)) == [(3.0, 60.0), (9.0, pytest.approx(55))]
    assert [*points.get_xdata()] == [*border.get_xdata()] == [1.0, 2.0, 4.0]
    assert [*points.get_ydata()] == [*border.get_ydata()] == pytest.approx([50, 60, 70])
    assert border.get_drawstyle() == "steps-post"
    assert [text.get_text() for text in kept[0].axes[0].texts] == ["1", "2", "3", "1  rank 1\n2  rank 2\n3  rank 8"]


def test_with_one_objective_nothing_of_it_is_there(manifest, fill, tmp_path):
    sweep = manifest(baseline=None)
    trials = fill()
    table = table_of(sweep, trials)
    assert "efficient" not in table.cells()[0]
    assert "efficient" not in frame.csv(table)
    assert write_report(sweep, trials.records, tmp_path).front is None
    assert not (tmp_path / "front.png").exists()
