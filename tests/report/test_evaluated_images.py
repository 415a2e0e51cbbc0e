"""The legend and the curves of sweeps in which not every round is evaluated, or not on all test images."""

from dataclasses import replace

import pytest

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.figures import curves
from fedsweep.report.table import AblationTable
from fedsweep.results.history import TESTED, mean_of_last


@pytest.fixture
def finished(trials):
    """Return six finished trials, three of each rank."""
    return trials.arms({4: [0.5, 0.52, 0.49], 8: [0.6, 0.62, 0.59]}).records


def measured(trials, images: dict[int, int]):
    """Return the trials with the number of test images in each round; other rounds have no accuracies."""
    return [
        replace(
            trial,
            history=[
                replace(record, metrics={**record.metrics, TESTED: float(images[record.round])})
                if record.round in images
                else replace(record, metrics={"loss/train": 1.0})
                for record in trial.history
            ],
        )
        for trial in trials
    ]


def caption(manifest, trials) -> str:
    return "\n".join(AblationTable(manifest, summarise(manifest, trials)).caption())


def test_the_legend_says_on_which_images_the_values_were_measured(manifest, finished):
    plain = caption(manifest(), measured(finished, dict.fromkeys(range(5), 600)))
    assert "test images" not in plain
    some = caption(manifest(), measured(finished, {0: 600, 1: 60, 2: 60, 3: 60, 4: 600}))
    assert "evaluated on all 600 test images, and the rounds between on 60 of them." in some
    assert "Not every round" not in some
    sparse = caption(manifest(), measured(finished, {0: 600, 2: 60, 4: 600}))
    assert "and the rounds between on 60 of them. Not every round is evaluated." in sparse
    assert "Not every round is evaluated." in caption(manifest(), measured(finished, {0: 600, 4: 600}))
    assert caption(manifest(), finished) == plain


def test_arms_with_other_domains_are_not_taken_for_smaller_sets(manifest, trials):
    trials.arms({4: [0.5], 8: [0.6]})
    first = measured(trials.records[:1], dict.fromkeys(range(5), 2160))
    other = measured(trials.records[1:], dict.fromkeys(range(5), 1440))
    other = [replace(one, outcome=None, history=one.history[:3]) for one in other]
    assert "test images" not in caption(manifest(), [*first, *other])


def test_the_legend_says_that_pruned_trials_were_measured_on_the_smaller_set(manifest, trials):
    trials.arms({8: [0.6]})
    trials.add(4, 0, [0.2, 0.3], "pruned")
    told = caption(manifest(), measured(trials.records, {0: 600, 1: 60, 2: 60, 3: 60, 4: 600}))
    assert "on 60 of them. The values of pruned trials come from the smaller set." in told


@pytest.mark.parametrize(("rounds", "marked"), [([0, 1, 2, 3, 4], False), ([0, 2, 4], True), ([0, 4], True)])
def test_a_curve_marks_its_evaluated_rounds_unless_all_are(manifest, finished, drawn, rounds, marked):
    trials = measured(finished, dict.fromkeys(rounds, 600))
    figure = drawn(curves.draw, manifest(), summarise(manifest(), trials))
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 1]
    assert lines
    for line in lines:
        assert list(line.get_xdata()) == rounds
        assert (line.get_marker() == ".") == marked


def test_the_mean_of_the_last_rounds_counts_only_evaluated_rounds(finished):
    (trial, *_) = measured(finished, {0: 600, 2: 600, 4: 600})
    values = {record.round: record.metrics.get("accuracy/mean") for record in trial.history}
    assert mean_of_last(trial.history, "accuracy/mean") == pytest.approx((values[2] + values[4]) / 2)
