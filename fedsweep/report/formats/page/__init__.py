"""The report as one self-contained HTML page."""

import base64
import hashlib
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from importlib.resources import files
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedsweep.common.paths import FOR_EDITORS
from fedsweep.report.arm_statistics import ArmStatistics, ended, final
from fedsweep.report.experiment_setup import provenance, setup
from fedsweep.report.figures.canvas import Figure
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.units_and_labels import NOTHING, Units, arm_words
from fedsweep.results import SweepManifest, TrialRecord

LINK = "{http://www.w3.org/1999/xlink}href"
SVG = "{http://www.w3.org/2000/svg}"
PIXELS_PER_POINT = 4 / 3


def inline(path: Path, prefix: str) -> str:
    """Return the contents of an SVG file as an HTML `<svg>` element, with escaped text.

    `prefix` is added to all ids and to all references to ids. Matplotlib uses the same ids in every file, so without
    the prefix, a drawing would use shapes of other drawings on the page. The id of the drawing's title is
    `<prefix>-title`.
    """
    root = ElementTree.fromstring(path.read_bytes())  # noqa: S314 - written by this program
    for parent in list(root.iter()):
        # A style in an inline SVG would apply to the whole page; report.css contains its rules.
        parent[:] = [child for child in parent if child.tag not in (f"{SVG}metadata", f"{SVG}style")]
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        # HTML has no namespaces.
        element.attrib = {
            "href" if name == LINK else name: _prefixed(name, value, prefix) for name, value in element.attrib.items()
        }
    width = round(float(root.attrib.pop("width").removesuffix("pt")) * PIXELS_PER_POINT)
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.set("style", f"width:{width}px")  # the size of the drawing; report.css makes it narrower if needed
    if (title := root.find("title")) is not None:
        title.set("id", f"{prefix}-title")
        root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}-title"}
    return ElementTree.tostring(root, encoding="unicode")


def _prefixed(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == LINK and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return value.replace("url(#", f"url(#{prefix}-")


SENTENCES = 8  # number of findings that are visible before unfolding
DIGITS = 12  # digits shown of a digest


class Row(NamedTuple):
    """A row of the table: an arm, and a dict from column to the text of the cell."""

    arm: ArmStatistics
    cells: Mapping[str, str]


def html(
    table: AblationTable, figures: Sequence[Figure], trials: Sequence[TrialRecord], question: str | None = None
) -> str:
    """Return the HTML page of a report. Reports of the same sweep are bit-identical.

    Args:
        table: The ablation table of the sweep.
        figures: The saved figures, in the order in which the page shows them.
        trials: All trials of the sweep.
        question: The research question of the search space, if there is one.
    """
    rows = list(map(Row, table.arms, table.cells()))
    script = files(__name__).joinpath("report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    manifest = table.manifest
    return environment.get_template("report.html.jinja").render(
        manifest=manifest,
        question=question,
        started=datetime.fromisoformat(manifest.created),
        setup=setup(table.arms),
        provenance=provenance(manifest, table.arms),
        findings=table.findings(),
        at_once=SENTENCES,
        caption=table.caption(),
        finished=_without_empty([row for row in rows if row.arm.n], {"note"}),
        lost=_without_empty([row for row in rows if not row.arm.n], set(rows[0].cells)),
        words=PROSE | {*table.names},
        sections=table.sections,
        figures=[(figure, inline(figure.svg, figure.name)) for figure in figures],
        trials=_trials(table, trials),
        digests=_digests(manifest),
        look=files(__name__).joinpath("report.css").read_text(encoding="utf-8"),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _without_empty(rows: Sequence[Row], among: Set[str]) -> list[Row]:
    """Remove each column in `among` that is empty in every row, and return the resulting rows."""
    empty = {name for name in among if all(row.cells.get(name, NOTHING) == NOTHING for row in rows)}
    return [Row(arm, {name: cell for name, cell in cells.items() if name not in empty}) for arm, cells in rows]


def _trials(table: AblationTable, trials: Sequence[TrialRecord]) -> list[dict[str, str]]:
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
    """Return a copy of `manifest.digests` in which digests are shortened to 12 digits.

    `manifest.digests` also contains package versions, which are not shortened.
    """
    hexadecimal = set("0123456789abcdef")
    return {
        name: digest[:DIGITS] if len(digest) > DIGITS and set(digest) <= hexadecimal else digest
        for name, digest in manifest.digests.items()
    }


def question(search_space: Path) -> str | None:
    """Return the first paragraph of the comment at the top of a search space's file, or None if there is no comment."""
    if not search_space.exists():
        return None
    stripped = (line.strip() for line in search_space.read_text(encoding="utf-8").splitlines())
    lines = (line for line in stripped if not line.lstrip("# ").startswith(FOR_EDITORS))
    comments = takewhile(lambda line: line.startswith("#"), dropwhile(lambda line: not line, lines))
    words = dropwhile(lambda line: not line, (line.lstrip("#").strip() for line in comments))
    return " ".join(takewhile(bool, words)) or None
