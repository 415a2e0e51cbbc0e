"""The table of the differences between arms and their baseline on each domain."""

from collections.abc import Sequence

import numpy as np

from fedsweep.report.arm_statistics import MEAN_OUT_OF_DOMAIN, ArmStatistics
from fedsweep.report.choice import by_validation
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.other_images import seeds_and_images
from fedsweep.report.text_tables import Section
from fedsweep.report.units_and_labels import PERCENT, names, settings
from fedsweep.results import SweepManifest
from fedsweep.results.history import MEAN_ACCURACY

SHOWN_FOR = (MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN, "accuracy/worst_domain")
"""The objectives for which the table is shown."""
TITLE = "Differences from the baseline by domain"
EXPLAINED = (
    "Differences of accuracies on the test images at the last round, in percentage points, as means over the pairs of "
    "seeds. 95% t: interval for other seeds on these test images. 95% seeds and images: interval for other seeds and "
    "other test images. The intervals are not corrected for the numbers of arms and domains."
)


def differences_by_domain(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """Return a table with a row for each arm and domain.

    Return None if the sweep has only one domain, if no interval over images is known, or if the objective is no
    accuracy of the global model on the test images. A domain that only one of two compared arms holds out has no row.
    """
    if len(manifest.domains) < 2 or manifest.metric not in SHOWN_FOR or by_validation(manifest):
        return None
    if manifest.until_decided is not None:  # the intervals assume a fixed number of seeds
        return None
    dotted, by_key = names(manifest, arms), {one.key: one for one in arms}
    rows, known = list[dict[str, str]](), False
    for one in arms:
        if one.comparison is None or one.counterpart is None:
            continue
        for domain in one.domains:
            metric, sides = one.metric_on(domain), (one, by_key[one.counterpart])
            values, baseline = (side.arm.finals(manifest.metric, metric) for side in sides)
            if not (seeds := sorted(values.keys() & baseline)):
                continue
            differences = [values[seed] - baseline[seed] for seed in seeds]
            trials = (side.arm.finished(manifest.metric) for side in sides)
            images = seeds_and_images(metric, seeds, *trials)
            known |= images is not None
            rows.append(
                {
                    **settings(one, dotted),
                    "domain": domain,
                    "pairs": str(len(seeds)),
                    "difference": PERCENT.difference(float(np.mean(differences))),
                    "95% t": PERCENT.interval(t_interval(differences)),
                    "95% seeds and images": PERCENT.interval(images),
                }
            )
    return Section.of(TITLE, rows, len(settings(arms[0], dotted)) + 1, [EXPLAINED]) if known else None
