"""The panels of drift, structural bias, active blocks and t-SNE, and the bars of importance."""

from dataclasses import replace

import pytest

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.effects import Effects
from fedsweep.report.figures import importance, panels
from fedsweep.report.figures.canvas import heading_of
from fedsweep.report.importance import Share
from fedsweep.report.units_and_labels import title
from fedsweep.results.table_columns import column
from fedsweep.training.drift_and_structural_bias import DRIFT_METRICS, bias_metrics


def test_every_optional_metric_has_a_panel():
    assert {*panels.DRIFT_PANELS} == {*DRIFT_METRICS, *bias_metrics(stand_ins=True)}


def test_drift_of_finished_trials_is_drawn_by_round(drawn, manifest, trials):
    trials.arms({4: [0.5, 0.6], 8: [0.6, 0.7]})
    trials.add(2, 0, [0.2, 0.2], "pruned")
    for place, one in enumerate(trials.records):
        drifted = [{"drift/head": 0.1 * (place + record.round)} if record.round else {} for record in one.history]
        pairs = zip(one.history, drifted, strict=True)
        history = [replace(record, metrics={**record.metrics, **more}) for record, more in pairs]
        trials.records[place] = replace(one, history=history)
    figure = drawn(panels.draw_drift, manifest(), summarise(manifest(), trials.records))
    (axes,) = figure.axes
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    four, eight = [0.15, 0.25, 0.35, 0.45], [0.35, 0.45, 0.55, 0.65]
    assert found == [([1, 2, 3, 4], pytest.approx(four)), ([1, 2, 3, 4], pytest.approx(eight))]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 4", "rank 8 (baseline)"]


@pytest.mark.parametrize(
    ("metric", "explained"), [("drift/head", False), *((name, True) for name in panels.DRIFT_PANELS if "brick" in name)]
)
def test_a_brick_is_explained_if_a_panel_shows_one(manifest, trials, metric, explained):
    trials.arms({8: [0.6]})
    (trial,) = trials.records
    history = [replace(record, metrics={**record.metrics, metric: 0.1}) for record in trial.history]
    drawing = panels.draw_drift(manifest(), summarise(manifest(), [replace(trial, history=history)]))
    assert ("A BRICK is a small module" in drawing.reading) is explained


def test_the_metrics_of_plugins_are_drawn_with_the_titles_of_the_manifest(drawn, manifest, trials):
    trials.arms({4: [0.5], 8: [0.6]})
    for place, one in enumerate(trials.records):
        history = [replace(record, metrics={**record.metrics, "step/head": 0.5}) for record in one.history]
        trials.records[place] = replace(one, history=history)
    titles = {"step/head": "Step of the head (L2 norm)", "step/tail": "Step of the tail"}
    given = manifest(titles=titles, metric="step/head")
    (axes,) = drawn(panels.draw_metrics, given, summarise(given, trials.records)).axes
    assert axes.get_title(loc="left") == "Step of the head\n(L2 norm)"
    assert {value for line in axes.lines for value in line.get_ydata()} == {0.5}
    assert drawn(panels.draw_metrics, manifest(), summarise(manifest(), trials.records)) is None
    assert title("step/head", titles) == "Step of the head (L2 norm)"
    assert heading_of("step/head", titles) == "Step of the head"
    assert title("step/head") == "step/head"
    assert column("step/head", "accuracy/mean", "max", titles).meaning == (
        "Step of the head (L2 norm), after the last round"
    )


@pytest.mark.parametrize("draw", [panels.draw_drift, panels.draw_active_blocks, panels.draw_metrics])
def test_without_recorded_metrics_nothing_is_drawn(drawn, manifest, trials, draw):
    trials.arms({8: [0.6]})
    assert drawn(draw, manifest(), summarise(manifest(), trials.records)) is None


def test_bars_are_sorted_by_share_and_show_their_ranges(drawn, manifest):
    shares = (Share("lr", 0.2), Share("rank", 0.5, (0.4, 0.7)), Share("rank, lr", 0.0, (0.0, 0.1)))
    (axes,) = drawn(importance.draw, Effects(shares)).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank", "lr", "rank, lr"]
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([50, 20, 0])
    assert [list(line.get_xdata()) for line in axes.lines] == [pytest.approx([40, 70]), pytest.approx([0, 10])]
    assert [text.get_text() for text in axes.texts] == ["50.0%", "20.0%", "0.0%"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_active_blocks_are_means_over_finished_seeds_at_common_rounds(drawn, manifest, trials):
    trials.arms({4: [0.5], 8: [0.6, 0.7]})
    trials.add(8, 2, [0.2, 0.3], "pruned")
    for place, one in enumerate(trials.records):
        history = [
            replace(record, metrics={**record.metrics, "sal/active/client 0": place, "sal/active/client 1": 6.0})
            for record in one.history
        ]
        trials.records[place] = replace(one, history=history[: 5 - place])
    shorter = [replace(one, outcome=replace_round(one)) for one in trials.records]
    figure = drawn(panels.draw_active_blocks, manifest(), summarise(manifest(), shorter))
    first, second, _ = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["rank 4", "rank 8 (baseline)"]
    assert first.images[0].get_array().tolist() == [[0.0] * 5, [6.0] * 5]
    assert second.images[0].get_array().tolist() == [pytest.approx([1.5] * 3), pytest.approx([6.0] * 3)]
    assert [text.get_text() for text in second.get_yticklabels()] == ["client 0", "client 1"]


def replace_round(one):
    return one.outcome.model_copy(update={"round": one.last_round})


@pytest.fixture
def tsne(drawn):
    """Return a function that draws the t-SNE panels of trials and returns the figure, or None if it is empty."""

    def draw(manifest, records):
        return drawn(panels.draw_tsne, manifest, summarise(manifest, records))

    return draw


def titles(figure):
    return [axes.get_title(loc="left").splitlines() for axes in figure.axes]


def test_a_panel_shows_the_first_finished_seed_of_an_arm(tsne, manifest, trials, tables):
    trials.add(8, 0, [0.2, 0.3], "pruned")
    trials.add(8, 1, [0.2, 0.6])
    trials.add(8, 2, [0.2, 0.6])
    trials.add(4, 0, [0.2, 0.5])
    trials.add(2, 0, [0.2, 0.5], "failed")
    figure = tsne(manifest(), tables(trials.records))
    assert titles(figure) == [["rank 4", "seed 0, silhouette 0.250"], ["rank 8 (baseline)", "seed 1, silhouette 0.250"]]
    assert [len(part.get_offsets()) for part in figure.axes[0].collections] == [3, 3]
    words = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert words == [["cat", "dog", "owl"], ["photo", "sketch"]]


def test_seeds_without_a_t_sne_are_skipped(tsne, manifest, trials, tables):
    trials.arms({8: [0.5, 0.6]})
    first, second = tables(trials.records)
    assert titles(tsne(manifest(), [replace(first, artifacts={}), second]))[0][1].startswith("seed 1")
    assert tsne(manifest(), trials.records) is None


@pytest.mark.parametrize(("mode", "kept"), [("max", [3, 5, 6, 7, 8, 9]), ("min", [1, 2, 3, 4, 5, 6])])
def test_with_many_arms_the_best_and_the_baseline_are_shown(tsne, manifest, trials, tables, mode, kept):
    trials.arms({rank: [rank / 10] for rank in range(1, 10)})
    figure = tsne(manifest(mode=mode, baseline={"lora.rank": 3}), tables(trials.records))
    assert sorted(int(title[0].split()[1]) for title in titles(figure)) == kept
