"""The best arms, and the results on the test images of arms that were chosen by validation images."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress

from fedsweep.report.arm_statistics import ArmStatistics, final, mean, recorded
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.history import VALIDATION, on_test
from fedsweep.results.pareto import pareto_efficient


@dataclass(frozen=True)
class OnTest:
    """The mean of an arm over its seeds on the test images, which had no part in the choice of the arm."""

    value: float
    optimism: float | None
    """The amount by which the value on the validation images is better; None for a baseline, which was not chosen."""
    untuned: float | None
    """The same amount for the untuned model of round 0, which shows how much easier the validation images are."""


def by_validation(manifest: SweepManifest) -> bool:
    """Return whether a search or a scheduler chose between trials by validation images, and by no test images."""
    return manifest.chooses and manifest.metric.startswith(VALIDATION) and manifest.choice_by_test_images is None


def chosen_arms(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """Return the best finished arm, or the efficient arms if the sweep has two objectives.

    The list is empty for a sweep that tunes each arm, because it chooses between samples and not between arms.
    """
    if manifest.stage is not None and manifest.stage.name == "tuning":
        return []
    ranked = ranked_arms(manifest, arms)
    return ranked if manifest.against is not None else ranked[:1]


def ranked_arms(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """Return the finished arms, best first.

    If the sweep has two objectives, return only the efficient arms, sorted by the second objective.
    """
    if manifest.against is not None:
        return efficient_arms(manifest, arms)
    sign = 1 if manifest.mode == "max" else -1
    return sorted((one for one in arms if one.mean is not None), key=lambda one: -sign * (one.mean or 0.0))


def efficient_arms(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """Return the Pareto-efficient arms, sorted by the second objective in ascending order.

    Arms are compared by their means of both objectives. The list is empty if the sweep has only one objective.
    """
    if manifest.against is None:
        return []
    known = [one for one in arms if one.second is not None]
    points = [(one.mean or 0.0, one.second or 0.0) for one in known]
    best = compress(known, pareto_efficient(points, (manifest.mode, manifest.against.mode)))
    return sorted(best, key=lambda one: one.second or 0.0)


def arms_on_test(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """Return the arms whose results on the test images are shown.

    If arms are chosen by validation images, these are the chosen arms and the baselines. The test images of the other
    arms stay out of sight, because otherwise the reader would choose by them.
    """
    if not by_validation(manifest):
        return list(arms)
    kept = {one.key for one in chosen_arms(manifest, arms)}
    return [one for one in arms if one.key in kept or (one.is_baseline and one.n)]


def on_test_images(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> dict[str, OnTest]:
    """Return the values on the test images of the chosen arms and the baselines, by the `key` of the arm.

    The dict is empty if the arms were not chosen by validation images.
    """
    if not by_validation(manifest):
        return {}
    sign, metric = 1 if manifest.mode == "max" else -1, on_test(manifest.metric)
    kept, found = {one.key for one in chosen_arms(manifest, arms)}, {}
    for one in arms_on_test(manifest, arms):
        trials = one.arm.finished(manifest.metric).values()
        value = mean(final(trial, metric) for trial in trials)
        if value is None or one.mean is None:
            continue
        before, tested = (mean(_untuned(trials, name)) for name in (manifest.metric, metric))
        untuned = None if before is None or tested is None else sign * (before - tested)
        found[one.key] = OnTest(value, sign * (one.mean - value) if one.key in kept else None, untuned)
    return found


def _untuned(trials: Collection[TrialRecord], metric: str) -> list[float | None]:
    """Return the value of a metric in round 0 of each trial."""
    return [recorded(trial.history[:1], metric).get(0) for trial in trials]
