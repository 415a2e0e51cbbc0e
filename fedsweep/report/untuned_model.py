"""The comparison of all arms with the untuned model of round 0, which shows whether a sweep is at chance."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from fedsweep.report.arm_statistics import ArmStatistics, recorded
from fedsweep.report.intervals_and_power import LEVEL
from fedsweep.results import SweepManifest

CLEAR = 0.02  # an arm differs from the untuned model if all its seeds change by more than this in one direction
UNTRAINED = (
    "The backbone is untrained (`backbone.pretrained` is none): train one with `fedsweep pretrain`, or set "
    "`backbone.pretrained` to pre-trained weights."
)
TRAINED = "Check the labels, the learning rate and the number of rounds."


def about_untuned_model(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return a sentence that warns if no arm differs from the untuned model of round 0; empty if an arm differs.

    The list is also empty if the objective is not recorded in round 0, or if no trial has finished.
    """
    finished = [trials for one in arms if (trials := [*one.arm.finished(manifest.metric).values()])]
    values = [[recorded(trial.history, manifest.metric) for trial in trials] for trials in finished]
    if not finished or any(0 not in value or len(value) < 2 for trials in values for value in trials):
        return []
    gains = [[value[max(value)] - value[0] for value in trials] for trials in values]
    if distinguishable(gains):
        return []
    untrained = any(_untrained(one) for one in arms)
    return [
        f"No arm is distinguishable from the untuned model of round 0 in {manifest.metric}, so differences between "
        f"arms mean nothing. {UNTRAINED if untrained else TRAINED}"
    ]


def distinguishable(gains: Sequence[Sequence[float]]) -> bool:
    """Return whether at least one arm differs from its untuned models.

    An arm differs if all its seeds gain, or all lose, more than `CLEAR`, or if a one-sample t-test of its gains is
    significant. The test uses the variance within all arms, and Bonferroni's correction for the number of arms.

    Args:
        gains: For each arm, the gain of each seed from round 0 to the last round.
    """
    if any(min(arm) > CLEAR or max(arm) < -CLEAR for arm in gains):
        return True
    freedom = sum(len(arm) - 1 for arm in gains)
    if not freedom:
        return False
    variance = sum(float(np.var(arm)) * len(arm) for arm in gains) / freedom
    bound = float(stats.t.isf(LEVEL / 2 / len(gains), freedom))
    return any(abs(float(np.mean(arm))) > bound * math.sqrt(variance / len(arm)) for arm in gains)


def _untrained(one: ArmStatistics) -> bool:
    backbone = one.arm.trials[0].plan.config.get("backbone")
    return isinstance(backbone, dict) and backbone.get("pretrained") == "none"
