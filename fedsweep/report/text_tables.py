"""Text tables for Markdown and terminals, including the tables of comparisons and of accuracies by domain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedsweep.report.arm_statistics import MEAN_OUT_OF_DOMAIN, ArmStatistics, printed
from fedsweep.report.choice import arms_on_test, by_validation
from fedsweep.report.family_of_tests import family_size
from fedsweep.report.holm_corrected_tests import Comparison, least_exact, pairs_for_exact
from fedsweep.report.other_images import why_no_images_with_baseline
from fedsweep.report.units_and_labels import (
    IN_DOMAIN,
    NOTHING,
    OUT_OF_DOMAIN,
    PERCENT,
    Units,
    names,
    settings,
    shown_p,
    shown_seeds,
    shown_verdict,
)
from fedsweep.results import SweepManifest
from fedsweep.results.history import MEAN_ACCURACY

GAP = 2  # spaces between columns on a terminal


def _on_one_line(value: object) -> object:
    """Join the lines of a text with spaces; return other values unchanged."""
    return " ".join(line for line in value.split("\n") if line) if isinstance(value, str) else value


# Inserted texts must not contain line breaks, since a line break followed by a dash starts a new list item.
TEMPLATES = Environment(  # noqa: S701 - no HTML
    loader=PackageLoader("fedsweep.report", ""), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    finalize=_on_one_line,
)  # fmt: skip
TEMPLATES.globals.update(least_exact=least_exact, pairs_for_exact=pairs_for_exact, shown_p=shown_p)


def texts(macro: str, **facts: object) -> list[str]:
    """Render the macro `macro` of `texts.jinja` with the variables `facts`, and return the items of the rendered list.

    Each item is on one line.
    """
    made = getattr(TEMPLATES.get_template("texts.jinja").module, macro)(**facts)
    items = f"\n{made}".split("\n- ")[1:]
    return [" ".join(line for line in item.split("\n") if line) for item in items]


@dataclass(frozen=True)
class TextColumn:
    """A column of a terminal table."""

    name: str
    cells: Sequence[str]
    heading: str
    """The heading, of one or several lines."""
    words: bool
    """True if cells are left-aligned, and false if they are right-aligned."""
    wraps: bool
    """True if cells may be broken between words."""
    enough: int | None = None
    """An upper bound of `width`, in terminal cells."""

    @property
    def width(self) -> int:
        """The width that the column needs, in terminal cells.

        If the attribute `enough` is set, the needed width is that of the longest line, but at most `enough`. Otherwise,
        it is the smallest width at which no word is broken, or at which no line is broken if `wraps` is false.
        """
        lines = [*self.heading.splitlines(), *self.cells]
        if self.enough is not None:
            return min(self.enough, max(map(cell_len, lines)))
        return max(cell_len(part) for line in lines for part in (line.split() if self.wraps else [line]))


def width_of(columns: Sequence[TextColumn]) -> int:
    """Return the smallest width of a table with the given columns, in terminal cells."""
    return sum(one.width + GAP for one in columns) - GAP


def fitting(columns: Sequence[TextColumn], width: int, order: Sequence[str]) -> tuple[list[TextColumn], Sequence[str]]:
    """Drop as few columns as possible so that the remaining columns fit into `width` terminal cells.

    Args:
        columns: The columns of the table.
        width: The available width, in terminal cells.
        order: The names of the columns that may be dropped, in the order of dropping.

    Returns:
        The remaining columns, and the names of the dropped columns.
    """
    for many in range(len(order) + 1):
        kept = [one for one in columns if one.name not in order[:many]]
        if width_of(kept) <= width:
            return kept, order[:many]
    return kept, order


def terminal_table(columns: Sequence[TextColumn], title: str | None = None) -> Table:
    """Return a `rich` table that never cuts off numbers."""
    grid = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for one in columns:
        grid.add_column(
            Text(one.heading), justify="left" if one.words else "right", no_wrap=not one.wraps, overflow="fold"
        )
    for row in zip(*(one.cells for one in columns), strict=True):
        grid.add_row(*map(Text, row))
    return grid


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[bool]) -> str:
    """Return a Markdown table.

    Args:
        head: The headings of the columns.
        rows: The cells of each row.
        words: One flag per column: true for a column of text (left-aligned), false for numbers (right-aligned).
    """
    rules = ["---" if word else "---:" for word in words]
    cells = [[*map(_escaped, head)], rules, *([*map(_escaped, row)] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def without_html(markdown: str) -> str:
    """Return Markdown in which a name such as `<script>` is text instead of an HTML element.

    >>> without_html("| <script>x</script> | <0.001 |")
    '| &lt;script>x&lt;/script> | <0.001 |'
    """
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", markdown)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True)
class Section:
    """A text table with a title and an explanation. Every row has as many cells as `head`, the list of headings."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    """The number of text columns, from the left; all other columns contain numbers."""
    explained: str
    papers: Sequence[bool] = ()
    """One flag per row: true if the row contains a paper's values for the arm above. Empty if no row does."""

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], words: int, explained: Sequence[str]) -> Section:
        """Return a section with a table of the given rows.

        Args:
            title: The title of the table.
            rows: A dict from column to text for each row. There is at least one row. All rows have the same columns.
            words: The number of text columns, from the left; all other columns contain numbers.
            explained: The sentences that explain the table.
        """
        return cls(title, [*rows[0]], [[*row.values()] for row in rows], words, " ".join(explained))

    def markdown(self) -> str:
        """Return the title, the table and the explanation as Markdown."""
        papers = self.papers or [False] * len(self.rows)
        rows = [[f"*{row[0]}*", *row[1:]] if paper else row for row, paper in zip(self.rows, papers, strict=True)]
        table = markdown_table(self.head, rows, [place < self.words for place in range(len(self.head))])
        return "\n\n".join([f"## {self.title}", table, self.explained])

    def terminal(self, width: int, order: Sequence[str]) -> tuple[Table, list[str]]:
        """Return the table for a terminal of `width` cells, and the names of the columns that did not fit.

        The columns in `order` are dropped one after another until the table fits.
        """
        columns = []
        for place, name in enumerate(self.head):
            words, cells = place < self.words, [row[place] for row in self.rows]
            columns.append(TextColumn(name, cells, name if words else name.replace(" ", "\n"), words, wraps=words))
        kept, dropped = fitting(columns, width, order)
        return terminal_table(kept, self.title), [name for name in self.head if name in dropped]


