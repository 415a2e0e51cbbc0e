"""The ablation table: one set of cells for the terminal, Markdown, LaTeX and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsweep.report import two_objectives as front
from fedsweep.report.effects import Effects
from fedsweep.report.sections import Section, by_domain, comparisons
from fedsweep.report.sentences import caption, findings
from fedsweep.report.statistics import MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN, ArmStatistics, asked_columns
from fedsweep.report.trials_by_arm import notes
from fedsweep.report.wording import (
    IN_DOMAIN,
    NOTHING,
    OUT_OF_DOMAIN,
    PERCENT,
    Units,
    decimals,
    markdown_table,
    names,
    of_clients,
    settings,
    shown_p,
)
from fedsweep.results import SweepManifest
from fedsweep.results.arms import identity
from fedsweep.results.columns import TARGET, Column

PROSE = {"arm", "worst domain", "efficient", "note"}
"""Columns that are words: left-aligned, as are the hyperparameters."""

MEGABYTES = "megabytes/sent"
"""A second objective that has a column in any case."""


@dataclass(frozen=True)
class AblationTable:
    """A sweep's arms as a table; `arms` in the order of its rows, one at least."""

    manifest: SweepManifest
    arms: Sequence[ArmStatistics]

    @property
    def names(self) -> list[str]:
        """Dotted names of the columns that tell arms apart."""
        return names(self.manifest, self.arms)

    @property
    def compared(self) -> bool:
        """Whether the baseline arm is among the rows."""
        return any(one.is_baseline for one in self.arms)

    @property
    def means(self) -> dict[str, str]:
        """Where an arm holds out domains, the metrics of mean accuracy by column, without that in column `mean`."""
        columns = {IN_DOMAIN: MEAN_ACCURACY, OUT_OF_DOMAIN: MEAN_OUT_OF_DOMAIN}
        held_out = any(one.held_out for one in self.arms)
        return {name: metric for name, metric in columns.items() if held_out and metric != self.manifest.metric}

    def cells(self) -> list[dict[str, str]]:
        """Rows as text by column, without columns that are empty in every row."""
        rows = [settings(one, self.names) | self._numbers(one) for one in self.arms]
        optional = {"paper", "sd", *self.means, "worst client", "worst domain", "MB sent", "note"}
        optional -= {column.heading for column in asked_columns(self.manifest)}
        empty = {name for name in optional if all(row.get(name, NOTHING) == NOTHING for row in rows)}
        return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]

    def _numbers(self, one: ArmStatistics) -> dict[str, str]:
        units, found = Units.of(self.manifest.metric, self.arms), one.comparison
        row = {"n": str(one.n), "mean": units.value(one.mean), "paper": units.value(self.paper(one))}
        row["sd"] = units.value(one.sd)
        if self.compared:
            row |= {
                "difference": "baseline" if one.is_baseline else units.difference(found.difference if found else None),
                "95% interval": units.interval(found.interval if found else None),
                "Holm p": shown_p(found.p_holm if found else None),
            }
        # An arm without a mean is ranked by what it had reached: say it, apart from the means.
        reached = None if one.n else units.value
        return row | {
            **(self._asked(one) if self.manifest.columns else self._usual(one)),
            **self._second(one),
            "note": "; ".join(notes(one.arm, self.manifest.metric, reached)) or NOTHING,
        }

    def _usual(self, one: ArmStatistics) -> dict[str, str]:
        """What is shown where no columns are asked for."""
        worst = PERCENT.value(one.worst_domain)
        digits = decimals(other.megabytes for other in self.arms)
        return {
            **{name: PERCENT.value(one.accuracies.get(metric)) for name, metric in self.means.items()},
            **(
                {"worst client": PERCENT.value(one.worst_client)}
                if of_clients(self.manifest.metric)
                else {"worst domain": f"{worst} {one.worst_domain_name}" if one.worst_domain_name else worst}
            ),
            "MB sent": NOTHING if one.megabytes is None else f"{one.megabytes:.{digits}f}",
        }

    def _asked(self, one: ArmStatistics) -> dict[str, str]:
        """What the search space or `--columns` asks for."""
        return {column.heading: self._cell(one, column) for column in asked_columns(self.manifest)}

    def _cell(self, one: ArmStatistics, column: Column) -> str:
        """A mean over seeds; where some never reached a target, how many did."""
        value = one.columns[column.name]
        if value is None and column.name.startswith(TARGET) and one.n:
            return f"by {self.reached(one, column)} of {one.n}"
        if column.percent:
            return PERCENT.value(value)
        digits = column.digits
        if digits is None:
            digits = decimals(other.columns[column.name] for other in self.arms)
        return NOTHING if value is None else f"{value:.{digits}f}"

    @cached_property
    def targets(self) -> list[Column]:
        """The columns that ask after how many rounds something was reached."""
        return [column for column in asked_columns(self.manifest) if column.name.startswith(TARGET)]

    def reached(self, one: ArmStatistics, target: Column) -> int:
        """The number of finished seeds that reached it."""
        return sum(target.of(trial) is not None for trial in one.arm.finished(self.manifest.metric).values())

    @cached_property
    def weighed(self) -> dict[str, float]:
        """The second objective of each arm that has one, by its `identity`."""
        return front.weighed(self.manifest, self.arms)

    @cached_property
    def efficient(self) -> set[str]:
        """The arms that no other beats in two objectives, by their `identity`."""
        return {identity(one.arm.values) for one in front.on_front(self.manifest, self.arms)}

    def _second(self, one: ArmStatistics) -> dict[str, str]:
        """The second objective, unless it has a column already, and whether the arm is efficient."""
        against, key = self.manifest.against, identity(one.arm.values)
        if against is None:
            return {}
        own = (
            {}
            if against.metric == MEGABYTES
            else {against.metric: front.shown(against, self.weighed.get(key), self.weighed)}
        )
        return own | {"efficient": "yes" if key in self.efficient else NOTHING}

    def paper(self, one: ArmStatistics) -> float | None:
        """What a paper printed for the objective of this arm."""
        reference = self.manifest.reference
        return reference.value(one.arm.values, self.manifest.metric) if reference else None

    def findings(self) -> list[str]:
        """Plain sentences for below the table."""
        return [*findings(self.manifest, self.arms), *self.effects.findings()]

    @cached_property
    def effects(self) -> Effects:
        """What each of several factors does."""
        return Effects.of(self.manifest, self.arms)

    @property
    def sections(self) -> list[Section]:
        """What stands below the table."""
        tables = comparisons(self.manifest, self.arms), by_domain(self.manifest, self.arms)
        return [*(one for one in tables if one is not None), *self.effects.sections()]

    def caption(self) -> list[str]:
        """Sentences that a reader needs to judge the numbers."""
        said = caption(self.manifest, self.arms, self.cells()[0].keys())
        return [*said, *([self.effects.missing] if self.effects.missing else [])]

    def markdown(self) -> str:
        """The table with a title, its caption and the sentences; then the accuracies by domain."""
        rows = self.cells()
        words = [name in PROSE or name in self.names for name in rows[0]]
        table = markdown_table([*rows[0]], [[*row.values()] for row in rows], words)
        bullets = "\n".join(f"- {sentence}" for sentence in self.findings())
        head = f"# {self.manifest.name} around {self.manifest.experiment}"
        parts = [head, table, bullets, " ".join(self.caption()), *(one.markdown() for one in self.sections)]
        return "\n\n".join(part for part in parts if part) + "\n"
