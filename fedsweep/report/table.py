"""The ablation table: one set of cells for terminal and Markdown, and the same numbers in full precision as CSV."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from fedsweep.arms import IN_WORDS, identity
from fedsweep.marks import SYNTHETIC
from fedsweep.report import front
from fedsweep.report.arms import ended, notes
from fedsweep.report.by_domain import by_domain
from fedsweep.report.prose import caption, findings
from fedsweep.report.statistics import MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN, ArmStatistics, domain_metric
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
from fedsweep.store import SweepManifest

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
        empty = {name for name in optional if all(row.get(name, NOTHING) == NOTHING for row in rows)}
        return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]

    def _numbers(self, one: ArmStatistics) -> dict[str, str]:
        units, found = Units.of(self.manifest.metric, self.arms), one.comparison
        row = {"n": str(one.n), "mean": units.value(one.mean), "paper": units.value(self._paper(one))}
        row["sd"] = units.value(one.sd)
        if self.compared:
            row |= {
                "difference": "baseline" if one.is_baseline else units.difference(found.difference if found else None),
                "95% interval": units.interval(found.interval if found else None),
                "Holm p": shown_p(found.p_holm if found else None),
            }
        worst = PERCENT.value(one.worst_domain)
        digits = decimals(other.megabytes for other in self.arms)
        # An arm without a mean is ranked by what it had reached: say it, apart from the means.
        reached = None if one.n else units.value
        return row | {
            **{name: PERCENT.value(one.accuracies.get(metric)) for name, metric in self.means.items()},
            **(
                {"worst client": PERCENT.value(one.worst_client)}
                if of_clients(self.manifest.metric)
                else {"worst domain": f"{worst} {one.worst_domain_name}" if one.worst_domain_name else worst}
            ),
            "MB sent": NOTHING if one.megabytes is None else f"{one.megabytes:.{digits}f}",
            **self._second(one),
            "note": "; ".join(notes(one.arm, self.manifest.metric, reached)) or NOTHING,
        }

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

    def _paper(self, one: ArmStatistics) -> float | None:
        """What a paper printed for the objective of this arm."""
        reference = self.manifest.reference
        return reference.value(one.arm.values, self.manifest.metric) if reference else None

    def findings(self) -> list[str]:
        """Plain sentences for below the table."""
        return findings(self.manifest, self.arms)

    def caption(self) -> list[str]:
        """Sentences that a reader needs to judge the numbers."""
        return caption(self.manifest, self.arms)

    def frame(self) -> pd.DataFrame:
        """Full precision, one row per arm; accuracies 0 to 1, intervals and differences in the objective's own unit."""
        frame = pd.DataFrame([self._record(one) for one in self.arms])
        counts = [name for name in ("n_common", "last_round") if name in frame]
        return frame.astype(dict.fromkeys(counts, "Int64"))

    def _record(self, one: ArmStatistics) -> dict[str, object]:
        values = {
            name: json.dumps(value) if isinstance(value, list | dict) else value
            for name, value in one.arm.values.items()
        }
        paper, printed = self.manifest.reference, self._paper(one)
        furthest, reached = one.arm.reached(self.manifest.metric)
        counts = Counter(ended(trial) for trial in one.arm.trials)
        return {
            **{name: values.get(name) for name in self.names if name not in IN_WORDS},
            **({"arm": settings(one, self.names)["arm"]} if {*IN_WORDS} & {*self.names} else {}),
            "n": one.n,
            "mean": one.mean,
            "sd": one.sd,
            "mean_of_last_4_rounds": one.mean_of_last,
            **(
                {"reference": printed, "reference_source": paper.source if printed is not None else None}
                if paper
                else {}
            ),
            **(_tests(one) if self.compared else {}),
            "worst_client_accuracy": one.worst_client,
            "worst_domain_accuracy": one.worst_domain,
            "worst_domain": one.worst_domain_name,
            **{metric: one.accuracies.get(metric) for metric in self._accuracies()},
            **({SYNTHETIC: one.marks.get(SYNTHETIC)} if self._synthetic else {}),
            "megabytes_sent": one.megabytes,
            **self._second_in_full(one),
            **{how: counts[how] for how in ("finished", "pruned", "diverged", "failed", "unfinished")},
            "last_round": furthest if furthest >= 0 else None,
            "value_at_last_round": reached,
            "note": "; ".join(notes(one.arm, self.manifest.metric)),
        }

    def _second_in_full(self, one: ArmStatistics) -> dict[str, object]:
        against, key = self.manifest.against, identity(one.arm.values)
        if against is None:
            return {}
        own: dict[str, object] = {} if against.metric == MEGABYTES else {against.metric: self.weighed.get(key)}
        return own | {"efficient": key in self.efficient}

    def _accuracies(self) -> list[str]:
        """The metrics of single domains, in and out of domain where they are so in some arm, and of their means."""
        found = {metric for one in self.arms for metric in one.accuracies}
        domains = [domain_metric(name, held_out) for held_out in (False, True) for name in self.manifest.domains]
        return [metric for metric in [*self.means.values(), *domains] if metric in found]

    @property
    def _synthetic(self) -> bool:
        """Whether a column says where synthetic images are from; where they are varied, one does already."""
        return SYNTHETIC not in self.names and any(SYNTHETIC in one.marks for one in self.arms)

    def csv(self) -> str:
        """`frame` as CSV; floats in the shortest digits that read back to the same bits."""
        return self.frame().to_csv(index=False)

    def markdown(self) -> str:
        """The table with a title, its caption and the sentences; then the accuracies by domain."""
        rows = self.cells()
        words = [name in PROSE or name in self.names for name in rows[0]]
        table = markdown_table([*rows[0]], [[*row.values()] for row in rows], words)
        bullets = "\n".join(f"- {sentence}" for sentence in self.findings())
        head = f"# {self.manifest.name} around {self.manifest.experiment}"
        domains = by_domain(self.manifest, self.arms)
        parts = [head, table, bullets, " ".join(self.caption()), domains.markdown() if domains else ""]
        return "\n\n".join(part for part in parts if part) + "\n"


def _tests(one: ArmStatistics) -> dict[str, object]:
    """The columns of the comparison with the baseline; empty in the baseline's own row."""
    found = one.comparison
    low, high = found.interval if found and found.interval else (None, None)
    return {
        "baseline": one.is_baseline,
        "n_common": len(found.seeds) if found else None,
        "difference": found.difference if found else None,
        "interval_low": low,
        "interval_high": high,
        "p": found.p if found else None,
        "p_holm": found.p_holm if found else None,
        "verdict": found.verdict if found else None,
    }
