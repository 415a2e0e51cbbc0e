"""Active blocks of clients by round, as a figure."""

from dataclasses import replace

import pytest

from fedsweep.report.figures import activation
from fedsweep.report.statistics import summarise


def test_cells_are_means_over_finished_seeds_at_rounds_that_all_have(drawn, manifest, trials):
    trials.arms({4: [0.5], 8: [0.6, 0.7]})
    trials.add(8, 2, [0.2, 0.3], "pruned")
    for place, one in enumerate(trials.records):
        history = [
            replace(record, metrics={**record.metrics, "sal/active/client 0": place, "sal/active/client 1": 6.0})
            for record in one.history
        ]
        trials.records[place] = replace(one, history=history[: 5 - place])
    shorter = [replace(one, outcome=replace_round(one)) for one in trials.records]
    figure = drawn(activation.draw, manifest(), summarise(manifest(), shorter))
    first, second, _ = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["rank 4", "rank 8 (baseline)"]
    assert first.images[0].get_array().tolist() == [[0.0] * 5, [6.0] * 5]
    assert second.images[0].get_array().tolist() == [pytest.approx([1.5] * 3), pytest.approx([6.0] * 3)]
    assert [text.get_text() for text in second.get_yticklabels()] == ["client 0", "client 1"]


def replace_round(one):
    return one.outcome.model_copy(update={"round": one.last_round})


def test_without_such_a_metric_there_is_none(drawn, manifest, trials):
    trials.arms({8: [0.6]})
    assert drawn(activation.draw, manifest(), summarise(manifest(), trials.records)) is None
