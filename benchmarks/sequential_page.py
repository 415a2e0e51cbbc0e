"""The tables of `results/sequential.md`, from the measurements of `sequential.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.sequential_rivals import same_power

Row = dict[str, Any]
DECISIVE = ("all 0", "all 2", "all 3")
"""The true differences that are all zero or at least twice the smallest effect."""

HEAD = """# Seeds until decided: errors and cost on simulated sweeps

These tables are written by `python -m benchmarks.sequential --write`. Differences and standard deviations are in units
of the smallest effect that matters. Each sweep has a baseline and 1, 3 or 7 arms and at most 20 seeds. "All 0.5" means
that all arms differ from the baseline by 0.5 smallest effects. In "mixed" sweeps, the true differences are 0, 1 and 2
for 3 arms, and 0, 0, 0.5, 1, 1, 2 and 3 for 7 arms. Each line summarises {repetitions} simulated sweeps for every
cell of the grid.

"SD" is the standard deviation of the paired differences. The kinds of noise are:

- `normal`: normal noise, with the same standard deviation in all arms.
- `unequal`: normal noise. The standard deviations of the differences are 0.5, 1 and 1.5 times the SD in turn.
- `skewed`: exponential noise in the arms and normal noise in the baseline. The differences have a skewness of 0.7.
- `very skewed`: as `skewed`, with little noise in the baseline. The differences have a skewness of 1.7.
"""

ERRORS = """## Errors and coverage

The columns of errors count sweeps in which at least one arm has a false verdict, in percent. They should be at most 5.
"Coverage" is the share of comparisons whose interval contains the truth at the stop, in percent, for the worst and the
best cell. It should be at least 95, and at least 90 for `90% equivalence`. Sweeps are also interrupted after 6 and
after 10 seeds. With a skewness of 0.7, false `within` is slightly above 5 in the worst cell.
"""

LOOKS = """The aim was a coverage of 93 to 97 at the stop. It conflicts with the guarantee that an interval is valid at
whatever look a sweep ends, as the following table shows for one comparison, normal noise and t intervals after 4, 5,
..., 20 seeds. If intervals have a coverage of 97 at every single look, at least one of them misses the truth in
{missed} percent of the sweeps. To contain the truth at all looks in 95 percent of the sweeps, they need a coverage of
about 99 at every look.
"""

COST = """## Cost with normal noise

Seeds per arm include the baseline, which runs as long as any comparison is open. A decision is right if its sign is
right, or if it is `within` and the difference is smaller than the smallest effect.

- "One number" is the smallest fixed number of seeds with at least the same mean share of right decisions over all true
  differences of the line.
- "Cell by cell" takes another fixed number for every cell, as if the true differences were known beforehand.
- If no number up to 40 reaches the share, the smallest number within 0.5 points of the best share is taken.
- Decisive cells are those in which all differences are zero or at least twice the smallest effect.

