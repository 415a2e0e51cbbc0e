"""The declared comparisons of a sweep: their table and their findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsweep.report.arm_statistics import ArmStatistics, mean, same_images
from fedsweep.report.family_of_tests import DeclaredTest, family_size
from fedsweep.report.holm_corrected_tests import Comparison, Verdict
from fedsweep.report.sentences import about_comparison, pair_label
from fedsweep.report.text_tables import (
    SEEDS_AND_IMAGES,
    SIMULTANEOUS,
    Section,
    simultaneous_cell,
    texts,
)
from fedsweep.report.units_and_labels import Units, arm_words, names, shown_p, shown_verdict
from fedsweep.results import SweepManifest
from fedsweep.results.arms import is_accuracy

TITLE = "Declared comparisons"
SENTENCES = 8  # if more comparisons are declared, one sentence names those that are decided
REST: Mapping[str, tuple[Verdict, ...]] = {
    "show no detectable difference": ("no detectable difference",),
    "are equivalent": ("within",),
    "are undecided": ("out of reach", "open at the limit"),
    "are not decided yet": ("open",),
    "cannot be tested": ("constant", "too few seeds"),
}
"""The words for verdicts that show no significant difference."""


@dataclass(frozen=True)
class DeclaredRow:
    """A declared comparison: the difference `one` minus `other`, by the metric of `test`."""

    one: ArmStatistics
    other: ArmStatistics
    test: DeclaredTest
    manifest: SweepManifest
    units: Units
    """The number format of the metric."""
    dotted: Sequence[str]
    """The dotted names of all hyperparameters that vary in the sweep."""

    @property
    def found(self) -> Comparison:
        """The result of the comparison."""
        return self.test.comparison

    @property
    def on_different_images(self) -> bool:
        """True if the metric of the two arms was computed on images of different domains."""
        return bool(self.found.seeds) and not same_images(self.test.pair.metric, [self.one, self.other])

    @property
    def label(self) -> str:
        """The two arms in words, such as `lr 0.1, rank 4 against 8`, and the metric if it is not the objective."""
        words = pair_label(self.one.arm.values, self.other.arm.values, self.dotted)
        metric = self.test.pair.metric
        return words if metric == self.manifest.metric else f"{words}, {metric}"

    @property
    def finding(self) -> str:
        """The result of the comparison in sentences."""
        objective = self.test.pair.metric == self.manifest.metric
        measured = self.manifest if objective else self.manifest.model_copy(update={"mode": "max"})
        images = ", on different images" * self.on_different_images
        return f"{self.label}{images}: {about_comparison(measured, self.found, self.units, 'the other arm')}"

    @property
    def in_short(self) -> str:
        """The result of the comparison as a phrase."""
        return f"{self.label} {self.units.difference(self.found.difference)}{' points' * self.units.percent}"

    def cells(self, metric: bool, simultaneous: bool, images: bool) -> dict[str, str]:
        """Return the cells of the row, as a dict from column to text.

        Args:
            metric: Whether there is a column with the metric.
            simultaneous: Whether there is a column with the simultaneous interval.
            images: Whether there is a column with the interval over seeds and images.
        """
        found, units = self.found, self.units
        against = arm_words(self.other.arm.values, self.dotted)
        return {
            "arm": arm_words(self.one.arm.values, self.dotted),
            "against": f"{against} (different images)" if self.on_different_images else against,
            **({"metric": self.test.pair.metric} if metric else {}),
            "n": str(len(found.seeds)),
            "difference": units.difference(found.difference),
            "95% interval": units.interval(found.interval),
            **({SIMULTANEOUS: simultaneous_cell(found, units)} if simultaneous else {}),
            **({SEEDS_AND_IMAGES: units.interval(found.images)} if images else {}),
            **(
                {"Holm p": shown_p(found.p_holm)}
                if self.manifest.until_decided is None
                else {"verdict": shown_verdict(self.manifest, found, units)}
            ),
        }


def declared_rows(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[DeclaredRow]:
    """Return the declared comparisons in the order of the search space; empty if no trial has finished."""
    if not any(one.n for one in arms):
        return []
    by_key, dotted = {one.key: one for one in arms}, names(manifest, arms)
    units = {metric: _units(manifest, arms, metric) for metric in {t.pair.metric for one in arms for t in one.declared}}
    found = [
        DeclaredRow(one, by_key[test.pair.against], test, manifest, units[test.pair.metric], dotted)
        for one in arms
        for test in one.declared
    ]
    return sorted(found, key=lambda row: row.test.place)


def _units(manifest: SweepManifest, arms: Sequence[ArmStatistics], metric: str) -> Units:
    if metric == manifest.metric:
        return Units.of(metric, arms)
    return Units.fit(is_accuracy(metric), (mean(one.arm.finals(manifest.metric, metric).values()) for one in arms))


def declared_cells(rows: Sequence[DeclaredRow]) -> list[dict[str, str]]:
    """Return the cells of each row.

    The metric has a column unless it is the objective in all rows. The simultaneous interval and the interval over
    seeds and images have a column if at least one row has such an interval.
    """
    metric = any(row.test.pair.metric != row.manifest.metric for row in rows)
    simultaneous, images = any(row.found.simultaneous for row in rows), any(row.found.images for row in rows)
    return [row.cells(metric, simultaneous, images) for row in rows]


def declared_section(arms: Sequence[ArmStatistics], rows: Sequence[DeclaredRow]) -> Section | None:
    """Return the table of the declared comparisons, or None if there is none.

    Args:
        arms: All arms of the sweep.
        rows: The declared comparisons.
    """
    if not rows:
        return None
    cells, tested = declared_cells(rows), [row for row in rows if _is_test(row.found)]
    explained = texts(
        "declared",
        tested=[row.found for row in tested],
        tests=family_size(rows[0].manifest, [row.found for row in tested]),
        with_baseline=sum(one.comparison is not None and _is_test(one.comparison) for one in arms),
        both=sum(row.test.with_baseline for row in tested),
        simultaneous=[row.found for row in rows if row.found.simultaneous],
        by_looks=rows[0].manifest.until_decided is not None,
        images=any(row.found.images for row in rows),
    )
    return Section.of(TITLE, cells, 3 if "metric" in cells[0] else 2, explained)


def _is_test(found: Comparison) -> bool:
    """Return whether a comparison counts in the size of its family."""
    return found.p is not None or found.sequential is not None


def declared_findings(rows: Sequence[DeclaredRow]) -> list[str]:
    """Return a finding for each declared comparison that is not also a comparison with the baseline.

    The comparisons with the baseline have findings of their own. If there are more than eight others, one finding names
    the significant differences among them, at most eight, and counts the rest.
    """
    others = [row for row in rows if not row.test.with_baseline]
    if len(others) <= SENTENCES:
        return [row.finding for row in others]
    decided = [row for row in others if row.found.verdict in ("higher", "lower")]
    said = f"Declared comparisons: {len(decided)} of {len(others)} show a significant difference"
    if decided:
        more = f"; and {len(decided) - SENTENCES} more" * (len(decided) > SENTENCES)
        said += f": {'; '.join(row.in_short for row in decided[:SENTENCES])}{more}"
    counted = Counter(row.found.verdict for row in others if row not in decided)
    rest = [
        f"{many} {words if many > 1 else words.replace('show', 'shows').replace('are', 'is')}"
        for words, kinds in REST.items()
        if (many := sum(counted[kind] for kind in kinds))
    ]
    return [f"{said}. {' and '.join([', '.join(rest[:-1])] * (len(rest) > 1) + rest[-1:])}." if rest else f"{said}."]
