"""Two objectives: which arms are efficient, and a sentence that says so."""

from collections.abc import Mapping, Sequence

from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import mean
from fedsweep.report.wording import Units, arm_words, decimals, names
from fedsweep.results import SweepManifest
from fedsweep.results.arms import identity, is_accuracy
from fedsweep.results.history import over_the_run
from fedsweep.results.pareto import Against, pareto_efficient

UNITS = {"megabytes/sent": " MB", "bytes/up": " bytes", "bytes/down": " bytes", "seconds/round": " s"}
LABELLED = 8
"""Efficient arms that are named in the sentence; all of them are marked in the table."""


def weighed(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> dict[str, float]:
    """By an arm's `identity` its mean over finished seeds of the second objective; arms without one are left out."""
    found = {}
    for one in arms if manifest.against else ():
        value = _second(one, manifest)
        if one.mean is not None and value is not None:
            found[identity(one.arm.values)] = value
    return found


def on_front(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[ArmStatistics]:
    """The efficient arms, by their means over finished seeds, in the order of the second objective."""
    second = weighed(manifest, arms)
    known = [(one, one.mean, second[identity(one.arm.values)]) for one in arms if identity(one.arm.values) in second]
    points = [(value, other) for _, value, other in known if value is not None]
    if manifest.against is None:
        return []
    kept = pareto_efficient(points, (manifest.mode, manifest.against.mode))
    best = [(other, place, one) for place, (one, _, other) in enumerate(known) if kept[place]]
    return [one for _, _, one in sorted(best, key=lambda entry: entry[:2])]


def finding(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Which arms are efficient, with both values; nothing where there is one objective or no finished arm."""
    best, second = on_front(manifest, arms), weighed(manifest, arms)
    if manifest.against is None or not best:
        return []
    dotted, units = names(manifest, arms), Units.of(manifest.metric, arms)
    percent = "%" if units.percent else ""
    unit = "%" if is_accuracy(manifest.against.metric) else UNITS.get(manifest.against.metric, "")
    said = [
        f"{arm_words(one.arm.values, dotted)} ({units.value(one.mean)}{percent}, "
        f"{shown(manifest.against, second[identity(one.arm.values)], second)}{unit})"
        for one in best[:LABELLED]
    ]
    more = f" and {len(best) - LABELLED} more" if len(best) > LABELLED else ""
    return [
        f"Efficient in {manifest.metric} against {manifest.against.metric}, {len(best)} of {len(second)} arms: "
        f"{'; '.join(said)}{more}."
    ]


def shown(against: Against, value: float | None, second: Mapping[str, float]) -> str:
    """A value of the second objective, with the decimals that suit all of them."""
    if value is None:
        return "-"
    scale = 100 if is_accuracy(against.metric) else 1
    return f"{scale * value:.{2 if scale == 100 else decimals(second.values())}f}"


def _second(one: ArmStatistics, manifest: SweepManifest) -> float | None:
    """Mean over finished seeds; None if any lacks it, since a mean over other seeds would not compare."""
    metric = manifest.against.metric if manifest.against else manifest.metric
    ends = [over_the_run(trial.history, metric) for trial in one.arm.finished(manifest.metric).values()]
    return None if None in ends else mean(end for end in ends if end is not None)