MARK = "*"
MARKED = f"Values marked {MARK} are out of domain: no client of that arm has images of the domain."
SIMULTANEOUS = "95% simultaneous"  # the column with simultaneous intervals
SEEDS_AND_IMAGES = "95% seeds and images"  # the column with intervals over seeds and images
PAPER = "paper"  # the label of a row with values from a paper


def by_domain(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """Return a table of the accuracies by domain, or None if there is only one domain or no finished trial."""
    arms = [one for one in arms_on_test(manifest, arms) if one.n]
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
        paper = [_cell(one, metric, printed(manifest, one, metric)) for metric in metrics]
        if any(value != NOTHING for value in paper):
            rows.append([PAPER, *[""] * (len(named) - 1), NOTHING, *paper])
            papers.append(True)
    explained = "Accuracy in percent on the test images at the last round, mean over the n finished trials."
    explained += " Only the arms that were chosen are shown." * by_validation(manifest) + f" {MARKED}" * held_out
    return Section("By domain", head, rows, len(settings(arms[0], dotted)), explained, papers)


def _cell(one: ArmStatistics, metric: str, value: float | None) -> str:
    marked = value is not None and metric in map(one.metric_on, one.held_out)
    return PERCENT.value(value) + MARK * marked


def against_baseline_by(
    manifest: SweepManifest, name: str, measured: SweepManifest, arms: Sequence[ArmStatistics]
) -> Section | None:
    """Return a table that compares arms with their baseline by another metric than the objective.

    Args:
        manifest: The sweep.
        name: The name of the metric for the title of the table.
        measured: The manifest with the metric in place of the objective.
        arms: The arms, with the statistics of the metric.
    """
    found = against_baseline(measured, arms)
    if found is None:
        return None
    explained = f"{instead_of_objective(manifest, measured.metric)} {found.explained}"
    return replace(found, title=comparison_title(name), explained=explained)


def comparison_title(name: str = "") -> str:
    """Return the title of the comparisons with the baseline; `name` names the metric if it is not the objective."""
    return f"Comparisons with the baseline{f', {name}' if name else ''}"


def instead_of_objective(manifest: SweepManifest, metric: str) -> str:
    """Return a sentence that names the metric of a table that does not show the objective."""
    return f"Metric: {metric} instead of the objective {manifest.metric}, with a Holm correction of its own."


def against_baseline(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """Return a table that compares arms with their baseline; None if no baseline arm has a finished trial."""
    arms = [one for one in arms if one.n]
    if not any(one.is_baseline for one in arms):
        return None
    dotted, units = names(manifest, arms), Units.of(manifest.metric, arms)
    compared = [one.comparison for one in arms if one.comparison is not None]
    images, simultaneous = any(one.images for one in compared), [one for one in compared if one.simultaneous]
    rows = []
    for one in arms:
        own = {"n": str(one.n), "mean": units.value(one.mean)}
        result, until = one.comparison or Comparison((), None), manifest.until_decided is not None
        own |= {} if until else {"95% of mean": units.interval(one.interval)}
        more = images, bool(simultaneous)
        found = sequential_cells(manifest, result, units, *more) if until else cells(result, units, *more)
        if one.is_baseline:
            found = {**dict.fromkeys(found, NOTHING), "difference": "baseline"}
        rows.append({**settings(one, dotted), **own, **found})
    named = len(settings(arms[0], dotted))
    tested = [one for one in compared if one.p is not None]
    explained = texts(
        "comparisons",
        tested=tested,
        percent=units.percent,
        until=manifest.until_decided,
        images=images,
        no_images=why_no_images_with_baseline(manifest.metric, arms),
        family=family_size(manifest, compared),
        simultaneous=simultaneous,
    )
    return Section.of(comparison_title(), rows, named, explained)


def simultaneous_cell(found: Comparison, units: Units) -> str:
    """Format the simultaneous interval of a comparison, with a mark if only the direction is significant."""
    return units.interval(found.simultaneous) + " (direction only)" * found.direction_only


def sequential_cells(
    manifest: SweepManifest, found: Comparison, units: Units, images: bool, simultaneous: bool = False
) -> dict[str, str]:
    """Return the cells of a comparison with seeds until decided; the arguments are those of `cells`."""
    own = found.sequential
    return {
        "seeds": NOTHING if own is None else str(own.seeds),
        "pairs": str(len(found.seeds)),
        "difference": units.difference(found.difference),
        "95% interval": units.interval(found.interval),
        **({SIMULTANEOUS: simultaneous_cell(found, units)} if simultaneous else {}),
        "95% one arm": units.interval(own.interval if own else None),
        **({SEEDS_AND_IMAGES: units.interval(found.images)} if images else {}),
        "90% equivalence": units.interval(own.equivalence_interval if own else None),
        "effect": NOTHING if found.effect is None else f"{found.effect:+.2f}",
        "verdict": shown_verdict(manifest, found, units),
    }


def cells(found: Comparison, units: Units, images: bool, simultaneous: bool = False) -> dict[str, str]:
    """Return the cells of a comparison, as a dict from column to text.

    If `images` and `simultaneous` are true, the cells contain the interval over seeds and images, and the simultaneous
    interval.

    The exact p-value is left out if there are so few pairs of seeds that this p-value cannot be 0.05 or less after
    Holm's correction.
    """
    return {
        "pairs": str(len(found.seeds)),
        "difference": units.difference(found.difference),
        "95% t": units.interval(found.interval),
        **({SIMULTANEOUS: simultaneous_cell(found, units)} if simultaneous else {}),
        "95% bootstrap": units.interval(found.bootstrap),
        **({SEEDS_AND_IMAGES: units.interval(found.images)} if images else {}),
        "p": shown_p(found.p),
        f"{found.correction} p": shown_p(found.p_holm),
        "exact p": shown_p(found.p_exact_holm if found.exact_can_tell else None),
        "effect": NOTHING if found.effect is None else f"{found.effect:+.2f}",
        "detectable": units.value(found.detectable),
        "seeds needed": shown_seeds(found.seeds_range, beyond=">10,000"),
    }
