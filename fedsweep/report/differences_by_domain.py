"""The differences between arms and their baseline on each domain, with their intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsweep.report.arm_statistics import MEAN_OUT_OF_DOMAIN, ArmStatistics
from fedsweep.report.choice import by_validation
from fedsweep.report.holm_corrected_tests import ROUNDING
from fedsweep.report.intervals_and_power import Interval, half_width, t_interval
from fedsweep.report.other_images import of_trials
from fedsweep.report.sequential_tests import SequentialRule, repeated_interval
from fedsweep.report.text_tables import SEEDS_AND_IMAGES, Section
from fedsweep.report.units_and_labels import PERCENT, names, settings
from fedsweep.results import SweepManifest
from fedsweep.results.history import LAST_ROUNDS, MEAN_ACCURACY

SHOWN_FOR = (MEAN_ACCURACY, LAST_ROUNDS, MEAN_OUT_OF_DOMAIN, "accuracy/worst_domain")
"""The objectives for which the differences are shown, which are always those of the last round."""
TITLE = "Differences from the baseline by domain"
EXPLAINED = (
    "Differences of accuracies on the test images at the last round, in percentage points, as means over the pairs of "
    "seeds. {seeds}: interval for other seeds on these test images. 95% seeds and images: interval for other seeds and "
    "other test images. {looks}The intervals are not corrected for the numbers of arms and domains."
)
AT_EVERY_LOOK = "Both are valid at every look. "


@dataclass(frozen=True)
class DomainDifference:
    """The difference between an arm and its baseline on one domain: the arm's accuracy minus the baseline's."""

    one: ArmStatistics
    baseline: ArmStatistics
    domain: str
    metric: str
    """The metric of the accuracy on the domain."""
    pairs: int
    """The number of seeds that both arms finished, and with seeds until decided, that their comparison counts."""
    difference: float
    """The mean over the pairs, from -1 to 1."""
    interval: Interval | None
    """The 95% interval over seeds, uncorrected; with seeds until decided, valid at every look.

    It is None for a single pair, and if the differences of all pairs are equal.
    """
    images: Interval | None
    """The 95% interval over seeds and groups of images, uncorrected; with seeds until decided, valid at every look."""


def domain_differences(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[DomainDifference]:
    """Return the difference of each arm on each domain.

    The list is empty if the sweep has only one domain, if no interval over images is known, or if the objective is no
    accuracy of the global model on the test images. A domain that only one of two compared arms holds out is left out.
    """
    if len(manifest.domains) < 2 or manifest.metric not in SHOWN_FOR or by_validation(manifest):
        return []
    by_key = {one.key: one for one in arms}
    found = [
        difference
        for one in arms
        if one.comparison is not None and one.counterpart is not None
        for difference in _differences(manifest, one, by_key[one.counterpart])
    ]
    return found if any(one.images for one in found) else []


def _differences(manifest: SweepManifest, one: ArmStatistics, baseline: ArmStatistics) -> Iterable[DomainDifference]:
    until, counted = manifest.until_decided, () if one.comparison is None else one.comparison.seeds
    for domain in one.domains:
        metric = one.metric_on(domain)
        values, theirs = (side.arm.finals(manifest.metric, metric) for side in (one, baseline))
        if not (seeds := [seed for seed in counted if seed in values and seed in theirs]):
            continue
        differences = [values[seed] - theirs[seed] for seed in seeds]
        trials = (side.arm.finished(manifest.metric) for side in (one, baseline))
        if np.ptp(differences) <= ROUNDING:
            interval, half = None, None
        elif until is None:
            interval, half = t_interval(differences), None
        else:
            interval = repeated_interval(differences, SequentialRule(until.at_least, until.at_most))
            half = half_width(interval)
        over_images = None if interval is None else of_trials(metric, seeds, *trials)
        images = None if over_images is None else over_images.interval(half=half)
        mean = float(np.mean(differences))
        yield DomainDifference(one, baseline, domain, metric, len(seeds), mean, interval, images)


def differences_by_domain(
    manifest: SweepManifest, arms: Sequence[ArmStatistics], found: Sequence[DomainDifference]
) -> Section | None:
    """Return a table with a row for each difference in `found`, or None if there are none."""
    if not found:
        return None
    dotted, by_looks = names(manifest, arms), manifest.until_decided is not None
    seeds = "95% interval" if by_looks else "95% t"
    rows = [
        {
            **settings(row.one, dotted),
            "domain": row.domain,
            "pairs": str(row.pairs),
            "difference": PERCENT.difference(row.difference),
            seeds: PERCENT.interval(row.interval),
            SEEDS_AND_IMAGES: PERCENT.interval(row.images),
        }
        for row in found
    ]
    explained = EXPLAINED.format(seeds=seeds, looks=AT_EVERY_LOOK * by_looks)
    return Section.of(TITLE, rows, len(settings(arms[0], dotted)) + 1, [explained])
