"""The forest plot, which shows the paired differences of the table with their intervals."""

import pytest

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.figures import forest


@pytest.fixture
def axes_of(drawn):
    """Return a function that draws the forest plot of trials, and returns its axes and the arms."""

    def draw(manifest, trials):
        arms = summarise(manifest, trials.records)
        return drawn(forest.draw, manifest, arms).axes[0], arms

    return draw


def big_dots(axes):
    return [line for line in axes.lines if line.get_marker() == "o" and line.get_markersize() == 7]


def test_each_row_shows_the_difference_the_interval_and_the_seeds(axes_of, manifest, trials):
    trials.arms({4: [0.50, 0.55, 0.52], 8: [0.60, 0.62, 0.64], 16: [0.90, 0.91, 0.94]})
    trials.add(32, 0, [0.2, 0.3], "pruned")
    axes, arms = axes_of(manifest(), trials)
    compared = [one.comparison for one in arms if one.comparison is not None and one.n]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 4", "rank 16"]
    assert [line.get_xdata()[0] for line in big_dots(axes)] == pytest.approx([100 * one.difference for one in compared])
    bars = [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1.8]
    assert bars == [pytest.approx([100 * end for end in one.interval]) for one in compared]
    seeds = [sorted(line.get_xdata()) for line in axes.lines if line.get_markersize() == 3]
    assert seeds == [pytest.approx([-12, -10, -7]), pytest.approx([29, 30, 30])]
    assert "difference from\nrank 8 (percentage points, higher is better)" in axes.get_xlabel()


def test_only_significant_differences_are_filled_and_the_numbers_are_those_of_the_table(axes_of, manifest, trials):
    trials.arms({4: [0.50, 0.501, 0.502], 8: [0.60, 0.60, 0.60], 16: [0.58, 0.62, 0.61]})
    axes, arms = axes_of(manifest(), trials)
    assert [one.comparison.verdict for one in arms if one.comparison] == ["lower", "no detectable difference"]
    assert [line.get_markerfacecolor() != "white" for line in big_dots(axes)] == [True, False]
    words = [text.get_text() for text in axes.texts]
    assert words[:3] == ["difference", "95% interval", "Holm p"]
    assert words[3:6] == ["-9.90", "-10.15 to -9.65", "<0.001"]


def test_an_interval_that_is_much_longer_than_the_others_is_cut_off_and_marked(axes_of, manifest, trials):
    trials.arms({rank: [0.6 + rank / 1e4, 0.601, 0.602] for rank in (1, 2, 3, 4, 8)})
    trials.arms({16: [0.1, 0.9, 0.2]})
    axes, arms = axes_of(manifest(), trials)
    (widest,) = (one.comparison.interval for one in arms if one.arm.values["lora.rank"] == 16)
    low, high = axes.get_xlim()
    assert 100 * widest[0] < low < 0 < high < 100 * widest[1]
    assert {line.get_marker() for line in axes.lines} >= {"<", ">"}


def test_a_row_beyond_one_end_of_the_axis_has_an_arrow_at_this_end_only(axes_of, manifest, trials):
    trials.arms({rank: [0.6 + rank / 1e4, 0.601, 0.602] for rank in (1, 2, 3, 4, 8)})
    trials.arms({16: [0.1, 0.101, 0.1]})
    axes, _ = axes_of(manifest(), trials)
    assert [line.get_marker() for line in axes.lines if line.get_marker() in ("<", ">")] == ["<"]


def test_an_arrow_at_the_left_end_touches_no_label(axes_of, manifest, trials):
    trials.arms({rank: [0.6 + rank / 1e4, 0.601, 0.602] for rank in (1, 2, 3, 4, 8)})
    trials.arms({16: [0.1, 0.101, 0.1]})
    axes, _ = axes_of(manifest(), trials)
    axes.figure.canvas.draw()
    (arrow,) = (line for line in axes.lines if line.get_marker() == "<")
    left = axes.transData.transform(arrow.get_xydata())[0][0] - arrow.get_markersize() * axes.figure.dpi / 144
    assert max(label.get_window_extent().x1 for label in axes.get_yticklabels()) < left - 3 * axes.figure.dpi / 72


def test_a_row_without_an_interval_beyond_the_axis_has_an_arrow(axes_of, manifest, trials):
    trials.arms({rank: [0.6 + rank / 1e4] for rank in (1, 2, 3, 4, 8)})
    trials.arms({16: [0.9]})
    axes, _ = axes_of(manifest(), trials)
    assert [line.get_marker() for line in axes.lines if line.get_marker() in ("<", ">")] == [">"]


def test_arms_with_one_common_seed_have_a_dot_without_an_interval(axes_of, manifest, trials):
    trials.arms({4: [0.5], 8: [0.6]})
    axes, _ = axes_of(manifest(), trials)
    assert len(big_dots(axes)) == 1
    assert not [line for line in axes.lines if line.get_linewidth() == 1.8]


@pytest.mark.parametrize("baseline", [None, {"lora.rank": 8}])
def test_without_a_difference_there_is_no_forest_plot(drawn, manifest, trials, baseline):
    trials.arms({8: [0.6, 0.7]} if baseline else {4: [0.5, 0.6], 8: [0.6, 0.7]})
    sweep = manifest(baseline=baseline)
    assert drawn(forest.draw, sweep, summarise(sweep, trials.records)) is None


def test_rows_of_several_baselines_name_no_single_one(axes_of, manifest, trials):
    for rank in (4, 8):
        for rate in (0.1, 0.2):
            for seed in range(2):
                trials.add({"lora.rank": rank, "optimizer.lr": rate}, seed, [0.2, 0.5 + rank / 100 + seed * rate / 10])
    axes, _ = axes_of(manifest(varied=("lora.rank", "optimizer.lr")), trials)
    assert "the arm's baseline" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 4, lr 0.1", "rank 4, lr 0.2"]
