"""The ablation table in LaTeX with booktabs, for use in a paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.declared_comparisons import TITLE, declared_cells
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.text_tables import SEEDS_AND_IMAGES, SIMULTANEOUS, instead_of_objective
from fedsweep.report.units_and_labels import NOTHING
from fedsweep.results.arms import short_names

PREAMBLE = r"\usepackage{booktabs,graphicx,xcolor}"
INTERVALS = ("95% interval", SIMULTANEOUS, SEEDS_AND_IMAGES)
SPECIAL = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "[": "{[}", "]": "{]}", "*": "{*}", "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{MIDDLE DOT}": r"$\cdot$", "\N{PLUS-MINUS SIGN}": r"$\pm$",
})  # fmt: skip
OF_DECLARED = ("against", "metric")  # left-aligned columns of the declared comparisons
ASIDE = ("Other columns", "Explanations:", "Trials:")
"""The first words of the sentences that are written into a LaTeX comment instead of the caption."""
ASTERISK = "An asterisk marks a significant difference: p is at most 0.05 after Holm's correction."
DECIDED = "An asterisk marks an arm that was decided to be higher or lower."


def latex(table: AblationTable) -> str:
    """Return a LaTeX `table` environment, preceded by a comment that lists the required packages.

    If arms are also compared by a mean in or out of domain, another `table` environment contains each such comparison.
    Declared comparisons have a `table` environment of their own.

    Significant differences (p at most 0.05 after Holm's correction) are marked with an asterisk, the baseline is in
    italics, and values from a reference paper are grey. No mean is bold, since the arm with the best mean is not
    necessarily the best arm.
    """
    # A column of notes would be too wide for a printed page, so the caption contains the notes.
    rows = [{name: cell for name, cell in row.items() if name != "note"} for row in table.cells()]
    label = f"tab:{table.manifest.name.replace('/', ':').replace('_', '-')}"
    lines = [
        f"% Needs {PREAMBLE} in the preamble",
        "% " + f"{table.manifest.name}, sweep {table.manifest.id}".translate(SPECIAL),
        *(f"% {sentence}" for sentence in table.caption() if sentence.startswith(ASIDE)),
        *_environment(table.names, zip(table.arms, rows, strict=True), _caption(table), label),
    ]
    for name, other in table.by_mean.items():
        finished = (one for one in other.arms if one.n)
        own = zip(finished, other.comparison_cells(), strict=True)
        caption = _caption_by_mean(table, name, other, label)
        lines += ["", *_environment(table.names, own, caption, f"{label}:{name.replace(' ', '-')}")]
    if rows_declared := table.declared:
        compared = [replace(row.one, comparison=row.found) for row in rows_declared]
        own = zip(compared, declared_cells(rows_declared), strict=True)
        lines += ["", *_environment(table.names, own, _caption_of_declared(table, label), f"{label}:declared")]
    return "\n".join(lines) + "\n"


def _environment(
    names: Sequence[str], rows: Iterable[tuple[ArmStatistics, Mapping[str, str]]], caption: str, label: str
) -> list[str]:
    """Return the lines of a `table` environment.

    Args:
        names: The dotted names of the hyperparameters that have columns.
        rows: Each arm with its cells, by column.
        caption: The caption in LaTeX.
        label: The label, to which a paper can refer.
    """
    short, listed = short_names(names), list(rows)
    columns = list(listed[0][1])
    alignment = "".join("l" if name in (*PROSE, *OF_DECLARED) or name in short else "r" for name in columns)
    head = " & ".join(_grey(name, short.get(name, name).translate(SPECIAL)) for name in columns)
    body = [" & ".join(_cell(one, name, cell) for name, cell in row.items()) + r" \\" for one, row in listed]
    return [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{{label}}}",
        r"\small",
        r"\setlength{\tabcolsep}{4pt}",
        r"% Shrinks a table that is wider than the text",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}%",
        r"}",
        r"\end{table}",
    ]


def _caption(table: AblationTable) -> str:
    short, lost = short_names(table.names), ""
    for row in table.cells():
        if row.get("note", NOTHING) != NOTHING:
            named = [f"{short.get(name, name)} {row[name]}" for name in row if name in short or name == "arm"]
            lost += f" {', '.join(named)}: {row['note']}."
    said = [sentence for sentence in table.caption() if not sentence.startswith(ASIDE)]
    title = f"{table.manifest.name}, on experiment {table.manifest.experiment}."
    return (" ".join([title, *said, *_about_asterisk(table, _with_baseline(table))]) + lost).translate(SPECIAL)


def _caption_by_mean(table: AblationTable, name: str, other: AblationTable, label: str) -> str:
    """Return the caption of the comparison by another mean, which refers to the caption of the main table."""
    title = f"{table.manifest.name}, on experiment {table.manifest.experiment}: comparisons with the baseline {name}."
    metric = instead_of_objective(table.manifest, other.manifest.metric)
    said = " ".join([title, metric, *_about_asterisk(other, _with_baseline(other))]).translate(SPECIAL)
    return rf"{said} The columns are explained in Table~\ref{{{label}}}."


def _caption_of_declared(table: AblationTable, label: str) -> str:
    title = f"{table.manifest.name}, on experiment {table.manifest.experiment}: {TITLE.lower()}."
    (explained,) = (one.explained for one in table.sections if one.title == TITLE)
    asterisk = _about_asterisk(table, [row.found for row in table.declared])
    said = " ".join([title, explained.partition(" Explanations:")[0], *asterisk]).translate(SPECIAL)
    return rf"{said} The arms are those of Table~\ref{{{label}}}."


def _about_asterisk(table: AblationTable, compared: Sequence[Comparison]) -> list[str]:
    """Return a sentence that explains the asterisks at `compared`, or an empty list if there are none."""
    by_looks = table.manifest.until_decided is not None
    return [DECIDED if by_looks else ASTERISK] if any(map(_detected, compared)) else []


def _with_baseline(table: AblationTable) -> list[Comparison]:
    return [one.comparison for one in table.arms if one.comparison is not None]


def _detected(found: Comparison) -> bool:
    return found.verdict in ("higher", "lower")


def _cell(one: ArmStatistics, name: str, cell: str) -> str:
    text = cell.translate(SPECIAL) if cell != NOTHING else "--"
    if name in INTERVALS and " to " in cell:
        ends, space, mark = cell.partition(" (")
        low, high = ends.split(" to ")
        text = rf"[${low}$, ${high}$]{space}{mark}"
    elif name == "difference" and cell[:1] in ("+", "-") and cell != NOTHING:
        text = f"${text}$"
    if name == "difference" and one.comparison is not None and _detected(one.comparison):
        return rf"{text}\rlap{{$^*$}}"
    return rf"\textit{{{text}}}" if cell == "baseline" else _grey(name, text)


def _grey(name: str, text: str) -> str:
    return rf"\textcolor{{gray}}{{{text}}}" if name == "paper" else text
