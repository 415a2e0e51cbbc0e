"""The t-SNE of arms side by side."""

from dataclasses import replace

import pytest

from fedsweep.report.figures import tsne
from fedsweep.report.statistics import summarise


@pytest.fixture
def panels(drawn):
    """Draws the panels of records and gives the figure, or None where nothing was drawn."""

    def draw(manifest, records):
        return drawn(tsne.draw, manifest, summarise(manifest, records))

    return draw


def titles(figure):
    return [axes.get_title(loc="left").splitlines() for axes in figure.axes]


def test_a_panel_shows_the_first_finished_seed_of_an_arm(panels, manifest, trials, tables):
    trials.add(8, 0, [0.2, 0.3], "pruned")
    trials.add(8, 1, [0.2, 0.6])
    trials.add(8, 2, [0.2, 0.6])
    trials.add(4, 0, [0.2, 0.5])
    trials.add(2, 0, [0.2, 0.5], "failed")
    figure = panels(manifest(), tables(trials.records))
    assert titles(figure) == [["rank 4", "seed 0, silhouette 0.250"], ["rank 8 (baseline)", "seed 1, silhouette 0.250"]]
    assert [len(part.get_offsets()) for part in figure.axes[0].collections] == [3, 3]
    words = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert words == [["cat", "dog", "owl"], ["photo", "sketch"]]


def test_a_seed_without_a_picture_is_passed_over(panels, manifest, trials, tables):
    trials.arms({8: [0.5, 0.6]})
    first, second = tables(trials.records)
    assert titles(panels(manifest(), [replace(first, artifacts={}), second]))[0][1].startswith("seed 1")
    assert panels(manifest(), trials.records) is None


@pytest.mark.parametrize(("mode", "kept"), [("max", [3, 5, 6, 7, 8, 9]), ("min", [1, 2, 3, 4, 5, 6])])
def test_of_many_arms_the_best_and_the_baseline_are_shown(panels, manifest, trials, tables, mode, kept):
    trials.arms({rank: [rank / 10] for rank in range(1, 10)})
    figure = panels(manifest(mode=mode, baseline={"lora.rank": 3}), tables(trials.records))
    assert sorted(int(title[0].split()[1]) for title in titles(figure)) == kept
