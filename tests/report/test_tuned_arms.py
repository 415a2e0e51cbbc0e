"""The tables of arms tuned one by one, and the curve of the best value against the number of samples."""

import math
from itertools import pairwise

import numpy as np
import pytest

from fedsweep.report import write_report
from fedsweep.report.figures import tuning
from fedsweep.report.formats.data_frame import data_frame
from fedsweep.results.tuned_arms import STAGE
from tests.report.helpers import printed, rows_of, tabulate

METRIC = "validation/accuracy/mean"
DRAWN = [{"optimizer.lr": 0.02}, {"optimizer.lr": 0.3}]
RATES = (0.1, 0.02, 0.3)


def stage(name, **changes):
    own = {"name": name, "names": ["optimizer.lr"], "drawn": DRAWN, "sweep": "20260101-t1", **changes}
    return {STAGE: own}


def chosen(rank, sample):
    values = {} if sample is None else {"optimizer.lr": RATES[sample]}
    return {"arm": {"lora.rank": rank}, "sample": sample, "values": values, "score": None, "tried": 3}


def tuning_sweep(manifest, trials, values, **changes):
    for rank, several in values.items():
        for rate, value in zip(RATES, several, strict=True):
            how = "finished" if value is not None else "failed"
            trials.add({"lora.rank": rank, "optimizer.lr": rate}, 1000, [0.2, value or 0.0], how, metric=METRIC)
    varied = {"varied": ("lora.rank", "optimizer.lr"), "baseline": None, "seeds": (1000,), "metric": METRIC}
    return tabulate(manifest, trials, options=stage("tuning", sweep=None), rounds=1, **{**varied, **changes})


def test_a_table_of_tuned_arms_shows_the_chosen_values_and_compares_the_same_arms(manifest, trials):
    trials.arms({4: (0.6, 0.7, 0.65), 8: (0.5, 0.6, 0.52)})
    plain = tabulate(manifest, trials)
    options = stage("tuned", chosen=[chosen(4, 2), chosen(8, 1)])
    table = tabulate(manifest, trials, options=options, name="ablations/lora_rank/tuned")
    head, _, *rows = rows_of(table.markdown())
    assert head[:3] == ["lora.rank", "optimizer.lr", "n"]
    assert [row[:3] for row in rows] == [["4", "0.3", "3"], ["8", "0.02", "3"]]
    assert [row[3:] for row in rows] == [row[2:] for row in rows_of(plain.markdown())[2:]]
    assert list(data_frame(table)["optimizer.lr"]) == [0.3, 0.02]
    said = " ".join(table.caption())
    best = "Each arm, including the baseline, has the value of optimizer.lr that was best among 3 samples on the"
    assert f"{best} validation images (sweep 20260101-t1)." in said
    assert "In the sweep ablations/lora_rank, the same arms run without tuning." in said
    assert best in " ".join(printed(table).split())
    fewer = stage("tuned", chosen=[chosen(4, 2), {**chosen(8, 1), "tried": 2}])
    assert "best among up to 3 samples" in " ".join(tabulate(manifest, trials, options=fewer).caption())


def test_the_legends_say_what_the_arms_of_each_linked_sweep_are(manifest, trials):
    trials.arms({4: (0.6, 0.7, 0.65), 8: (0.5, 0.6, 0.52)})
    common = " ".join(tabulate(manifest, trials, options=stage("common")).caption())
    assert "All arms run without tuning of optimizer.lr." in common


def test_the_legend_of_a_tuning_sweep_states_the_number_of_samples(manifest, trials):
    table = tuning_sweep(manifest, trials, {4: (0.5, 0.6, 0.4), 8: (0.5, None, 0.7)})
    assert "Every arm tries 3 samples of optimizer.lr with one seed: its untuned value" in " ".join(table.caption())
    drawn = stage("tuning", sweep=None, drawn=[*DRAWN, {"optimizer.lr": 0.1}])
    again = tabulate(table.manifest.model_copy(update={"options": drawn}), trials)
    assert "Every arm tries up to 4 samples of optimizer.lr" in " ".join(again.caption())
    more = tabulate(table.manifest.model_copy(update={"seeds": (1000, 1001)}), trials)
    assert "Every arm tries 3 samples of optimizer.lr with 2 seeds: its untuned value" in " ".join(more.caption())


def test_an_arm_without_a_finished_sample_is_named(manifest, trials):
    trials.arms({4: (0.6, 0.7), 8: (0.5, 0.6)})
    options = stage("tuned", chosen=[chosen(4, None), chosen(8, 0)])
    said = " ".join(tabulate(manifest, trials, options=options).caption())
    assert "No sample has finished, so the arm has its untuned value: rank 4." in said
    whole = stage("tuned", chosen=[chosen(4, 1), chosen(8, 0)])
    assert "No sample" not in " ".join(tabulate(manifest, trials, options=whole).caption())


def test_the_test_images_of_samples_stay_out_of_sight(manifest, trials, tmp_path):
    table = tuning_sweep(manifest, trials, {4: (0.5, 0.6, 0.4), 8: (0.5, None, 0.7)})
    assert table.on_test == {}
    assert not any("test images" in one for one in table.findings())
    report = write_report(table.manifest, trials.records, tmp_path / "report")
    assert {"tuning", "curves"} <= {one.name for one in report.figures}
    assert not {"domains", "heatmap"} & {one.name for one in report.figures}


