"""Sections of a report: paired comparisons, and accuracy by domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedsweep.report.intervals import LEAST_RESAMPLED
from fedsweep.report.paired_comparison import Comparison, least_exact, pairs_for_exact
from fedsweep.report.statistics import MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN, ArmStatistics
from fedsweep.report.wording import (
    IN_DOMAIN,
    NOTHING,
    OUT_OF_DOMAIN,
    PERCENT,
    Units,
    markdown_table,
    names,
    settings,
    shown_p,
)
from fedsweep.results import SweepManifest

GAP = 2
"""Blanks between columns on a terminal."""


@dataclass(frozen=True)
class Section:
    """Cells as text; all rows as long as the head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    """So many columns from the left are words; the others are numbers."""
    explained: str
    papers: Sequence[bool] = ()
    """Of each row whether it is what a paper printed for the arm above; none where it is empty."""

    def markdown(self) -> str:
        """Heading, table and explanation."""
        papers = self.papers or [False] * len(self.rows)
        rows = [[f"*{row[0]}*", *row[1:]] if paper else row for row, paper in zip(self.rows, papers, strict=True)]
        table = markdown_table(self.head, rows, [place < self.words for place in range(len(self.head))])
        return "\n\n".join([f"## {self.title}", table, self.explained])

    def fitting(self, width: int, order: Sequence[str]) -> tuple[Section, list[str]]:
        """The section without as many of the columns in `order` as `width` cells take, and those that were left out."""
        ways = (order[:many] for many in range(len(order) + 1))
        dropped = next((names for names in ways if self._width(names) <= width), order)
        kept = [place for place, name in enumerate(self.head) if name not in dropped]
        rows = [[row[place] for place in kept] for row in self.rows]
        words = sum(place < self.words for place in kept)
        head = [self.head[place] for place in kept]
        return replace(self, head=head, rows=rows, words=words), [name for name in self.head if name in dropped]

    def _width(self, dropped: Sequence[str]) -> int:
        """The least width at which nothing but words between spaces is broken."""
        widths = []
        for place, name in enumerate(self.head):
            if name not in dropped:
                cells = [row[place] for row in self.rows]
                broken = [word for cell in cells for word in cell.split()] if place < self.words else cells
                widths.append(max(map(cell_len, [*name.split(), *broken])))
        return sum(widths) + GAP * (len(widths) - 1)

    def terminal(self) -> Table:
        """The cells for a `rich` console; headings and words may be folded, numbers not."""
        grid = Table(
            box=SIMPLE_HEAD,
            title=self.title,
            title_justify="left",
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, name in enumerate(self.head):
            words = place < self.words
            heading = name if words else name.replace(" ", "\n")
            grid.add_column(Text(heading), justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for row in self.rows:
            grid.add_row(*map(Text, row))
        return grid


EXPLAINED = "Accuracy at the last round in percent, mean over n finished trials."
MARK = "*"
MARKED = f"With {MARK}: out of domain, no client of that arm has images of the domain."
PAPER = "paper"
"""What a paper's row is called, in the place of an arm."""


def by_domain(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """The section; None where there is one domain, or no finished trial."""
    arms = [one for one in arms if one.n]
    if len(manifest.domains) < 2 or not arms:
        return None
    dotted, held_out = names(manifest, arms), any(one.held_out for one in arms)
    apart = {f"mean {IN_DOMAIN}": MEAN_ACCURACY, f"mean {OUT_OF_DOMAIN}": MEAN_OUT_OF_DOMAIN}
    means = apart if held_out else {"mean": MEAN_ACCURACY}
    head = [*settings(arms[0], dotted), "n", *manifest.domains, *means]
    rows: list[list[str]] = []
    papers: list[bool] = []
    for one in arms:
        named = [*settings(one, dotted).values()]
        metrics = [*map(one.metric_on, manifest.domains), *means.values()]
        rows.append([*named, str(one.n), *(_cell(one, metric, one.accuracies.get(metric)) for metric in metrics)])
        papers.append(False)
        paper = [_cell(one, metric, _printed(manifest, one, metric)) for metric in metrics]
        if any(value != NOTHING for value in paper):
            rows.append([PAPER, *[""] * (len(named) - 1), NOTHING, *paper])
            papers.append(True)
    explained = " ".join([EXPLAINED, *([MARKED] if held_out else [])])
    return Section("By domain", head, rows, len(settings(arms[0], dotted)), explained, papers)


def _printed(manifest: SweepManifest, one: ArmStatistics, metric: str) -> float | None:
    """A paper's value."""
    return manifest.reference.value(one.arm.values, metric) if manifest.reference else None


def _cell(one: ArmStatistics, metric: str, value: float | None) -> str:
    """A value in percent, marked where it is of a domain that the arm's clients do not have."""
    marked = value is not None and metric in map(one.metric_on, one.held_out)
    return PERCENT.value(value) + MARK * marked


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
