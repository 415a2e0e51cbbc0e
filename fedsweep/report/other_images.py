"""Intervals of differences between arms that also hold for other test images, not only for other seeds.

The interval over seeds treats the test images as fixed. Here, seeds and groups of images are two crossed random
effects: every seed predicts every image, and both are samples of larger populations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from fedsweep.report.holm_corrected_tests import ROUNDING, Comparison
from fedsweep.report.intervals_and_power import LEVEL, Interval, half_width
from fedsweep.results import TrialRecord
from fedsweep.results.folders import read_right
from fedsweep.results.history import LAST_ROUNDS, LAST_ROUNDS_LOSS, MEAN_ACCURACY, TEST_LOSS, VALIDATION
from fedsweep.results.right_images import RightImages, numbered

if TYPE_CHECKING:
    from fedsweep.report.arm_statistics import ArmStatistics

Finished = Mapping[int, TrialRecord]
"""The finished trials of an arm, by seed."""
MEANS = {MEAN_ACCURACY: False, LAST_ROUNDS: False, "accuracy/out_of_domain_mean": True}
"""Metrics that are means over domains, with whether these domains are held out."""
SINGLE = {"accuracy/domain/": False, "accuracy/out_of_domain/": True}
"""The beginnings of the metrics of a single domain, with whether the domain is held out."""

REASONS = {
    VALIDATION: "the metric is measured on validation images",
    "accuracy/client": "the predictions of the clients' own models are not recorded",
    "accuracy/worst_domain": "the accuracy on the worst domain is no mean over domains",
    "accuracy/domain_spread": "a standard deviation over domains is no mean over domains",
    TEST_LOSS: "the losses of single images are not recorded",
    LAST_ROUNDS_LOSS: "the losses of single images are not recorded",
}
"""The reasons why metrics have no interval over seeds and images, by the beginning of their names."""


@dataclass(frozen=True)
class Crossed:
    """The mean difference between two arms, with its variance over seeds and over groups of images.

    `crossed` computes the values.
    """

    mean: float
    seeds: int
    """The number of seeds."""
    groups: int
    """The number of groups of images."""
    of_seeds: float
    """The variance of the mean over seeds on these images."""
    of_groups: float
    """The additional variance of the mean over groups of images, at least 0."""

    def interval(self, level: float = LEVEL, half: float | None = None) -> Interval:
        """Return the interval of the mean difference for other seeds and other groups of images.

        The square of its half-width is the sum of two squares: that of the half-width over seeds on these images, and
        the variance over groups times the square of its t quantile, with groups - 1 degrees of freedom. The interval is
        therefore never shorter than the interval over seeds.

        Args:
            level: The share of intervals that do not contain the true difference.
            half: The half-width of the interval over seeds, such as that of a repeated interval, which is valid at
                every look. By default, it is that of the t interval, with seeds - 1 degrees of freedom.
        """
        by_seeds, by_groups = (float(stats.t.isf(level / 2, many - 1)) for many in (self.seeds, self.groups))
        of_seeds = by_seeds**2 * self.of_seeds if half is None else half**2
        wide = float(np.sqrt(of_seeds + by_groups**2 * self.of_groups))
        return self.mean - wide, self.mean + wide


def with_images(
    metric: str, found: Sequence[Comparison], trials: Sequence[tuple[Finished, Finished]]
) -> list[Comparison]:
    """Return the comparisons with their intervals over seeds and images.

    With seeds until decided, the intervals are the repeated intervals of single comparisons, widened by the variance
    over groups of images. They are then valid at every look, too.

    Args:
        metric: The metric that is compared.
        found: The comparisons.
        trials: For each comparison, the finished trials of the arm and those of its baseline.
    """
    return [
        one if one.interval is None else _with_images(one, of_trials(metric, one.seeds, *sides))
        for one, sides in zip(found, trials, strict=True)
    ]


def why_no_images(metric: str, found: Sequence[Comparison], trials: Sequence[tuple[Finished, Finished]]) -> str | None:
    """Return the reason why no comparison has an interval over seeds and images, as a clause.

    If the comparisons have different reasons, return that of the first one. Return None if a comparison has such an
    interval, if none has an interval over seeds, or if `metric` does not depend on images. The arguments are those of
    `with_images`.
    """
    compared = [one for one in zip(found, trials, strict=True) if one[0].interval is not None]
    if any(one.images for one, _ in compared):
        return None
    recorded = (_recorded(metric, [side[seed] for seed in one.seeds for side in sides]) for one, sides in compared)
    return next((reason for reason in recorded if isinstance(reason, str)), None)


def why_no_images_with_baseline(metric: str, arms: Sequence[ArmStatistics]) -> str | None:
    """Return the result of `why_no_images` for the comparisons of all arms with their baselines."""
    by_key, found, trials = {one.key: one.arm.finished(metric) for one in arms}, [], []
    for one in arms:
        if one.comparison is not None and one.counterpart is not None:
            found.append(one.comparison)
            trials.append((by_key[one.key], by_key[one.counterpart]))
    return why_no_images(metric, found, trials)


def _with_images(found: Comparison, over_images: Crossed | None) -> Comparison:
    if over_images is None:
        return found
    if found.sequential is None:
        return replace(found, images=over_images.interval())
    both, one_sided = (half_width(one) for one in (found.sequential.interval, found.sequential.equivalence_interval))
    return replace(
        found,
        images=None if both is None else over_images.interval(half=both),
        images_equivalence=None if one_sided is None else over_images.interval(2 * LEVEL, one_sided),
    )


def of_trials(metric: str, seeds: Sequence[int], arm: Finished, baseline: Finished) -> Crossed | None:
    """Return the difference between two arms over `seeds`, with its variance over seeds and over groups of images.

    An image counts as 1 if its class is predicted correctly and as 0 otherwise. For the metric accuracy/last_rounds, an
    image counts as in `RightImages.values_of_rounds`.

    Return None if `metric` is no accuracy on the test images of domains, if a trial has no file with the correctly
    predicted images (of all averaged rounds), if the trials were tested on different images, or if no interval can be
    computed.
    """
    found = _recorded(metric, [side[seed] for seed in seeds for side in (arm, baseline)])
    if found is None or isinstance(found, str):
        return None
    known, places, groups = found
    counts = _over_rounds if metric == LAST_ROUNDS else _of_last_round
    pairs = zip(known[::2], known[1::2], strict=True)
    differences = np.stack([counts(one, places) - counts(other, places) for one, other in pairs])
    return crossed(differences, [known[0].domains[place].images for place in places], groups)


def _recorded(
    metric: str, trials: Sequence[TrialRecord]
) -> tuple[list[RightImages], list[int], np.ndarray] | str | None:
    """Return what compared trials recorded of the same images.

    Returns:
        The files of the trials, the positions of the domains that `metric` averages, and the group of each image of
        these domains. Otherwise, the reason why there is no interval over seeds and images, as a clause, or None if
        `metric` depends on none of these domains.
    """
    for start, reason in REASONS.items():
        if metric.startswith(start):
            return reason
    if metric not in MEANS and not metric.startswith(tuple(SINGLE)):
        return None
    files = [trial.right for trial in trials if trial.right is not None]
    if not files or len(files) < len(trials):
        return "not every trial has a record of its correctly predicted images"
    first, *others = known = [_read(path, path.stat().st_mtime_ns) for path in files]
    if not (places := _domains(metric, first)):
        return None
    groups = _groups(first, places)
    for one in others:
        if (one.data, one.domains) != (first.data, first.domains) or (
            one.groups != first.groups and not np.array_equal(_groups(one, places), groups)
        ):
            return "the trials were tested on different images"
    if not groups.any():
        return "all test images belong to one group"
    if metric == LAST_ROUNDS and any(one.earlier is None for one in known):
        return "not every trial has a record of the predictions in the earlier averaged rounds"
    return known, places, groups


def crossed(differences: np.ndarray, sizes: Sequence[int], groups: np.ndarray) -> Crossed | None:
    """Return the mean difference over domains, with its variance over seeds and over groups of images.

    In the mean difference, every domain counts the same. A group may have images in several domains, whose differences
    are then not independent. The analysis of variance of seeds and groups gives the mean squares of seeds (A), of
    groups (B) and of their interaction (E). The variance of the mean of s seeds and g groups is the sum of two parts:
    A / (s g), the variance over seeds on these images, and (B - E) / (s g), or 0 if E is larger, the additional
    variance over groups. In the interval, each part has its own t quantile. In simulations, its coverage is 95 to 98%.
    Satterthwaite's degrees of freedom give 91 to 97%, and the pigeonhole bootstrap gives 92 to 100%
    (`benchmarks/other_images.py`).

    Args:
        differences: Arm minus baseline for each seed and image: 1 if only the arm predicts the class correctly, -1 if
            only the baseline does, and 0 otherwise, (seeds, n). With several rounds, the values of an image are those
            of `RightImages.values_of_rounds`.
        sizes: The number of images of each domain. The images are those of the first domain, then the second, etc.
        groups: The group of each image, from 0, (n,).

    Returns:
        None for fewer than two seeds or groups, for a domain without images, and if all seeds have the same mean
        difference.

    Source: S. Searle, G. Casella and C. McCulloch (1992), Variance Components, chapter 4, for the two-way random model.
    """
    cells = _cells(differences, sizes, groups)
    if cells is None:
        return None
    seeds, count = cells.shape
    mean, by_seed, by_group = cells.mean(), cells.mean(axis=1), cells.mean(axis=0)
    if np.ptp(by_seed) <= ROUNDING:
        return None
    of_seeds = count * np.square(by_seed - mean).sum() / (seeds - 1)
    of_groups = seeds * np.square(by_group - mean).sum() / (count - 1)
    rest = cells - by_seed[:, None] - by_group + mean
    of_both = np.square(rest).sum() / ((seeds - 1) * (count - 1))
    more = max(of_groups - of_both, 0.0)
    return Crossed(float(mean), seeds, count, float(of_seeds / cells.size), float(more / cells.size))


def _cells(differences: np.ndarray, sizes: Sequence[int], groups: np.ndarray) -> np.ndarray | None:
    """Return a value for each seed and group, (seeds, groups), whose mean over groups is the seed's mean difference.

    The value is the group's part of the mean difference, relative to the mean of each domain, so that the numbers of
    images that a group has in the domains add no variance. Return None if there are too few seeds, groups or images.
    """
    seeds, count = len(differences), int(groups.max(initial=-1)) + 1
    if seeds < 2 or count < 2 or min(sizes) == 0:
        return None
    cells, centre, start = np.zeros((seeds, count)), 0.0, 0
    for size in sizes:
        here, weight = slice(start, start + size), count / (len(sizes) * size)
        mean = differences[:, here].mean()
        for seed in range(seeds):
            apart = (differences[seed, here] - mean) * weight
            cells[seed] += np.bincount(groups[here], weights=apart, minlength=count)
        centre, start = centre + mean / len(sizes), start + size
    return cells + centre


def _domains(metric: str, first: RightImages) -> list[int]:
    """Return the positions of the domains whose accuracies `metric` averages, or an empty list for other metrics."""
    if metric in MEANS:
        return [place for place, one in enumerate(first.domains) if one.held_out == MEANS[metric]]
    for start, held_out in SINGLE.items():
        if metric.startswith(start):
            asked = metric.removeprefix(start), held_out
            return [place for place, one in enumerate(first.domains) if (one.name, one.held_out) == asked]
    return []


def _of_last_round(trial: RightImages, places: Sequence[int]) -> np.ndarray:
    """Return for each image of some domains 1 if its class is predicted correctly, and 0 otherwise, int8 (n,)."""
    return np.concatenate([trial.of_domain(place) for place in places]).astype(np.int8)


def _over_rounds(trial: RightImages, places: Sequence[int]) -> np.ndarray:
    """Return the values of the images of some domains over the averaged rounds, float64 (n,)."""
    starts, whole = trial.starts, trial.values_of_rounds()
    return np.concatenate([whole[starts[place] : starts[place + 1]] for place in places])


def _groups(trial: RightImages, places: Sequence[int]) -> np.ndarray:
    """Return the groups of the images of some domains, numbered from 0."""
    starts, whole = trial.starts, trial.group_numbers
    return numbered([np.concatenate([whole[starts[place] : starts[place + 1]] for place in places])], [0])


@lru_cache(maxsize=512)
def _read(path: Path, changed: int) -> RightImages:
    return read_right(path)
