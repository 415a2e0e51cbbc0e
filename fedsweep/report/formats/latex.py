"""The ablation table in LaTeX with booktabs, for use in a paper."""

from __future__ import annotations

from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.table import PROSE, AblationTable
from fedsweep.report.units_and_labels import NOTHING
from fedsweep.results.arms import short_names

PREAMBLE = r"\usepackage{booktabs,graphicx,xcolor}"
INTERVAL = "95% interval"
SPECIAL = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "[": "{[}", "]": "{]}", "*": "{*}", "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{MIDDLE DOT}": r"$\cdot$",
})  # fmt: skip
ASIDE = ("Other columns", "Explanations:", "Trials:")
"""The first words of the sentences that are written into a LaTeX comment instead of the caption."""


def latex(table: AblationTable) -> str:
    """Return a LaTeX `table` environment, preceded by a comment that lists the required packages.

    Significant differences (p at most 0.05 after Holm's correction) are marked with an asterisk, the baseline is in
    italics, and values from a reference paper are grey. No mean is bold, since the arm with the best mean is not
    necessarily the best arm.
    """
    # A column of notes would be too wide for a printed page, so the caption contains the notes.
    rows = [{name: cell for name, cell in row.items() if name != "note"} for row in table.cells()]
    short = short_names(table.names)
    columns = list(rows[0])
    alignment = "".join("l" if name in PROSE or name in short else "r" for name in columns)
    head = " & ".join(_grey(name, short.get(name, name).translate(SPECIAL)) for name in columns)
    body = [
        " & ".join(_cell(one, name, cell) for name, cell in row.items()) + r" \\"
        for one, row in zip(table.arms, rows, strict=True)
    ]
    lines = [
        f"% Needs {PREAMBLE} in the preamble",
        "% " + f"{table.manifest.name}, sweep {table.manifest.id}".translate(SPECIAL),
        *(f"% {sentence}" for sentence in table.caption() if sentence.startswith(ASIDE)),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(table)}}}",
        rf"\label{{tab:{table.manifest.name.replace('/', ':').replace('_', '-')}}}",
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
    return "\n".join(lines) + "\n"


def _caption(table: AblationTable) -> str:
    asterisk = " An asterisk marks a significant difference: p is at most 0.05 after Holm's correction."
    detected = asterisk * any(_detected(one) for one in table.arms)
    short, lost = short_names(table.names), ""
    for row in table.cells():
        if row.get("note", NOTHING) != NOTHING:
            named = [f"{short.get(name, name)} {row[name]}" for name in row if name in short or name == "arm"]
            lost += f" {', '.join(named)}: {row['note']}."
    said = [sentence for sentence in table.caption() if not sentence.startswith(ASIDE)]
    title = f"{table.manifest.name}, on experiment {table.manifest.experiment}."
    return (" ".join([title, *said]) + detected + lost).translate(SPECIAL)


def _detected(one: ArmStatistics) -> bool:
    return one.comparison is not None and one.comparison.verdict in ("higher", "lower")


def _cell(one: ArmStatistics, name: str, cell: str) -> str:
    text = cell.translate(SPECIAL) if cell != NOTHING else "--"
    if name == INTERVAL and " to " in cell:
        low, high = cell.split(" to ")
        text = rf"[${low}$, ${high}$]"
    elif name == "difference" and cell[:1] in ("+", "-") and cell != NOTHING:
        text = f"${text}$"
    if name == "difference" and _detected(one):
        return rf"{text}\rlap{{$^*$}}"
    return rf"\textit{{{text}}}" if cell == "baseline" else _grey(name, text)


def _grey(name: str, text: str) -> str:
    return rf"\textcolor{{gray}}{{{text}}}" if name == "paper" else text
