"""The ablation table, whose cells are the same in the terminal, Markdown, LaTeX and the HTML page."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from fedsweep.report.arm_statistics import (
    MEAN_OUT_OF_DOMAIN,
    ArmStatistics,
    asked_columns,
    compared_by,
    notes,
    printed,
)
from fedsweep.report.choice import OnTest, arms_on_test, by_validation, efficient_arms, on_test_images
from fedsweep.report.declared_comparisons import DeclaredRow, declared_findings, declared_rows, declared_section
from fedsweep.report.differences_by_domain import DomainDifference, differences_by_domain, domain_differences
from fedsweep.report.effects import Effects
from fedsweep.report.experiment_setup import provenance, setup
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.sentences import caption, findings
from fedsweep.report.text_tables import (
    MARK,
    Section,
    against_baseline,
    against_baseline_by,
    by_domain,
    markdown_table,
    without_html,
)
from fedsweep.report.tuned_arms import about_tuning, tuned_cells
from fedsweep.report.units_and_labels import (
    IN_DOMAIN,
    NOTHING,
    OUT_OF_DOMAIN,
    PERCENT,
    Units,
    names,
    settings,
    shown_p,
    shown_verdict,
)
from fedsweep.report.untuned_model import about_untuned_model
from fedsweep.results import SweepManifest
from fedsweep.results.arms import is_accuracy
from fedsweep.results.history import MEAN_ACCURACY, is_of_clients
from fedsweep.results.table_columns import COLUMNS, TARGETS, Column

OF_CHOSEN = ("on test", "optimism")
"""Columns with the results of chosen arms on the test images."""
PROSE = {"arm", "worst domain", "efficient", "verdict", "note"}
"""Columns that are left-aligned besides the hyperparameters."""


@dataclass(frozen=True)
class AblationTable:
    """A table with one row per arm of a sweep. `arms` is not empty and is in the order of the rows."""

    manifest: SweepManifest
    arms: Sequence[ArmStatistics]

    @cached_property
    def names(self) -> list[str]:
        """The dotted names of the hyperparameters that differ between arms."""
        return names(self.manifest, self.arms)

    @cached_property
    def compared(self) -> bool:
        """True if a baseline arm is among the rows."""
        return any(one.is_baseline for one in self.arms)

    @cached_property
    def on_test(self) -> dict[str, OnTest]:
        """The values of chosen arms and baselines on the test images, by the `key` of the arm."""
        return on_test_images(self.manifest, self.arms)

    @cached_property
    def tested(self) -> set[str]:
        """The `key` of each arm whose results on the test images are shown (see `arms_on_test`)."""
        return {one.key for one in arms_on_test(self.manifest, self.arms)}

    @cached_property
    def means(self) -> dict[str, str]:
        """The metrics of the columns `in domain` and `out of domain`, as a dict from heading to metric.

        A metric that is the objective is left out, because the column `mean` already shows it. The dict is empty if no
        arm holds out a domain.
        """
        columns = {IN_DOMAIN: MEAN_ACCURACY, OUT_OF_DOMAIN: MEAN_OUT_OF_DOMAIN}
        held_out = any(one.held_out for one in self.arms) and not by_validation(self.manifest)
        return {name: metric for name, metric in columns.items() if held_out and metric != self.manifest.metric}

    def cells(self) -> list[dict[str, str]]:
        """Return the cells of each row, as a dict from column to text.

        Optional columns that are empty in every row are left out.
        """
        rows = [self._identity(one) | self._compared(one) | self._others(one) for one in self.arms]
        optional = {
            "on test",
            "optimism",
            "paper",
            "sd",
            *self.means,
            "worst client",
            "worst domain",
            "MB sent",
            "note",
        }
        return _without_empty(rows, optional - {column.heading for column in asked_columns(self.manifest)})

    def comparison_cells(self) -> list[dict[str, str]]:
        """Return the cells of the columns on the means and their differences from the baseline, as `cells` does.

        Only arms with a mean have a row.
        """
        rows = [self._identity(one) | self._compared(one) for one in self.arms if one.n]
        return _without_empty(rows, {"paper", "sd"})

    @cached_property
    def by_mean(self) -> dict[str, "AblationTable"]:
        """Tables that compare the arms by the means in or out of domain instead of the objective.

        They are keyed by `in domain` and `out of domain`. A mean by which no arm can be compared with its baseline is
        left out.
        """
        found: dict[str, AblationTable] = {}
        if self.manifest.until_decided is not None:  # the numbers of seeds depend on the objective
            return found
        for name, metric in self.means.items():
            arms = compared_by(self.manifest, self.arms, metric)
            if any(one.comparison is not None and one.comparison.seeds for one in arms):
                measured = self.manifest.model_copy(update={"metric": metric, "comparisons": ()})
                found[name] = AblationTable(measured, arms)
        return found

    def _identity(self, one: ArmStatistics) -> dict[str, str]:
        return settings(one, self.names) | tuned_cells(self.manifest, one)

    def _compared(self, one: ArmStatistics) -> dict[str, str]:
        units, found = Units.of(self.manifest.metric, self.arms), one.comparison or Comparison((), None)
        row = {
            "n": str(one.n),
            "mean": units.value(one.mean),
            "paper": units.value(printed(self.manifest, one, self.manifest.metric)),
            "sd": units.value(one.sd),
        }
        if self.on_test:
            tested = self.on_test.get(one.key)
            row["on test"] = units.value(tested.value if tested else None)
            row["optimism"] = units.difference(tested.optimism if tested else None)
        if self.compared:
            row["difference"] = "baseline" if one.is_baseline else units.difference(found.difference)
            row["95% interval"] = units.interval(found.interval)
            if self.manifest.until_decided is None:
                row["Holm p"] = shown_p(found.p_holm)
            else:
                row["verdict"] = shown_verdict(self.manifest, found, units)
        return row

    def _others(self, one: ArmStatistics) -> dict[str, str]:
        asked = asked_columns(self.manifest)
        own = {column.heading: self._cell(one, column) for column in asked}
        row = own if asked else self._usual(one)
        for metric in self.second_column:
            row[metric] = Units.fit(is_accuracy(metric), (other.second for other in self.arms)).value(one.second)
        if self.manifest.against is not None:
            row["efficient"] = "yes" if one.key in self.efficient else NOTHING
        # An arm without a mean is ranked by the value that it had reached, so the note shows this value.
        reached = None if one.n else Units.of(self.manifest.metric, self.arms).value
        return row | {"note": "; ".join(notes(one.arm, self.manifest.metric, reached)) or NOTHING}

    def _usual(self, one: ArmStatistics) -> dict[str, str]:
        row = {name: PERCENT.value(one.accuracies.get(metric)) for name, metric in self.means.items()}
        if is_of_clients(self.manifest.metric):  # a metric of the clients' own models
            row["worst client"] = self._cell(one, COLUMNS["worst_client"])
        elif not by_validation(self.manifest):
            row["worst domain"] = self._cell(one, COLUMNS["worst_domain"])
        return row | {"MB sent": self._cell(one, COLUMNS["megabytes"])}

    def _cell(self, one: ArmStatistics, column: Column) -> str:
        """Return the text of a cell, which is usually the mean over the finished seeds.

        The accuracy on a domain that the arm holds out is marked with an asterisk. A target column, such as
        `rounds_to=0.7`, has no mean if some seeds missed the target. The cell then shows the number of seeds that
        reached the target.
        """
        value = self.column_value(one, column)
        if value is not None and column.name == "worst_domain" and one.worst_domain_name:
            return f"{PERCENT.value(value)} {one.worst_domain_name}"
        if value is None and column.name.startswith(TARGETS) and one.n:
            return f"by {self.reached(one, column)} of {one.n}"
        fit = Units.fit(column.percent, (other.columns[column.name] for other in self.arms))
        cell = (fit if column.digits is None else replace(fit, decimals=column.digits)).value(value)
        return cell + MARK * (value is not None and column.of_domain and column.name in one.held_out)

    def column_value(self, one: ArmStatistics, column: Column) -> float | None:
        """Return the value of a column, or None if the results of this arm on the test images are not shown."""
        return None if column.on_test and one.key not in self.tested else one.columns[column.name]

    def reached(self, one: ArmStatistics, target: Column) -> int:
        """Return the number of finished seeds that reached the target of a column such as `rounds_to=0.7`."""
        return sum(target.of(trial) is not None for trial in one.arm.finished(self.manifest.metric).values())

    @property
    def second_column(self) -> tuple[str, ...]:
        """A tuple that contains the metric of the second objective.

        The tuple is empty if there is no second objective, or if the default column `MB sent` shows the metric.
        """
        against = self.manifest.against
        return () if against is None or against.metric == "megabytes/sent" else (against.metric,)

    @cached_property
    def efficient(self) -> set[str]:
        """The `key` of each Pareto-efficient arm."""
        return {one.key for one in efficient_arms(self.manifest, self.arms)}

    def findings(self) -> list[str]:
        """Return the findings on arms and factors, which are shown below the table."""
        found = [*findings(self.manifest, self.arms), *declared_findings(self.declared), *self.effects.findings]
        return [*about_untuned_model(self.manifest, self.arms), *found]

    @cached_property
    def declared(self) -> list[DeclaredRow]:
        """The comparisons that the search space declares besides those with the baseline, in its order."""
        return declared_rows(self.manifest, self.arms)

    @cached_property
    def domain_differences(self) -> list[DomainDifference]:
        """The differences between arms and their baseline on each domain."""
        return domain_differences(self.manifest, self.arms)

    @cached_property
    def effects(self) -> Effects:
        """The effects of the factors of a grid, or the importances of the hyperparameters of a search."""
        return Effects.of(self.manifest, self.arms)

    @property
    def sections(self) -> list[Section]:
        """The tables that follow the ablation table."""
        means = (against_baseline_by(self.manifest, name, one.manifest, one.arms) for name, one in self.by_mean.items())
        planned = against_baseline(self.manifest, self.arms), declared_section(self.arms, self.declared)
        differences = differences_by_domain(self.manifest, self.arms, self.domain_differences)
        shown = *planned, *means, by_domain(self.manifest, self.arms), differences
        return [*(one for one in shown if one is not None), *self.effects.sections]

    def caption(self) -> list[str]:
        """Return the legend of the table, as a list of sentences."""
        said = caption(self.manifest, self.arms, self.cells()[0])
        return [*about_tuning(self.manifest, self.arms), *said, *filter(None, [self.effects.missing])]

    def markdown(self) -> str:
        """Return the title, setup, table, findings, legend and sections as Markdown."""
        rows = self.cells()
        words = [name in PROSE or name in self.names for name in rows[0]]
        table = markdown_table([*rows[0]], [[*row.values()] for row in rows], words)
        bullets = "\n".join(f"- {sentence}" for sentence in self.findings())
        head = f"# {self.manifest.name}, on experiment {self.manifest.experiment}"
        facts = "\n".join(one.markdown() for one in (*setup(self.arms), *provenance(self.manifest, self.arms)))
        rest = [table, bullets, " ".join(self.caption()), *(one.markdown() for one in self.sections)]
        parts = [without_html(head), facts, *map(without_html, rest)]
        return "\n\n".join(part for part in parts if part) + "\n"


def _without_empty(rows: Sequence[dict[str, str]], optional: Set[str]) -> list[dict[str, str]]:
    """Return the rows of a table without the columns in `optional` that are empty in every row."""
    empty = {name for name in optional if all(row.get(name, NOTHING) == NOTHING for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]
