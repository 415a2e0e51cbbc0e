"""Every number of the comparison with the baseline, as a section below the table, and when exact tests can tell."""

from __future__ import annotations

from collections.abc import Sequence

from fedsweep.report.comparison import Comparison, least_exact, pairs_for_exact
from fedsweep.report.intervals import LEAST_RESAMPLED
from fedsweep.report.section import Section
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import NOTHING, Units, names, settings, shown_p
from fedsweep.results import SweepManifest

HEAD = (
    "n", "mean", "95% of mean", "pairs", "difference", "95% t", "95% bootstrap", "p", "Holm p", "exact p", "effect",
    "detectable", "seeds needed",
)  # fmt: skip


def comparisons(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """The section, of the arms with a finished trial; None where the baseline has none."""
    arms = [one for one in arms if one.n]
    if not any(one.is_baseline for one in arms):
        return None
    dotted, units = names(manifest, arms), Units.of(manifest.metric, arms)
    rows = []
    for one in arms:
        found = one.comparison or Comparison((), None)
        own = [str(one.n), units.value(one.mean), units.interval(one.interval)]
        against = [NOTHING, "baseline", *[NOTHING] * (len(HEAD) - 5)] if one.is_baseline else cells(found, units)
        rows.append([*settings(one, dotted).values(), *own, *against])
    named = len(settings(arms[0], dotted))
    tested = [one.comparison for one in arms if one.comparison is not None and one.comparison.p is not None]
    head = [*settings(arms[0], dotted), *HEAD]
    return Section("Comparisons with the baseline", head, rows, named, " ".join(explained(tested, units)))


def cells(found: Comparison, units: Units) -> list[str]:
    """The numbers of one comparison, without the exact p where it could not fall to the level."""
    return [
        str(len(found.seeds)),
        units.difference(found.difference),
        units.interval(found.interval),
        units.interval(found.bootstrap),
        shown_p(found.p),
        shown_p(found.p_holm),
        shown_p(found.p_exact_holm if found.exact_can_tell else None),
        NOTHING if found.effect is None else f"{found.effect:+.2f}",
        units.value(found.detectable),
        _seeds(found),
    ]


def _seeds(found: Comparison) -> str:
    if found.seeds_needed is not None:
        return str(found.seeds_needed)
    return ">10000" if found.verdict == "no detectable difference" and found.effect is not None else NOTHING


def explained(tested: Sequence[Comparison], units: Units) -> list[str]:
    """What the columns are, in sentences."""
    points = ", in percentage points" * units.percent
    said = [
        f"Differences are over common seeds{points}. 95% intervals, uncorrected: of the mean and of the "
        "difference by Student's t, and of the difference by a studentized bootstrap, "
        f"which takes {LEAST_RESAMPLED} pairs.",
        "p: paired t-test. Effect: Hedges' g of the paired differences, their mean over their standard deviation.",
    ]
    if tested:
        first = ", the level of Holm's first step" * (len(tested) > 1)
        said.append(
            f"Detectable: the smallest difference that so many seeds detect in 4 of 5 sweeps, at the spread seen here "
            f"and at {tested[0].level:.3g}{first}. Seeds needed: those that would detect this difference so; rough, "
            "because difference and spread are estimates themselves."
        )
        said.append(exact(tested))
    return said


def exact(tested: Sequence[Comparison]) -> str:
    """Whether exact tests are shown, and how many pairs they take; of comparisons that are tested, one at least."""
    pairs = max(len(one.seeds) for one in tested)
    if any(one.exact_can_tell for one in tested):
        all_can = all(one.exact_can_tell for one in tested)
        where = "" if all_can else f"; of fewer than {pairs_for_exact(tested[0].level)} pairs it could not tell"
        return f"Exact p: sign-flip test, Holm-corrected; it assumes no normal spread{where}."
    after = f" and {pairs_for_exact(tested[0].level)} for these {len(tested)} after Holm's correction" * (
        len(tested) > 1
    )
    return (
        f"No exact test: of {pairs} pairs a sign-flip or Wilcoxon p cannot fall below {least_exact(pairs):g}; "
        f"6 pairs are the least for 0.05{after}."
    )
