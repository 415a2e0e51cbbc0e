"""A sweep's report as one HTML file that needs nothing else: no server, no network, no file beside it."""

import base64
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedsweep.report.arms import ended, final
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.page.vector import inline
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.wording import NOTHING, Units, arm_words
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import arm_label

TEMPLATE, LOOK, SCRIPT = "report.html.jinja", "report.css", "report.js"
LONG = 36
"""Letters of a cell that may be broken into lines."""
MANY = 10
"""Columns; tables of more are set smaller."""
SENTENCES = 8
"""Findings that are seen at once; the others unfold."""
DIGITS = 12
"""Of a digest; the manifest has all."""


@dataclass(frozen=True)
class Row:
    """An arm with its finished trials' number and its cells by column."""

    n: int
    cells: Mapping[str, str]
    is_baseline: bool


def html(
    table: AblationTable, figures: Sequence[Figure], trials: Sequence[TrialRecord], question: str | None = None
) -> str:
    """The page: the same bytes for the same sweep. `question` is what was asked, in the search space's own words."""
    cells = table.cells()
    rows = [Row(one.n, cells, one.is_baseline) for one, cells in zip(table.arms, cells, strict=True)]
    script = files(__name__).joinpath(SCRIPT).read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    manifest = table.manifest
    return environment.get_template(TEMPLATE).render(
        manifest=manifest,
        question=question,
        started=datetime.fromisoformat(manifest.created),
        changes={**manifest.overrides, **manifest.options},
        findings=table.findings(),
        at_once=SENTENCES,
        long=LONG,
        many=MANY,
        caption=table.caption(),
        finished=_without_empty([row for row in rows if row.n], {"note"}),
        lost=_without_empty([row for row in rows if not row.n], set(cells[0])),
        words=PROSE | {*table.names},
        sections=table.sections,
        figures=[(figure, inline(figure.svg, figure.name)) for figure in figures],
        trials=_trials(table, trials),
        digests=_digests(manifest),
        shown=arm_label,
        look=files(__name__).joinpath(LOOK).read_text(encoding="utf-8"),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _without_empty(rows: Sequence[Row], among: Set[str]) -> list[Row]:
    """The rows without those of the columns that say nothing in any of them."""
    empty = {name for name in among if all(row.cells.get(name, NOTHING) == NOTHING for row in rows)}
    return [replace(row, cells={name: cell for name, cell in row.cells.items() if name not in empty}) for row in rows]


def _trials(table: AblationTable, trials: Sequence[TrialRecord]) -> list[dict[str, str]]:
    """A row for every trial, in the order of the plan."""
    metric, units, dotted = table.manifest.metric, Units.of(table.manifest.metric, table.arms), table.names
    return [
        {
            "arm": arm_words(trial.plan.arm, dotted),
            "seed": str(trial.plan.seed),
            "outcome": ended(trial),
            "round": str(trial.last_round) if trial.history else NOTHING,
            metric: units.value(final(trial, metric)),
            "trial": trial.plan.key,
        }
        for trial in sorted(trials, key=lambda trial: trial.plan.number)
    ]


def _digests(manifest: SweepManifest) -> dict[str, str]:
    """Digests by the first of their digits; what is no digest, such as the packages' versions, as it is."""
    hexadecimal = set("0123456789abcdef")
    return {
        name: digest[:DIGITS] if len(digest) > DIGITS and set(digest) <= hexadecimal else digest
        for name, digest in manifest.digests.items()
    }
