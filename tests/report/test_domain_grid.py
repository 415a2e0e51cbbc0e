"""The numbers and colours in the figure that has a cell per arm and domain."""

import pytest
from matplotlib.colors import to_rgb

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.figures import by_domain


@pytest.fixture
def grid(drawn):
    """Return a function that draws the figure and returns each arm's texts and colours, and the figure itself."""

    def draw(manifest, trials):
        figure = drawn(by_domain.draw_grid, manifest, summarise(manifest, trials.records))
        axes = figure.axes[0]
        labels, across = [text.get_text() for text in axes.get_yticklabels()], len(manifest.domains)
        words = [text.get_text() for text in axes.texts]
        (mesh,) = axes.collections
        colours = [tuple(cell) for cell in mesh.to_rgba(mesh.get_array())[..., :3].reshape(-1, 3)]
        rows = range(len(labels))
        return (
            {labels[row]: words[row * across : (row + 1) * across] for row in rows},
            {labels[row]: colours[row * across : (row + 1) * across] for row in rows},
            figure,
        )

    return draw


def blue_over_red(colour):
    return colour[2] - colour[0]


def test_cells_are_means_over_finished_seeds_without_pruned_arms(grid, manifest, trials):
    trials.arms({4: [0.5, 0.6], 8: [0.6, 0.7]})
    trials.add(4, 2, [0.1, 0.1], "pruned")
    trials.add(2, 0, [0.9, 0.9], "pruned")
    words, _, _ = grid(manifest(), trials)
    assert words == {"rank 4": ["65.0", "45.0"], "rank 8 (baseline)": ["75.0", "55.0"]}


def test_colours_are_centred_on_the_baseline(grid, manifest, trials):
    trials.arms({2: [0.7], 4: [0.5], 8: [0.6]})
    _, colours, figure = grid(manifest(), trials)
    assert colours["rank 8 (baseline)"] == [pytest.approx(to_rgb(by_domain.SAME), abs=0.01)] * 2
    assert colours["rank 2"] == [pytest.approx(to_rgb(by_domain.BETTER))] * 2
    assert colours["rank 4"] == [pytest.approx(to_rgb(by_domain.WORSE))] * 2
    assert figure.axes[1].get_ylim() == pytest.approx((-10, 10))
    assert figure.axes[1].get_ylabel() == "Difference (points)"


def test_small_differences_have_pale_colours(grid, manifest, trials):
    trials.arms({4: [0.6001], 8: [0.6]})
    _, colours, figure = grid(manifest(), trials)
    assert figure.axes[1].get_ylim() == pytest.approx((-by_domain.LEAST, by_domain.LEAST))
    assert colours["rank 4"][0] == pytest.approx(to_rgb(by_domain.SAME), abs=0.05)


def test_colours_are_differences_over_common_seeds(grid, manifest, trials):
    # Over its own seeds, rank 4 has the higher mean; on the common seed, it has the lower value.
    trials.add(4, 0, [0.2, 0.5])
    trials.add(4, 1, [0.2, 0.9])
    trials.add(8, 0, [0.2, 0.6])
    words, colours, _ = grid(manifest(), trials)
    assert words["rank 4"][0] == "80.0"
    assert blue_over_red(colours["rank 4"][0]) < -0.5


def test_without_a_baseline_colours_show_the_accuracy(grid, manifest, trials):
    trials.arms({4: [0.5], 8: [0.6]})
    _, colours, figure = grid(manifest(baseline=None), trials)
    assert figure.axes[1].get_ylim() == pytest.approx((40, 70))
    assert colours["rank 8"][0] == pytest.approx(to_rgb(by_domain.HIGH))
    assert colours["rank 4"][1] == pytest.approx(to_rgb(by_domain.LOW), abs=0.01)


def test_held_out_domains_are_marked_and_not_compared_on_different_images(grid, manifest, trials):
    trials.add(8, 0, [0.2, 0.6])
    trials.add(4, 0, [0.2, 0.5], held_out=["photo"])
    words, colours, _ = grid(manifest(), trials)
    assert words["rank 4"] == ["60.0*", "40.0"]
    assert colours["rank 4"][0] == to_rgb("white")
    assert blue_over_red(colours["rank 4"][1]) < -0.5


@pytest.mark.parametrize("mode", ["max", "min"])
def test_with_many_arms_the_best_and_the_baseline_are_shown(grid, manifest, trials, mode):
    trials.arms({rank: [rank / 100] for rank in range(1, 61)})
    words, _, _ = grid(manifest(mode=mode, baseline={"lora.rank": 30}), trials)
    assert len(words) == by_domain.MOST
    best = range(1, 40) if mode == "min" else range(22, 61)
    assert {f"rank {rank}{' (baseline)' * (rank == 30)}" for rank in best} <= words.keys()


@pytest.mark.parametrize("colour", [by_domain.WORSE, by_domain.BETTER, by_domain.SAME, by_domain.LOW, by_domain.HIGH])
def test_numbers_have_enough_contrast_with_their_cells(colour):
    def luminance(name):
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(name)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted([luminance(colour), luminance(by_domain._readable(to_rgb(colour)))])
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, 1.4.3


def test_without_a_finished_trial_there_is_no_grid(drawn, manifest, trials):
    trials.add(8, 0, [0.2, 0.3], "pruned")
    assert drawn(by_domain.draw_grid, manifest(), summarise(manifest(), trials.records)) is None
