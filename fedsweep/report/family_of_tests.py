"""The tests of a sweep that share a correction: the comparisons with the baseline and the declared comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.report.holm_corrected_tests import Comparison, mirrored, paired_tests, sequential_comparison
from fedsweep.report.other_images import with_images
from fedsweep.results import SweepManifest
from fedsweep.results.declared_comparisons import Pair, declared_pairs, family_of

if TYPE_CHECKING:
    from fedsweep.report.arm_statistics import ArmTrials
    from fedsweep.report.sequential_tests import Verdict


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
    manifest: SweepManifest,
    arms: Mapping[str, ArmTrials],
    against: Mapping[str, str],
    verdicts: Mapping[Pair, Verdict],
) -> tuple[dict[str, Comparison], list[DeclaredTest]]:
    """Return the comparisons with the baseline by arm, and the declared comparisons, with a common correction.

    Each distinct pair of arms and metric is one test. Without declared comparisons, the correction covers the
    comparisons with the baseline.

    Args:
        manifest: The sweep.
        arms: The trials of each arm, by `identity`.
        against: The baseline of each arm that has one. A baseline is its own baseline and is not tested.
        verdicts: The verdict of each pair in a sweep with seeds until decided. Otherwise, Holm's correction is applied.
    """
    objective, values = manifest.metric, [one.values for one in arms.values()]
    family = family_of(manifest.comparisons, values, objective, against)
    if manifest.until_decided is None:
        found = _with_p_values(objective, arms, family)
    else:
        found = _by_looks(objective, arms, {pair: verdicts[pair] for pair in family}, manifest.until_decided.seeds)
    planned = [pair for pair in family if pair == (pair.arm, against.get(pair.arm), objective)]
    by_test = {pair.test: pair for pair in family}
    return {pair.arm: found[pair] for pair in planned}, [
        DeclaredTest(place, pair, comparison, by_test[pair.test] in planned)
        for place, pair in enumerate(declared_pairs(manifest.comparisons, values, objective, against))
        for comparison in [found[pair] if pair in found else mirrored(found[by_test[pair.test]])]
    ]


def family_size(manifest: SweepManifest, compared: Sequence[Comparison]) -> str | None:
    """Return the number of tests with a common correction as text.

    Return None if no comparisons were declared, or if none of the given comparisons is a test.
    """
    tested = [one for one in compared if one.p is not None or one.sequential is not None]
    if not manifest.comparisons or not tested:
        return None
    return f"{tested[0].tests} test{'s' * (tested[0].tests > 1)}"


def _with_p_values(objective: str, arms: Mapping[str, ArmTrials], family: Sequence[Pair]) -> dict[Pair, Comparison]:
    sides = [(arms[pair.arm], arms[pair.against], pair.metric) for pair in family]
    tested = paired_tests([(one.finals(objective, by), other.finals(objective, by)) for one, other, by in sides])
    found: dict[Pair, Comparison] = {}
    for pair, comparison, (one, other, metric) in zip(family, tested, sides, strict=True):
        (found[pair],) = with_images(metric, [comparison], [(one.finished(objective), other.finished(objective))])
    return found


def _by_looks(
    objective: str, arms: Mapping[str, ArmTrials], verdicts: Mapping[Pair, Verdict], seeds: Sequence[int]
) -> dict[Pair, Comparison]:
    ends = {key: one.finals(objective, objective) for key, one in arms.items()}
    found = [
        sequential_comparison(ends[pair.arm], ends[pair.against], verdict, seeds[: verdict.seeds], len(verdicts))
        for pair, verdict in verdicts.items()
    ]
    trials = [(arms[pair.arm].finished(objective), arms[pair.against].finished(objective)) for pair in verdicts]
    return dict(zip(verdicts, with_images(objective, found, trials), strict=True))
