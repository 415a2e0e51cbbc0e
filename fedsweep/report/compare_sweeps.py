"""Comparison of two arms, or of all arms that two sweeps have in common.

Arms are compared seed by seed, over the seeds that have finished in both arms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.report.arm_statistics import ArmStatistics, same_images, summarise
from fedsweep.report.family_of_tests import family_size
from fedsweep.report.formats import data_frame
from fedsweep.report.holm_corrected_tests import Comparison, mirrored, paired_tests
from fedsweep.report.other_images import why_no_images, with_images
from fedsweep.report.sentences import about_comparison
from fedsweep.report.text_tables import Section, cells, sequential_cells, texts
from fedsweep.report.units_and_labels import Units
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arm_names import select
from fedsweep.results.arms import arm_argument, arm_label, distinct_labels, equality
from fedsweep.results.seeds import UntilDecided

SHOWN = 12  # a sentence names at most this many hyperparameters or arms
LEFT_OUT_FIRST = (
    "95% bootstrap", "p", "exact p", "pairs", "seeds needed", "detectable", "effect", "n of A", "n of B", "Holm p",
    "Bonferroni p",
)  # fmt: skip
"""The columns that a narrow terminal hides, in the order in which they are hidden."""


@dataclass(frozen=True)
class Side:
    """Side A or side B of a comparison: a sweep, or a single arm of a sweep."""

    name: str
    """The name that the user gave."""
    manifest: SweepManifest
    arms: tuple[ArmStatistics, ...]
    num_arms: int
    """The number of arms of the sweep, also if the side is a single arm."""

    @classmethod
    def of(cls, name: str, manifest: SweepManifest, trials: Sequence[TrialRecord], arm: str | None) -> Side:
        """Return a side with the statistics of one arm of a sweep, or of all its arms if `arm` is None.

        `arm` is the name of an arm, in any form that `fedsweep.results.arm_names.select` accepts.

        Raises:
            UserError: No arm has this name, or several arms have it.
        """
        arms = summarise(manifest, trials)
        if arm is None:
            return cls(name, manifest, tuple(arms), len(arms))
        found = [arms[place] for place in select(arm, [one.arm.values for one in arms], manifest.varied)]
        if len(found) != 1:
            shown = [one.arm.values for one in (found or arms)[:SHOWN]]
            labels = "; ".join(distinct_labels(shown))
            says = (
                f"{len(found)} arms of that sweep have these values: {labels}"
                if found
                else f"no arm has these values. The arms are: {labels}"
            )
            raise UserError(f"`{name}` must name one arm by its values, but {says}.")
        return cls(name, manifest, tuple(found), len(arms))


@dataclass(frozen=True)
class Pairing:
    """Pairs of arms, one from side A and one from side B, and the comparison of each pair (B minus A)."""

    sides: tuple[Side, Side]
    pairs: tuple[tuple[ArmStatistics, ArmStatistics], ...]
    comparisons: tuple[Comparison, ...]
    choices: int = 1
    """The number of pairs of arms from which the user could pick; 1 if no pair was picked."""
    declared: bool = False
    """True if the only pair is one of the comparisons that the search space planned together with declared ones."""

    @classmethod
    def of(cls, first: Side, second: Side, by_arm: bool) -> Pairing:
        """Pair each arm of `first` with the same arm of `second`, and compare each pair.

        If `by_arm` is false, pair the only arm of `first` with the only arm of `second`. The p-values are then
        corrected for the number of pairs of arms that could have been picked. If the search space declared the pair
        before the sweep, they are corrected for the tests of the sweep instead, as in its report.

        Raises:
            UserError: The sides have different objectives or no arm in common, or the sides are identical.
        """
        one, other = first.manifest, second.manifest
        if (one.metric, one.mode) != (other.metric, other.mode):
            raise UserError(
                f"`{first.name}` and `{second.name}` must have the same objective to be compared, but they have "
                f"{one.metric} ({one.mode}) and {other.metric} ({other.mode})."
            )
        known = {equality(arm.arm.values): arm for arm in second.arms}
        keys = [equality(arm.arm.values) for arm in first.arms]
        common = [(arm, known[key]) for arm, key in zip(first.arms, keys, strict=True) if key in known]
        pairs = common if by_arm else [(first.arms[0], second.arms[0])]
        if not pairs:
            raise UserError(
                f"`{first.name}` and `{second.name}` have no arm in common. You can compare one arm of each, such as "
                f"`{first.name}:{arm_argument(first.arms[0].arm.values)}`."
            )
        if one.id == other.id and all(a.arm.values == b.arm.values for a, b in pairs):
            raise UserError(
                f"`{first.name}` and `{second.name}` must be different sweeps or arms, but they are the same."
            )
        same = one.id == other.id
        if same and not by_arm and (planned := _planned(one, *pairs[0])) is not None:
            return cls((first, second), tuple(pairs), (planned,), declared=True)
        among = first.num_arms * (first.num_arms - 1) // 2 if same else first.num_arms * second.num_arms
        choices = 1 if by_arm else among
        tested = paired_tests([(b.values, a.values) for a, b in pairs], choices)
        found = with_images(one.metric, tested, _finished(one.metric, pairs))
        return cls((first, second), tuple(pairs), tuple(found), choices)

    @property
    def units(self) -> Units:
        """The number format of the objective."""
        return Units.of(self.sides[0].manifest.metric, [one for pair in self.pairs for one in pair])

    def section(self) -> Section:
        """Return a table of the comparisons, with one row per pair of arms."""
        units, images, until = self.units, any(one.images for one in self.comparisons), self._until
        metric = self.sides[0].manifest.metric
        simultaneous = [one for one in self.comparisons if one.simultaneous] if self.declared else []
        more = images, bool(simultaneous)
        rows = [
            {
                "arm": self._label(one, other),
                **{"n of A": str(one.n), "mean of A": units.value(one.mean)},
                **{"n of B": str(other.n), "mean of B": units.value(other.mean)},
                **(
                    cells(found, units, *more)
                    if until is None
                    else sequential_cells(self.sides[1].manifest, found, units, *more)
                ),
            }
            for (one, other), found in zip(self.pairs, self.comparisons, strict=True)
        ]
        who = [
            f"{letter}: {side.manifest.name}, sweep {side.manifest.id}, experiment {side.manifest.experiment}."
            for letter, side in zip("AB", self.sides, strict=True)
        ]
        explained = texts(
            "comparisons",
            tested=self._tested,
            percent=units.percent,
            choices=self.choices,
            until=until,
            images=images,
            no_images=why_no_images(metric, self.comparisons, _finished(metric, self.pairs)),
            family=self._family,
            simultaneous=simultaneous,
        )
        return Section.of("Comparison", rows, 1, [*who, "Differences are B minus A.", *explained])

    def csv(self) -> str:
        """Return the comparisons as CSV in full precision, one row per pair of arms (see `records`)."""
        return data_frame.inert_csv(data_frame.of_records(self.records()))

    def records(self) -> list[dict[str, object]]:
        """Return one dict from column to value for each pair of arms.

        Columns that are also in the report's file `table.csv` have the same names as in that file.
        """
        rows = []
        for pair, found in zip(self.pairs, self.comparisons, strict=True):
            row: dict[str, object] = {}
            for letter, side, one in zip("ab", self.sides, pair, strict=True):
                row |= {f"space_{letter}": side.manifest.name, f"sweep_{letter}": side.manifest.id}
                row |= {f"arm_{letter}": arm_label(one.arm.values), f"n_{letter}": one.n}
                row |= {f"mean_{letter}": one.mean, f"sd_{letter}": one.sd}
            rows.append(
                {
                    **row,
                    "same_images": self._same_images(pair),
                    **data_frame.comparison_columns(found, self._until is not None, self.declared),
                }
            )
        return rows

    def findings(self) -> list[str]:
        """Return the results of the comparisons as sentences.

        The last sentence lists the hyperparameters in which side A and side B differ. If the two sides were tested on
        different images, the first sentence is a warning. If the pair was picked among several and tested, a sentence
        states the correction.
        """
        seeds = tuple(dict.fromkeys(seed for side in self.sides for seed in side.manifest.seeds))
        manifest = self.sides[1].manifest.model_copy(update={"seeds": seeds})
        said = [
            f"{self._label(*pair)}, B against A{', on different images' * (not self._same_images(pair))}: "
            f"{about_comparison(manifest, found, self.units, 'A')}"
            for pair, found in zip(self.pairs, self.comparisons, strict=True)
        ]
        caution = ["A and B were tested on different images, so a difference may come from the images alone."]
        picked = [
            f"The compared pair is one of {self.choices} pairs of arms that you could have picked, so its p-values are "
            f"multiplied by {self.choices}."
        ]
        by_looks = [
            "The seeds of A or B ran until a comparison was decided, so the intervals and p-values here, which assume "
            "a fixed number of seeds, are only approximate."
        ]
        subject = "Its p-values are" if self._until is None else "Its interval and its verdict are"
        planned = [
            f"The search space planned this comparison before the sweep. {subject} therefore corrected for the "
            f"family of {self._family}, as in the report, and not for all pairs that you could have picked."
        ]
        streams = [side.manifest.seed_streams for side in self.sides]
        partial = [
            f"The seeds of {' and '.join(name for name, one in zip('AB', streams, strict=True) if one)} determine only "
            "some of the random streams (`seed_streams`), so the intervals do not cover the variation of the others."
        ]
        looked = any(side.manifest.until_decided is not None for side in self.sides)
        cautions = [
            *by_looks * (looked and self._until is None),
            *partial * any(streams),
            *caution * (not all(map(self._same_images, self.pairs))),
            *picked * bool(self.choices > 1 and self._tested),
            *planned * (self._family is not None),
        ]
        return [*cautions, *said, self._apart()]

    @property
    def _family(self) -> str | None:
        """The number of tests of the family to which a declared pair belongs, as text."""
        return family_size(self.sides[0].manifest, self.comparisons) if self.declared else None

    @property
    def _until(self) -> UntilDecided | None:
        """The rule of the sweep if the only pair is a planned one of a sweep with seeds until decided."""
        return self.sides[0].manifest.until_decided if self.declared else None

    @property
    def _tested(self) -> list[Comparison]:
        """The comparisons that have a p-value."""
        return [one for one in self.comparisons if one.p is not None]

    def _label(self, first: ArmStatistics, second: ArmStatistics) -> str:
        here, there = arm_label(first.arm.values), arm_label(second.arm.values)
        return here if here == there else f"{here} / {there}"

    def _apart(self) -> str:
        """Return a sentence that lists the hyperparameters and derived values in which side A and side B differ.

        Only the first pair of arms is used: one trial of each arm is compared, if possible with the same seed.
        """
        first, second = (one.arm.trials for one in self.pairs[0])
        by_seed = {trial.plan.seed: trial for trial in second}
        pairs = [(trial, by_seed[trial.plan.seed]) for trial in first if trial.plan.seed in by_seed]
        plans = [trial.plan for trial in (*pairs, (first[0], second[0]))[0]]
        here, there = ({**flat(plan.config), **plan.derived} for plan in plans)
        different = [name for name in {**here, **there} if name != "seed" and here.get(name) != there.get(name)]
        if not different:
            return "All hyperparameters of A and B are equal."
        named = "; ".join(
            f"{name} ({here.get(name, 'not set')} and {there.get(name, 'not set')})" for name in different[:SHOWN]
        )
        more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        return f"A and B differ in {named}{more}."

    def _same_images(self, pair: tuple[ArmStatistics, ArmStatistics]) -> bool:
        digests = {trial.plan.digests.get("data") for one in pair for trial in one.arm.trials}
        return len(digests) == 1 and same_images(self.sides[0].manifest.metric, pair)


def _finished(
    metric: str, pairs: Sequence[tuple[ArmStatistics, ArmStatistics]]
) -> list[tuple[Mapping[int, TrialRecord], Mapping[int, TrialRecord]]]:
    """Return the finished trials of the arm of side B and of that of side A, by seed, for each pair of arms."""
    return [(other.arm.finished(metric), one.arm.finished(metric)) for one, other in pairs]


def _planned(manifest: SweepManifest, one: ArmStatistics, other: ArmStatistics) -> Comparison | None:
    """Return the comparison `other` minus `one` if a search space with declared comparisons planned it, or else None.

    The planned comparisons are the declared ones by the objective, and those with the baseline.
    """
    if not manifest.comparisons:
        return None
    for arm, against, turn in ((other, one, False), (one, other, True)):
        tests = [test.comparison for test in arm.declared if test.pair[1:] == (against.key, manifest.metric)]
        if arm.counterpart == against.key and arm.comparison is not None:
            tests.append(arm.comparison)
        if tests:
            return mirrored(tests[0]) if turn else tests[0]
    return None
