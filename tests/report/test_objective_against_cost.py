"""The column, the sentence and the figure of a report with two objectives."""

import csv
import io
from dataclasses import replace

import pytest

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.figures import objective_against_cost
from fedsweep.report.formats import data_frame
from fedsweep.report.table import AblationTable
from fedsweep.results.history import SIMULATED, RoundRecord
from fedsweep.results.pareto import Against
from tests.report.helpers import tabulate

SENT = Against(metric="megabytes/sent", mode="min")
ENDS = {1: (0.5, 1.0), 2: (0.6, 2.0), 4: (0.6, 3.0), 8: (0.7, 4.0), 16: (0.55, 9.0)}
"""Accuracy and MB sent by rank; rank 4 sends more than rank 2 for the same accuracy."""


@pytest.fixture
def fill(trials):
    """Return a function that adds a finished trial per rank and seed, with the values `ends` as means over seeds."""

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


def marked(table):
    return {int(row["lora.rank"]) for row in table.cells() if row["efficient"] == "yes"}


def test_efficient_samples_are_marked_named_and_drawn(manifest, fill, tmp_path):
    sweep = manifest(baseline=None, seeds=(0,), against=SENT)
    trials = fill()
    trials.add(32, 0, [0.2, 0.99], "pruned")
    table = tabulate(sweep, trials)
    assert marked(table) == {1, 2, 8}
    best, caution = table.findings()
    assert best == (
        "Efficient arms by accuracy/mean and megabytes/sent (3 of 5): "
        "rank 1 (50.00%, 1.000 MB); rank 2 (60.00%, 2.000 MB); rank 8 (70.00%, 4.000 MB)."
    )
    assert caution.startswith("These arms were chosen from 6 arms")
    assert any(
        "Second objective: megabytes/sent, summed over all rounds, lower is better." in one for one in table.caption()
    )
    rows = {int(row["lora.rank"]): row["efficient"] for row in csv.DictReader(io.StringIO(data_frame.csv(table)))}
    assert rows == {1: "True", 2: "True", 4: "False", 8: "True", 16: "False", 32: "False"}
    report = write_report(sweep, trials.records, tmp_path)
    assert "front" in [figure.name for figure in report.figures]


def test_arms_of_a_grid_are_compared_by_their_means_over_seeds(manifest, fill):
    table = tabulate(manifest(against=SENT), fill(seeds=(0, 1, 2)))
    assert marked(table) == {1, 2, 8}
    assert table.findings()[-1].startswith("Efficient arms by accuracy/mean and megabytes/sent (3 of 5):")
    assert len(table.findings()) == 5


def test_another_second_objective_has_a_column(manifest, fill):
    """Higher ranks take less time in these trials, so ranks 8 and 16 are efficient."""
    against = Against(metric="seconds/round", mode="min")
    table = tabulate(manifest(baseline=None, against=against), fill())
    assert marked(table) == {8, 16}
    assert {int(row["lora.rank"]): row["seconds/round"] for row in table.cells()}[16] == "0.725"
    assert next(csv.DictReader(io.StringIO(data_frame.csv(table))))["seconds/round"] == "1.35"


def test_the_figure_joins_the_efficient_arms_with_a_stepped_line(manifest, fill, drawn):
    sweep = manifest(baseline=None, against=SENT)
    axes = drawn(objective_against_cost.draw_front, sweep, summarise(sweep, fill().records)).axes[0]
    others, points = (line for line in axes.lines if line.get_marker() == "o")
    (border,) = (line for line in axes.lines if "steps" in line.get_drawstyle())
    assert sorted(zip(*others.get_data(), strict=True)) == [(3.0, 60.0), (9.0, pytest.approx(55))]
    assert [*points.get_xdata()] == [*border.get_xdata()] == [1.0, 2.0, 4.0]
    assert [*points.get_ydata()] == [*border.get_ydata()] == pytest.approx([50, 60, 70])
    assert border.get_drawstyle() == "steps-post"
    named = {text.get_text(): text.xy for text in axes.texts}
    assert {label: x for label, (x, _) in named.items()} == {f"rank {rank}": ENDS[rank][1] for rank in ENDS}


def test_with_many_efficient_arms_the_first_the_last_and_the_baseline_are_named(manifest, fill, drawn):
    ends = {rank: (0.01 * rank, 1.0 + rank) for rank in range(1, 31)} | {31: (0.05, 50.0)}
    sweep = manifest(baseline={"lora.rank": 31}, against=SENT)
    axes = drawn(objective_against_cost.draw_front, sweep, summarise(sweep, fill(ends=ends).records)).axes[0]
    named = [text.get_text() for text in axes.texts]
    assert len(named) == 9
    assert (named[0], named[-2], named[-1]) == ("rank 1", "rank 30", "rank 31 (baseline)")


