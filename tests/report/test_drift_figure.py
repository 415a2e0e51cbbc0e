"""Small panels of drift and structural bias, and bars of importance."""

from dataclasses import replace

import pytest

from fedsweep.report.effects import Effects
from fedsweep.report.figures import drift, importance
from fedsweep.report.importance import Share
from fedsweep.report.statistics import summarise
from fedsweep.report.wording import PERCENT
from fedsweep.training.drift import DRIFT_METRICS
from fedsweep.training.structural_bias import bias_metrics


def test_every_metric_that_can_be_asked_for_has_a_panel():
    assert {*drift.PANELS} == {*DRIFT_METRICS, *bias_metrics(stand_ins=True)}


def test_what_finished_trials_recorded_is_drawn_by_round(drawn, manifest, trials):
    trials.arms({4: [0.5, 0.6], 8: [0.6, 0.7]})
    trials.add(2, 0, [0.2, 0.2], "pruned")
    for place, one in enumerate(trials.records):
        drifted = [{"drift/head": 0.1 * (place + record.round)} if record.round else {} for record in one.history]
        pairs = zip(one.history, drifted, strict=True)
        history = [replace(record, metrics={**record.metrics, **more}) for record, more in pairs]
        trials.records[place] = replace(one, history=history)
    figure = drawn(drift.draw, manifest(), summarise(manifest(), trials.records))
    (axes,) = figure.axes
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    four, eight = [0.15, 0.25, 0.35, 0.45], [0.35, 0.45, 0.55, 0.65]
    assert found == [([1, 2, 3, 4], pytest.approx(four)), ([1, 2, 3, 4], pytest.approx(eight))]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 4", "rank 8 (baseline)"]


def test_without_such_a_metric_there_is_none(drawn, manifest, trials):
    trials.arms({8: [0.6]})
    assert drawn(drift.draw, manifest(), summarise(manifest(), trials.records)) is None


def test_bars_are_the_largest_shares_first_with_their_intervals(drawn, manifest):
    shares = (Share("lr", 0.2), Share("rank", 0.5, 0.4, 0.7), Share("rank, lr", 0.0, 0.0, 0.1))
    (axes,) = drawn(importance.draw, Effects(manifest(), PERCENT, importances=shares)).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank", "lr", "rank, lr"]
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([50, 20, 0])
    assert [list(line.get_xdata()) for line in axes.lines] == [pytest.approx([40, 70]), pytest.approx([0, 10])]
    assert [text.get_text() for text in axes.texts] == ["50.0%", "20.0%", "0.0%"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
