"""The comparison of all arms with chance and with the untuned model of round 0."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedsweep.report.arm_statistics import MEAN_ACCURACY, ArmStatistics, recorded
from fedsweep.report.intervals_and_power import LEVEL
from fedsweep.results import SweepManifest

UNTRAINED = (
    "The backbone is untrained (`backbone.pretrained` is none): train one with `fedsweep pretrain`, or set "
    "`backbone.pretrained` to pre-trained weights."
)
FEWEST = 3  # seeds for a t-test; with two seeds, it detects hardly anything
TRAINED = "Check the labels, the learning rate and the number of rounds."


class Ends(NamedTuple):
    """The objective of one trial in round 0 and in the last round, so that larger values are better."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """The improvement from round 0 to the last round."""
        return self.last - self.first


def about_untuned_model(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return a sentence that warns if no arm is above chance, or if no arm is better than the untuned model of round 0.

    The list is empty if an arm is better than both, if the objective is not recorded in round 0, or if no trial has
    finished. Chance is known only for the objective accuracy/mean.
    """
    sign = 1 if manifest.mode == "max" else -1
    finished = [trials for one in arms if (trials := [*one.arm.finished(manifest.metric).values()])]
    values = [[recorded(trial.history, manifest.metric) for trial in trials] for trials in finished]
    if not finished or any(0 not in value or len(value) < 2 for trials in values for value in trials):
        return []
    ends = [[Ends(sign * value[0], sign * value[max(value)]) for value in trials] for trials in values]
    plans = [trial.plan for trials in finished for trial in trials]
    accuracy = manifest.metric == MEAN_ACCURACY and manifest.mode == "max"  # chance is known only for this metric
    images = min(plan.images.get("test", 0) for plan in plans) if accuracy else 0
    chance = min((plan.chance for plan in plans if plan.chance is not None), default=None) if accuracy else None
    advice = UNTRAINED if any(_untrained(one) for one in arms) else TRAINED
    if chance is not None and images and not above_chance(ends, chance, images):
        return [
            f"No arm is distinguishable from chance in {manifest.metric}: predicting the same class for all test "
            f"images reaches {100 * chance:.2f}%. The differences between arms therefore mean nothing. {advice}"
        ]
    if not better_than_untuned(ends, images):
        return [
            f"No arm is significantly better than the untuned model of round 0 in {manifest.metric}, so the "
            f"differences between arms say little. {advice}"
        ]
    return []


def above_chance(arms: Sequence[Sequence[Ends]], chance: float, images: int) -> bool:
    """Return whether the mean accuracy of at least one arm is significantly above chance.

    The test of each arm is one-sided, with a normal approximation of the binomial distribution and with Bonferroni's
    correction. All seeds share the test images, so the number of seeds does not change the bound.

    Args:
        arms: The accuracies of each arm's seeds.
        chance: The accuracy of a constant prediction, from 0 to 1.
        images: The number of test images.
    """
    bound = chance + _deviations(len(arms)) * math.sqrt(chance * (1 - chance) / images)
    return any(float(np.mean([one.last for one in arm])) > bound for arm in arms)


def better_than_untuned(arms: Sequence[Sequence[Ends]], images: int) -> bool:
    """Return whether at least one arm improves significantly from round 0 to the last round.

    An arm must pass two one-sided tests, both with Bonferroni's correction for the number of arms:

    - a t-test of the gains of its seeds. With fewer than `FEWEST` seeds, each seed must gain instead.
    - a sign test (McNemar's test) of the test images on which the two models differ. These images are not recorded. The
      most favourable case is assumed, in which the tuned model is right on all of them.

    Args:
        arms: The values of each arm's seeds.
        images: The number of test images; 0 if the objective is not an accuracy or if the number is unknown.
    """
    deviations = _deviations(len(arms))
    least = deviations**2 / images if images else 0.0
    for arm in ([one.gain for one in arm] for arm in arms):
        if (seeds := len(arm)) < FEWEST:
            gained = min(arm) > 0
        else:
            error = float(np.std(arm, ddof=1)) / math.sqrt(seeds)
            gained = float(np.mean(arm)) > float(stats.t.isf(LEVEL / len(arms), seeds - 1)) * error
        if gained and float(np.mean(arm)) > least:
            return True
    return False


def _deviations(arms: int) -> float:
    """Return the quantile of the normal distribution for a one-sided test of each arm, with Bonferroni's correction."""
    return float(stats.norm.isf(LEVEL / arms))


def _untrained(one: ArmStatistics) -> bool:
    backbone = one.arm.trials[0].plan.config.get("backbone")
    return isinstance(backbone, dict) and backbone.get("pretrained") == "none"