The aims were 0.7 over all cells, and 0.5 over the decisive ones. Against one number, the first is met, and the second
is slightly missed with a limit of 20 seeds. With a limit of 30 seeds, both are met ([next
section](#the-choice-of-the-rule)). Against numbers that know the true difference of each cell, both are missed.
"""

CHOICE = """## The choice of the rule

These simulations use other random numbers than those above, and half as many sweeps. All rules use Holm's method and
keep both errors at 5 percent. fedsweep's rule has the exponents 1 and 3, and gives up below 0.05. All rules have at
most 20 seeds, except for the last three of each group.

With at most 20 seeds, none of these rules reaches 0.5 in the decisive cells with 3 or 7 arms. A larger limit decides
more comparisons. The fixed number with as many right decisions grows faster than the seeds of the rule, so the ratios
fall.

"False" is the error of the worst cell in percent, of all cells with this number of arms. It is the largest of 15 or 18
simulated shares, so it tends to be too large: the standard error of a single share is 0.7.
"""

ADASTOP = """## AdaStop

AdaStop 0.1.3 (`pip install adastop==0.1.3`) has four looks, after 5, 10, 15 and 20 seeds. With `B=1000`, it uses the
252 permutations of the first look, and extends them at random at later looks. The script computes them with arrays,
because the package's loops take several times as long. A test compares its decisions with those of the package, if the
package is installed.

All rules judge the same {repetitions:,} sweeps in each cell of the grid, which are not those of the tables above.
AdaStop does not pair seeds. In these sweeps, pairing gains nothing, because arms and baseline vary independently.
AdaStop has no verdict `within`, so equal arms run to the last look.

AdaStop runs at the level 0.05, and also at the level 0.025. In version 0.1.3, `partial_compare` compares the largest
absolute difference with a boundary from the largest *signed* difference of each permutation. For one arm, the error of
both sides together is then about twice the level. Half the level makes up for this.

"False higher or lower, all 0" is the share of sweeps with a false verdict in the cells without any difference, with its
standard error. "Found" is the share of true differences that are called higher. A decision is right as in the tables
above.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *[[str(one) for one in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal."""
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a measurement over the cells of the grid."""
    return float(np.mean([row[name] for row in rows]))


def one_design(rows: Sequence[Row]) -> tuple[int, float, float | None]:
    """Return a fixed number of seeds for several truths, and the cost of the sequential rule as a share of it.

    The number is the smallest with at least the same mean share of right decisions over the given cells.

    Returns:
        The number of seeds, the rule's mean seeds divided by it, and the same for the decisive cells only.
    """
    wanted = mean(rows, "right")
    columns = [{int(n): share for n, share in row["fixed_right"].items()} for row in rows]
    shares = {n: float(np.mean([column[n] for column in columns])) for n in columns[0]}
    n = same_power(shares, wanted)
    decisive = [row for row in rows if row["truth"] in DECISIVE]
    return n, mean(rows, "seeds") / n, mean(decisive, "seeds") / n if decisive else None


INTERVALS = {
    "covered": "95% one arm",
    "covered_judged": "95% interval",
    "covered_simultaneous": "95% simultaneous",
    "covered_equivalence": "90% equivalence",
}
"""The measurements of coverage at the stop, and the intervals in a report."""


def errors(rows: Sequence[Row]) -> str:
    """Return the table of errors and coverages for each noise and number of arms."""
    lines = []
    for noise in dict.fromkeys(row["noise"] for row in rows):
        for arms in dict.fromkeys(row["arms"] for row in rows):
            group = [row for row in rows if row["noise"] == noise and row["arms"] == arms]
            if not group:
                continue
            cut = [share for row in group for share in row["covered_interrupted"]]
            lines.append(
                [noise, arms, percent(max(row["false_sign"] for row in group)),
                 percent(max(row["false_within"] for row in group)),
                 percent(max(row["false_of_20_fixed_seeds"] for row in group)),
                 *(span(group, name) for name in INTERVALS), span(group, "covered_plain_t"), percent(np.nanmin(cut))]
            )  # fmt: skip
    head = ["noise", "arms", "false higher or lower, worst cell", "false within, worst cell",
            "either of both with 20 fixed seeds, worst cell",
            *(f"coverage of `{one}`" for one in INTERVALS.values()), "coverage of a plain t interval",
            "coverage of `95% one arm` when interrupted, worst cell"]  # fmt: skip
    return table(head, lines)


def span(rows: Sequence[Row], name: str) -> str:
    """Return the smallest and the largest share in percent."""
    return f"{percent(min(row[name] for row in rows))} to {percent(max(row[name] for row in rows))}"


def cost(rows: Sequence[Row]) -> str:
    """Return the table of the cost with normal noise for each number of arms and standard deviation, and over all."""
    normal = [row for row in rows if row["noise"] == "normal"]
    lines = []
    for arms in dict.fromkeys(row["arms"] for row in normal):
        groups: dict[str, Callable[[Row], bool]] = {
            f"{spread:g}": lambda row, spread=spread: row["spread"] == spread
            for spread in dict.fromkeys(row["spread"] for row in normal)
        } | {"all": lambda row: True}
        for spread, chosen in groups.items():
            group = [row for row in normal if row["arms"] == arms and chosen(row)]
            if not group:
                continue
            decisive = [row for row in group if row["truth"] in DECISIVE]
            n, share, decisive_share = one_design(group)
            lines.append([arms, spread, f"{mean(group, 'seeds'):.1f}", percent(mean(group, "right")),
                          percent(mean(group, "at_the_limit")), percent(mean(group, "out_of_reach")), n, f"{share:.2f}",
                          "-" if decisive_share is None else f"{decisive_share:.2f}", f"{mean(group, 'ratio'):.2f}",
                          f"{mean(decisive, 'ratio'):.2f}" if decisive else "-"])  # fmt: skip
    head = ["arms", "SD", "seeds per arm", "right decisions", "open at the limit", "out of reach",
            "fixed seeds, one number", "seeds / one number", "the same, decisive",
            "seeds / fixed, cell by cell", "the same, decisive"]  # fmt: skip
    return table(head, lines)


def looks(rows: Sequence[Row]) -> str:
    """Return the table of the coverages at each look and at all looks."""
    return table(["coverage at every single look", "coverage at all looks"],
                 [[percent(row["each"]), percent(row["all"])] for row in rows])  # fmt: skip


def choice(rows: Sequence[Row]) -> str:
    """Return the table of the rules among which fedsweep's was chosen."""
    head = ["rule", "arms", "seeds per arm", "right decisions", "false higher or lower", "false within", "fixed seeds",
            "seeds / one number", "the same, decisive", "cell by cell"]  # fmt: skip
    lines = [[row["rule"], row["arms"], f"{row['seeds']:.1f}", percent(row["right"]), percent(row["false_sign"]),
              percent(row["false_within"]), row["one_fixed_number"], f"{row['ratio_to_one_fixed_number']:.2f}",
              f"{row['decisive']:.2f}", f"{row['ratio']:.2f}"] for row in rows]  # fmt: skip
    return table(head, lines)


SIDES = {"fedsweep": "fedsweep", "adastop": "AdaStop", "adastop_half": "AdaStop at 0.025"}
MEASURES = {"seeds": "seeds", "false_sign": "false higher or lower", "found": "found", "right": "right"}


def adastop_summary(rows: Sequence[Row], repetitions: int) -> str:
    """Return the table of fedsweep's rule and AdaStop for each noise and number of arms."""
    head = ["noise", "arms"]
    titles = ("seeds per arm", "false higher or lower, all 0", "found", "right")
    head += [f"{title}, {name}" for title in titles for name in SIDES.values()]
    lines: list[list[object]] = []
    for noise in dict.fromkeys(row["noise"] for row in rows):
        for arms in dict.fromkeys(row["arms"] for row in rows):
            group = [row for row in rows if row["noise"] == noise and row["arms"] == arms]
            equal = [row for row in group if row["truth"] == "all 0"]
            differing = [row for row in group if row["truth"] != "all 0"]
            lines.append([
                noise, arms,
                *(f"{_over(group, side, 'seeds'):.1f}" for side in SIDES),
                *(with_error(_over(equal, side, "false_sign"), len(equal) * repetitions) for side in SIDES),
                *(percent(_over(differing, side, "found")) for side in SIDES),
                *(percent(_over(group, side, "right")) for side in SIDES),
            ])  # fmt: skip
    return table(head, lines)


def _over(rows: Sequence[Row], side: str, measure: str) -> float:
    return float(np.mean([row[side][measure] for row in rows]))


def with_error(share: float, sweeps: int) -> str:
    """Return a share of independent sweeps in percent with its standard error."""
    return f"{percent(share)} \u00b1 {100 * np.sqrt(share * (1 - share) / sweeps):.1f}"


def adastop_cells(rows: Sequence[Row]) -> str:
    """Return the table of fedsweep's rule and AdaStop at two levels in every cell, side by side."""
    head = ["noise", "arms", "SD", "true differences"]
    head += [f"{title}, {name}" for title in MEASURES.values() for name in SIDES.values()]
    lines: list[list[object]] = []
    for row in rows:
        values = [row[side][measure] for measure in MEASURES for side in SIDES]
        shown = [f"{one:.1f}" if place < len(SIDES) else percent(one) for place, one in enumerate(values)]
        lines.append([row["noise"], row["arms"], row["spread"], row["truth"], *shown])
    return table(head, lines)


def cells(rows: Sequence[Row]) -> str:
    """Return the table of all cells of the grid."""
    head = ["noise", "arms", "SD", "true differences", "false higher or lower", "false within", "coverage", "right",
            "seeds per arm", "fixed seeds", "ratio", "open at the limit", "out of reach"]  # fmt: skip
    lines = [[row["noise"], row["arms"], row["spread"], row["truth"], percent(row["false_sign"]),
              percent(row["false_within"]), percent(row["covered"]), percent(row["right"]), f"{row['seeds']:.1f}",
              row["fixed_seeds"], f"{row['ratio']:.2f}", percent(row["at_the_limit"]), percent(row["out_of_reach"])]
             for row in rows]  # fmt: skip
    return table(head, lines)


def page(measured: dict[str, Any]) -> str:
    """Return the whole page."""
    missed = next(percent(1 - row["all"]) for row in measured["looks"] if row["each"] == 0.97)
    parts = [
        HEAD.format(repetitions=measured["repetitions"]),
        ERRORS,
        errors(measured["grid"]),
        LOOKS.format(missed=missed),
        looks(measured["looks"]),
        COST,
        cost(measured["grid"]),
        CHOICE,
        choice(measured["choice"]),
    ]
    if measured["adastop"]:
        sweeps = measured["adastop_repetitions"]
        parts += [ADASTOP.format(repetitions=sweeps), adastop_summary(measured["adastop"], sweeps)]
        parts += ["### All cells beside AdaStop\n", adastop_cells(measured["adastop"])]
    return "\n".join([*parts, "## All cells\n", cells(measured["grid"])])
