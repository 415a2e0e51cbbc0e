"""The comparison of all arms with chance and with the untuned model of round 0."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedsweep.report.arm_statistics import ArmStatistics, recorded
from fedsweep.report.intervals_and_power import LEVEL
from fedsweep.results import SweepManifest, TrialPlan
from fedsweep.results.history import LAST_ROUNDS, MEAN_ACCURACY
from fedsweep.results.records import IN_DOMAIN_TEST

UNTRAINED = (
    "The backbone is untrained (`backbone.pretrained` is none): train one with `fedsweep pretrain`, or set "
    "`backbone.pretrained` to pre-trained weights."
)
WITH_CHANCE = (MEAN_ACCURACY, LAST_ROUNDS)
"""The objectives for which the accuracy of chance is known."""
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


class FinishedArm(NamedTuple):
    """The finished trials of one arm, and the test images on which they were measured.

    `chance` is the accuracy of a constant prediction on these images, and `images` is their number. If chance is
    not known for the objective, or if they were not recorded, `chance` is None and `images` is 0.
    """

    ends: Sequence[Ends]
    chance: float | None = None
    images: int = 0


def about_untuned_model(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return a sentence that warns if no arm is above chance, or if no arm is better than the untuned model of round 0.

    The list is empty if an arm is better than both, if the objective is not recorded in round 0, or if no trial has
    finished. Chance is known only for the objectives in `WITH_CHANCE`.
    """
    sign = 1 if manifest.mode == "max" else -1
    finished = [trials for one in arms if (trials := [*one.arm.finished(manifest.metric).values()])]
    values = [[recorded(trial.history, manifest.metric) for trial in trials] for trials in finished]
    if not finished or any(0 not in value or len(value) < 2 for trials in values for value in trials):
        return []
    accuracy = manifest.metric in WITH_CHANCE and manifest.mode == "max"
    ends = [[Ends(sign * value[0], sign * value[max(value)]) for value in trials] for trials in values]
    plans = [[trial.plan for trial in trials] if accuracy else [] for trials in finished]
    measured = [FinishedArm(one, *_chance_and_images(of_arm)) for one, of_arm in zip(ends, plans, strict=True)]
    advice = UNTRAINED if any(_untrained(one) for one in arms) else TRAINED
    if not above_chance(measured):
        known = sorted(100 * one.chance for one in measured if one.chance is not None)
        shown = dict.fromkeys(f"{chance:.2f}%" for chance in (known[0], known[-1]))
        return [
            f"No arm is distinguishable from chance in {manifest.metric}: predicting the same class for all test "
            f"images reaches {' to '.join(shown)}. The differences between arms therefore mean nothing. {advice}"
        ]
    if not better_than_untuned(measured):
        return [
            f"No arm is significantly better than the untuned model of round 0 in {manifest.metric}, so the "
            f"differences between arms say little. {advice}"
        ]
    return []


def _chance_and_images(plans: Sequence[TrialPlan]) -> tuple[float | None, int]:
    """Return the accuracy of chance in an arm's trials, and the number of test images that accuracy/mean counts."""
    chance = min((plan.chance for plan in plans if plan.chance is not None), default=None)
    return chance, min((plan.images.get(IN_DOMAIN_TEST, plan.images.get("test", 0)) for plan in plans), default=0)


def above_chance(arms: Sequence[FinishedArm]) -> bool:
    """Return whether the mean accuracy of at least one arm is significantly above chance, or chance is not known.

    The test of each arm is one-sided, with a normal approximation of the binomial distribution and with Bonferroni's
    correction. All seeds share the test images, so the number of seeds does not change the bound. Each arm is compared
    with chance on its own test images, because arms can hold out different domains.
    """
    return any(
        one.chance is None
        or not one.images
        or float(np.mean([end.last for end in one.ends]))
        > one.chance + _deviations(len(arms)) * math.sqrt(one.chance * (1 - one.chance) / one.images)
        for one in arms
    )


def better_than_untuned(arms: Sequence[FinishedArm]) -> bool:
    """Return whether at least one arm improves significantly from round 0 to the last round.

    An arm must pass two one-sided tests, both with Bonferroni's correction for the number of arms:

    - a t-test of the gains of its seeds. With fewer than `FEWEST` seeds, each seed must gain instead.
    - a sign test (McNemar's test) of the test images on which the two models differ. These images are not recorded. The
      most favourable case is assumed, in which the tuned model is right on all of them. If the number of test images is
      unknown, this test is left out.
    """
    deviations = _deviations(len(arms))
    for one in arms:
        gains = [end.gain for end in one.ends]
        if (seeds := len(gains)) < FEWEST:
            gained = min(gains) > 0
        else:
            error = float(np.std(gains, ddof=1)) / math.sqrt(seeds)
            gained = float(np.mean(gains)) > float(stats.t.isf(LEVEL / len(arms), seeds - 1)) * error
        if gained and (not one.images or float(np.mean(gains)) > deviations**2 / one.images):
            return True
    return False


def _deviations(arms: int) -> float:
    """Return the quantile of the normal distribution for a one-sided test of each arm, with Bonferroni's correction."""
    return float(stats.norm.isf(LEVEL / arms))


def _untrained(one: ArmStatistics) -> bool:
    backbone = one.arm.trials[0].plan.config.get("backbone")
    return isinstance(backbone, dict) and backbone.get("pretrained") == "none"