def test_without_a_second_objective_bytes_are_drawn_with_the_range_of_seeds(manifest, fill, drawn):
    sweep = manifest()
    arms = summarise(sweep, fill(seeds=(0, 1, 2)).records)
    axes = drawn(objective_against_cost.draw_bytes, sweep, arms).axes[0]
    assert axes.get_xlabel() == "Sent in the whole run (MB)"
    ranges = [line for line in axes.lines if line.get_marker() != "o" and line.get_drawstyle() == "default"]
    ups = [line.get_ydata() for line in ranges if len(set(line.get_ydata())) == 2]
    acrosses = [line.get_xdata() for line in ranges if len(set(line.get_xdata())) == 2]
    assert len(ups) == len(acrosses) == 5
    assert all(high - low == pytest.approx(4) for low, high in ups)
    assert all(high - low == pytest.approx(0.2) for low, high in acrosses)
    assert len(axes.texts) == 5


def test_bytes_are_not_drawn_if_they_add_no_information(manifest, fill, drawn, trials):
    for rank in (4, 8):
        trials.add(rank, 0, [0.2, 0.5 + rank / 100])
    assert drawn(objective_against_cost.draw_bytes, manifest(), summarise(manifest(), trials.records)) is None
    many = fill().records
    for sweep in (manifest(against=SENT), manifest(metric="megabytes/sent", mode="min")):
        assert drawn(objective_against_cost.draw_bytes, sweep, summarise(sweep, many)) is None


def timed(records, seconds):
    """Return trials whose only round takes the given simulated seconds, by rank."""
    found = []
    for one in records:
        first, last = one.history
        now = {**last.metrics, SIMULATED: seconds[one.plan.arm["lora.rank"]]}
        found.append(replace(one, history=[first, replace(last, metrics=now)]))
    return found


def test_the_simulated_time_is_drawn_in_hours_if_the_runs_have_devices(manifest, fill, drawn, tmp_path):
    sweep, hours = manifest(baseline=None), {1: 0.5, 2: 1.0, 4: 2.0, 8: 1.5, 16: 3.0}
    records = fill().records
    assert drawn(objective_against_cost.draw_time, sweep, summarise(sweep, records)) is None
    records = timed(records, {rank: 3600 * one for rank, one in hours.items()})
    axes = drawn(objective_against_cost.draw_time, sweep, summarise(sweep, records)).axes[0]
    assert axes.get_xlabel() == "Simulated time of the whole run (hours)"
    assert {text.get_text(): text.xy[0] for text in axes.texts} == {f"rank {one}": hours[one] for one in hours}
    written = write_report(sweep, records, tmp_path).figures
    titles = {one.name: one.title for one in written}
    assert titles["time"] == "Mean accuracy over domains against simulated time"
    assert [*titles][:3] == ["curves", "bytes", "time"]


def test_simulated_time_is_not_drawn_twice_or_if_it_is_equal(manifest, fill, drawn):
    records, against = fill().records, Against(metric=SIMULATED, mode="min")
    alike = timed(records, dict.fromkeys(ENDS, 60.0))
    assert drawn(objective_against_cost.draw_time, manifest(), summarise(manifest(), alike)) is None
    sweep, several = manifest(baseline=None, against=against), timed(records, {rank: 60.0 * rank for rank in ENDS})
    assert drawn(objective_against_cost.draw_time, sweep, summarise(sweep, several)) is None
    table = AblationTable(sweep, summarise(sweep, several))
    assert marked(table) == {1, 2, 8}
    assert "rank 8 (70.00%, 480.0 s)." in table.findings()[0]


def test_bytes_are_not_drawn_if_arms_have_different_test_images(manifest, drawn, trials):
    for rank, held_out in {4: ["photo"], 8: ["sketch"]}.items():
        trials.add(rank, 0, [0.2] + [0.5] * rank, held_out=held_out)
    arms = summarise(manifest(), trials.records)
    assert all(one.n and one.columns["megabytes"] for one in arms)
    assert drawn(objective_against_cost.draw_bytes, manifest(), arms) is None


def test_without_a_second_objective_nothing_is_called_efficient(manifest, fill, drawn):
    sweep = manifest(baseline=None)
    trials = fill()
    table = tabulate(sweep, trials)
    assert "efficient" not in table.cells()[0]
    assert "efficient" not in data_frame.csv(table)
    assert drawn(objective_against_cost.draw_front, sweep, table.arms) is None