def test_the_figure_has_one_panel_per_arm(manifest, trials, drawn):
    table = tuning_sweep(manifest, trials, {4: (0.5, 0.6, 0.4), 8: (0.5, None, 0.7), 16: (None, None, 0.3)})
    figure = drawn(tuning.draw, table.manifest, table.arms)
    assert [axes.get_title() for axes in figure.axes] == ["rank 4", "rank 8"]  # rank 16 has a single finished sample
    best, points = figure.axes[1].lines[1:3]
    assert (list(best.get_xdata()), list(best.get_ydata())) == ([1, 2, 3], pytest.approx([50.0, 50.0, 70.0]))
    assert list(points.get_xdata()) == [1, 3]
    assert "80% confidence" in tuning.draw(table.manifest, table.arms).reading
    others = tabulate(manifest, trials)
    assert drawn(tuning.draw, others.manifest, others.arms) is None


def test_a_sample_far_below_all_others_does_not_stretch_the_panels(manifest, trials, drawn):
    table = tuning_sweep(manifest, trials, {4: (0.70, 0.71, 0.10), 8: (0.72, 0.73, 0.69)})
    first, second = drawn(tuning.draw, table.manifest, table.arms).axes
    assert first.get_ylim() == second.get_ylim() == pytest.approx((68.68, 73.32))
    assert [list(line.get_xdata()) for line in first.lines[2:]] == [[1, 2], [3]]
    assert [list(line.get_xdata()) for line in second.lines[2:]] == [[1, 2, 3]]
    assert "Triangles" in tuning.draw(table.manifest, table.arms).reading


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("values", [[0.1] * 14 + [0.68, 0.72], [0.7] * 6 + [0.704, 0.71, 0.69], [0.5] * 4])
def test_the_best_samples_and_the_curves_are_always_in_the_panel(values, sign):
    known = {place: sign * value for place, value in enumerate(values)}
    mode = "max" if sign == 1 else "min"
    so_far = tuning._best_so_far(known, len(values), mode)
    curve = tuning.tuning_curve(known[0], [*known.values()][1:], mode, bounded=False)
    low, high = tuning._ends([tuning._Panel({}, known, so_far, curve)], 100.0, mode)
    assert low < 100 * min(known.values()) <= 100 * max(known.values()) < high
    assert low < 100 * min(so_far.values()) <= 100 * max(so_far.values()) < high


def test_the_reading_explains_triangles_only_if_there_are_any(manifest, trials):
    table = tuning_sweep(manifest, trials, {4: (0.70, 0.71, 0.68), 8: (0.72, 0.73, 0.69)})
    assert "Triangles" not in tuning.draw(table.manifest, table.arms).reading


def test_the_figure_begins_with_the_untuned_value_even_if_it_was_also_drawn(manifest, trials, drawn):
    table = tuning_sweep(manifest, trials, {4: (0.5, 0.6, 0.4)})
    again = stage("tuning", sweep=None, drawn=[{"optimizer.lr": one} for one in (0.02, 0.1, 0.3)])
    table = tabulate(table.manifest.model_copy(update={"options": again}), trials)
    (panel,) = drawn(tuning.draw, table.manifest, table.arms).axes
    curve, best, points = panel.lines[:3]
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([1, 2, 3], pytest.approx([50.0, 60.0, 40.0]))
    assert list(best.get_xdata()) == list(curve.get_xdata()) == [1, 2, 3]


@pytest.mark.parametrize("bounded", [True, False])
def test_the_curve_begins_with_the_untuned_value_and_never_gets_worse(bounded):
    values = [0.3, 0.9, None, 0.5, 0.1]
    curve = tuning.tuning_curve(0.4, values, "max", bounded)
    assert curve.lower[0] == curve.median[0] == curve.upper[0] == 0.4
    assert curve.median[1] == 0.4  # the median of the draws is 0.3
    for side in curve:
        assert len(side) == 6
        assert all(one <= other for one, other in pairwise(side))
    assert all(low <= middle <= high for low, middle, high in zip(curve.lower, curve.median, curve.upper, strict=True))
    mirrored = tuning.tuning_curve(0.6, [None if one is None else 1 - one for one in values], "min", bounded)
    assert [1 - one for one in mirrored.median] == pytest.approx(curve.median)
    assert [1 - one for one in mirrored.upper] == pytest.approx(curve.lower)


@pytest.mark.parametrize("power", [1.0, 6.0, 0.2])
def test_the_band_covers_the_true_curve_whatever_the_distribution(power):
    generator, repeats, number = np.random.default_rng(0), 400, 7
    # The best of k draws of U**power has the median 0.5**(power / k).
    true = [0.05, *(max(0.05, 0.5 ** (power / k)) for k in range(1, number + 1))]
    covered = 0
    for _ in range(repeats):
        curve = tuning.tuning_curve(0.05, list(generator.random(number) ** power), "max", bounded=True)
        covered += all(low <= one <= high for low, one, high in zip(curve.lower, true, curve.upper, strict=True))
    error = math.sqrt(0.8 * 0.2 / repeats)
    assert covered / repeats >= 0.8 - 3 * error


def test_more_samples_make_the_band_narrower():
    generator = np.random.default_rng(0)
    few, many = (tuning.tuning_curve(0.0, list(generator.random(n)), "max", True) for n in (7, 60))
    assert all(many.lower[k] > few.lower[k] for k in (2, 4, 7))
    assert many.upper[2] < few.upper[2]
