"""The data behind the lines, dots and labels of the figures."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.figures import by_domain, curves
from fedsweep.report.figures.canvas import GREY, colours
from fedsweep.report.figures.curves import apart


@pytest.fixture
def axes_of(drawn):
    """Return a function that draws the curves of trials and returns the axes."""

    def draw(function, manifest, trials):
        return drawn(function, manifest, summarise(manifest, trials.records)).axes[0]

    return draw


def lines(axes):
    """Return the data, the style and the marker of each line on `axes`."""
    return [
        (list(line.get_xdata()), list(line.get_ydata()), line.get_linestyle(), line.get_marker()) for line in axes.lines
    ]


def words(artists):
    return [artist.get_text() for artist in artists]


def test_curves_show_the_mean_from_round_zero_and_the_range_of_seeds(axes_of, manifest, trials):
    trials.add(8, 0, [0.2, 0.4, 0.6])
    trials.add(8, 1, [0.3, 0.4, 0.7])
    axes = axes_of(curves.draw, manifest(), trials)
    ((rounds, means, style, _),) = lines(axes)
    assert rounds == [0, 1, 2]
    assert means == pytest.approx([25, 40, 65])
    assert style == "-"
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((20, 70))
    assert words(axes.get_legend().get_texts()) == ["mean of finished seeds", "lowest to highest seed"]
    assert words(axes.texts) == ["rank 8 (baseline)"]
    assert "(%)" in axes.get_ylabel()


def test_the_mean_is_drawn_only_at_rounds_that_all_seeds_recorded(axes_of, manifest, trials):
    trials.add(8, 0, [0.2, math.nan, 0.6])
    trials.add(8, 1, [0.3, 0.4, 0.7])
    ((rounds, means, _, _),) = lines(axes_of(curves.draw, manifest(), trials))
    assert (rounds, means) == ([0, 2], pytest.approx([25, 65]))


def test_pruned_trials_are_dashed_lines_that_end_in_a_cross(axes_of, manifest, trials):
    trials.arms({8: [0.6, 0.7]})
    trials.add(8, 2, [0.2, 0.1], "pruned")
    axes = axes_of(curves.draw, manifest(), trials)
    whole, pruned = lines(axes)
    assert pruned == ([0, 1], pytest.approx([20, 10]), "--", "x")
    assert axes.lines[1].get_markevery() == [-1]
    assert whole[1][:2] == pytest.approx([20, 30])
    assert axes.lines[0].get_color() == axes.lines[1].get_color()
    assert "pruned trial" in words(axes.get_legend().get_texts())


def test_an_arm_that_did_not_finish_is_named_below_the_others_without_a_leader(axes_of, manifest, trials):
    trials.arms({8: [0.3]})
    trials.add(4, 0, [0.2, 0.9], "pruned")
    axes = axes_of(curves.draw, manifest(), trials)
    heights = {text.get_text(): text.xyann[1] for text in axes.texts[:1]}
    heights |= {text.get_text(): text.get_position()[1] for text in axes.texts[1:]}
    assert [*heights] == ["rank 8 (baseline)", "rank 4"]
    assert heights["rank 4"] < heights["rank 8 (baseline)"]
    assert not hasattr(axes.texts[1], "arrow_patch")
    assert axes.lines[-1].get_marker() == "x"


def test_a_loss_that_diverged_leaves_room_for_the_others(axes_of, manifest, trials):
    trials.add(8, 0, [2.0, 1.5, 1.0], metric="loss/test")
    trials.add(4, 0, [2.0, 2.5, 1e6], "diverged", metric="loss/test")
    low, high = axes_of(curves.draw, manifest(metric="loss/test", mode="min"), trials).get_ylim()
    assert low < 1.0
    assert 2.5 < high < 4


def test_losses_over_several_decades_have_a_logarithmic_axis(axes_of, manifest, trials):
    trials.add(8, 0, [2.0, 1.5, 1.0], metric="loss/test")
    trials.add(4, 0, [2.0, 2.5, 1e6], metric="loss/test")
    assert axes_of(curves.draw, manifest(metric="loss/test", mode="min"), trials).get_yscale() == "log"


def test_with_many_arms_the_best_five_are_coloured_and_named(axes_of, manifest, trials):
    trials.arms({rank: [rank / 100] for rank in range(1, 25)})
    axes = axes_of(curves.draw, manifest(baseline=None), trials)
    coloured = [line for line in axes.lines if line.get_color() != GREY]
    assert len(axes.lines) == 24
    assert sorted(line.get_ydata()[-1] for line in coloured) == pytest.approx([20, 21, 22, 23, 24])
    assert len({line.get_color() for line in coloured}) == 5
    assert sorted(words(axes.texts)) == [f"rank {rank}" for rank in range(20, 25)]


def test_with_many_arms_the_baseline_is_coloured_too(manifest, trials):
    trials.arms({rank: [rank / 100] for rank in range(1, 25)})
    arms = summarise(manifest(baseline={"lora.rank": 3}), trials.records)
    palette = colours(arms, "min")
    assert [place for place, colour in enumerate(palette, 1) if colour != GREY] == [1, 2, 3, 4, 5]
    palette = colours(arms, "max")
    assert [place for place, colour in enumerate(palette, 1) if colour != GREY] == [3, 20, 21, 22, 23, 24]


def test_a_diverged_grey_arm_does_not_flatten_the_others(axes_of, manifest, trials):
    for rank in range(1, 11):
        trials.add(rank, 0, [2.0, 1 / rank if rank > 1 else 1e6], metric="loss/test")
    axes = axes_of(curves.draw, manifest(metric="loss/test", mode="min", baseline=None), trials)
    assert axes.get_ylim()[1] < 3


def test_losses_of_many_arms_without_a_mean_are_grey_lines(axes_of, manifest, trials):
    for rank in range(1, 11):
        trials.add(rank, 0, [2.0, 1 / rank], None, metric="loss/test")
    axes = axes_of(curves.draw, manifest(metric="loss/test", mode="min", baseline=None), trials)
    assert [line.get_color() for line in axes.lines] == [GREY] * 10


def test_domains_show_mean_and_range_in_percent(axes_of, manifest, trials):
    trials.arms({8: [0.6, 0.7], 4: [0.5, 0.5]})
    trials.add(4, 2, [0.2, 0.1], "pruned")
    axes = axes_of(by_domain.draw_dots, manifest(), trials)
    dots = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o" and len(line.get_ydata())]
    assert dots == pytest.approx([60, 40, 75, 55])
    bars = [
        list(line.get_ydata()) for line in axes.lines if line.get_marker() != "o" and len(set(line.get_xdata())) == 1
    ]
    assert bars[2:4] == [pytest.approx([70, 80]), pytest.approx([50, 60])]
    assert words(axes.get_xticklabels()) == ["photo", "sketch"]
    assert words(axes.get_legend().get_texts()) == ["rank 4", "rank 8 (baseline)"]


def test_held_out_domains_have_hollow_dots(axes_of, manifest, trials):
    for rank, held_out in {2: ["photo"], 4: ["sketch"], 8: []}.items():
        trials.add(rank, 0, [0.2, 0.5 + rank / 100], held_out=held_out)
    axes = axes_of(by_domain.draw_dots, manifest(), trials)
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_ydata())]
    assert [line.get_markerfacecolor() != line.get_color() for line in dots] == [True, False, False, True, False, False]
    assert [line.get_ydata()[0] for line in dots] == pytest.approx([62, 42, 64, 44, 68, 48])
    said = "Domain (dot: single finished seed;\nhollow: no client of the arm has images of the domain)"
    assert axes.get_xlabel() == said


def test_grey_arms_are_dotted_on_held_out_domains(axes_of, manifest, trials):
    for rank in range(1, 10):
        trials.add(rank, 0, [0.2, rank / 10], held_out=["sketch"])
    axes = axes_of(by_domain.draw_dots, manifest(baseline=None), trials)
    styles = [line.get_linestyle() for line in axes.lines if line.get_color() == GREY and len(line.get_xdata())]
    assert [style for style in styles if style != "None"] == ["-", ":"] * 4
    assert "hollow or dotted: no client of the arm has images of the domain" in axes.get_xlabel()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted))
def test_labels_keep_their_order_and_distance(heights):
    placed = apart(heights, 0.1)
    assert all(high - low >= 0.1 - 1e-9 for low, high in pairwise(placed))
    # The least-squares solution moves labels in opposite directions, so the mean of their positions stays the same.
    assert sum(placed) == pytest.approx(sum(heights))


def test_labels_that_are_far_apart_do_not_move():
    assert apart([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert apart([0.5, 0.5, 0.9], 0.1) == pytest.approx([0.45, 0.55, 0.9])


def test_importing_the_report_loads_no_heavy_module():
    code = (
        "import sys, fedsweep.report; "
        "print(sorted({'matplotlib', 'ray', 'mlflow', 'torch', 'optuna'} & sys.modules.keys()), 'scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"
