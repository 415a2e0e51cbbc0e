"""The verdicts of a sweep that gives arms further seeds until their comparisons are decided.

The sweep and its report use the same functions, so a report never contradicts the decisions of its sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedsweep.report.sequential_tests import SequentialRule, Verdict, judge
from fedsweep.results import SweepManifest
from fedsweep.results.arms import identity
from fedsweep.results.declared_comparisons import Pair, family_of
from fedsweep.results.seeds import UntilDecided

if TYPE_CHECKING:
    from fedsweep.report.arm_statistics import ArmTrials


def sequential_verdicts(
    until: UntilDecided, metric: str, values: Mapping[str, Mapping[int, float]], family: Sequence[Pair]
) -> dict[Pair, Verdict]:
    """Return the verdict of each comparison.

    A seed counts once its trials have ended in both arms. Verdicts depend only on the values, not on their order.

    Args:
        until: The rule of the sweep.
        metric: The objective, which determines the unit of the smallest effect.
        values: For each arm, a dict from seed to the objective of an ended trial; NaN if the trial failed or diverged.
        family: All comparisons of the sweep, each once. They are judged together.
    """
    differences: dict[Pair, list[float]] = {}
    for pair in family:
        ours, theirs, found = values.get(pair.arm, {}), values.get(pair.against, {}), list[float]()
        for seed in until.seeds:
            if seed not in ours or seed not in theirs:
                break
            found.append(ours[seed] - theirs[seed])
        differences[pair] = found
    rule = SequentialRule(until.at_least, until.at_most, until.effect(metric))
    return judge(differences, rule)


def seeds_that_count(until: UntilDecided, verdicts: Mapping[Pair, Verdict]) -> dict[str, int]:
    """Return the number of seeds of each arm that count, which are the seeds of its longest comparison.

    The seeds of an arm that ran after all its comparisons were decided do not count, since whether they ran depends on
    which workers were idle.
    """
    found: dict[str, int] = {}
    for pair, verdict in verdicts.items():
        seeds = until.at_most if verdict.verdict == "open" else verdict.seeds
        for arm in (pair.arm, pair.against):
            found[arm] = max(found.get(arm, 0), seeds)
    return found


def judged(
    manifest: SweepManifest, arms: Sequence[ArmTrials], against: Mapping[str, str]
) -> tuple[dict[Pair, Verdict], list[ArmTrials]]:
    """Return the verdicts of a sweep with seeds until decided, and its arms with only the seeds that count.

    In any other sweep, there are no verdicts, and the arms are unchanged.

    Args:
        manifest: The sweep.
        arms: The arms with all their trials.
        against: The baseline of each arm, both as JSON text (see `identity`).
    """
    if (until := manifest.until_decided) is None:
        return {}, list(arms)
    values: dict[str, dict[int, float]] = {identity(arm.values): _ends(arm, manifest.metric) for arm in arms}
    family = family_of(manifest.comparisons, [arm.values for arm in arms], manifest.metric, against)
    verdicts = sequential_verdicts(until, manifest.metric, values, family)
    counted = seeds_that_count(until, verdicts)
    kept = []
    for arm in arms:
        seeds = until.seeds[: counted.get(identity(arm.values))]
        trials = tuple(trial for trial in arm.trials if trial.plan.seed in seeds)
        kept.append(replace(arm, trials=trials or arm.trials[:1]))
    return verdicts, kept


def _ends(arm: ArmTrials, metric: str) -> dict[int, float]:
    """Return the objective of each ended trial of an arm by seed; NaN if the trial has failed or diverged."""
    found: dict[int, float] = {}
    for trial in arm.trials:
        if trial.outcome is not None and trial.outcome.outcome != "pruned":
            finished = trial.outcome.outcome == "finished" and trial.history
            found[trial.plan.seed] = trial.history[-1].metrics.get(metric, math.nan) if finished else math.nan
    return found
