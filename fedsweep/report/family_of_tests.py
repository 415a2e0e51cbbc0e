"""The tests of a sweep that Holm's correction covers together: those with the baseline and the declared comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.report.holm_corrected_tests import Comparison, mirrored, paired_tests
from fedsweep.report.other_images import with_images
from fedsweep.results import SweepManifest
from fedsweep.results.declared_comparisons import Pair, declared_pairs

if TYPE_CHECKING:
    from fedsweep.report.arm_statistics import ArmTrials


@dataclass(frozen=True)
class DeclaredTest:
    """A comparison that the search space declared before the sweep, and its result."""

    place: int
    """The position among all declared pairs, in the order of the search space."""
    pair: Pair
    comparison: Comparison
    with_baseline: bool
    """True if the pair is also compared as an arm with its baseline, by the objective. It counts as one test."""


def tests_of_family(
    manifest: SweepManifest, arms: Mapping[str, ArmTrials], against: Mapping[str, str]
) -> tuple[dict[str, Comparison], list[DeclaredTest]]:
    """Return the comparisons with the baseline by arm, and the declared comparisons, with a common Holm correction.

    Each distinct pair of arms and metric is one test. Without declared comparisons, the correction covers the
    comparisons with the baseline.

    Args:
        manifest: The sweep.
        arms: The trials of each arm, by `identity`.
        against: The baseline of each arm that has one. A baseline is its own baseline and is not tested.
    """
    objective = manifest.metric
    planned = dict.fromkeys(Pair(key, other, objective) for key, other in against.items() if key != other)
    declared = declared_pairs(manifest.comparisons, [one.values for one in arms.values()], objective, against)
    distinct: dict[object, Pair] = {}
    for pair in (*planned, *declared):
        distinct.setdefault(pair.test, pair)
    sides = [(arms[pair.arm], arms[pair.against], pair.metric) for pair in distinct.values()]
    tested = paired_tests([(one.finals(objective, by), other.finals(objective, by)) for one, other, by in sides])
    found: dict[Pair, Comparison] = {}
    for pair, comparison, (one, other, metric) in zip(distinct.values(), tested, sides, strict=True):
        (found[pair],) = with_images(metric, [comparison], [(one.finished(objective), other.finished(objective))])
    return {pair.arm: found[pair] for pair in planned}, [
        DeclaredTest(place, pair, comparison, distinct[pair.test] in planned)
        for place, pair in enumerate(declared)
        for comparison in [found[pair] if pair in found else mirrored(found[distinct[pair.test]])]
    ]
