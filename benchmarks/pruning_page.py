"""The page and the figure of `pruning.py`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pruning_problems import RESULTS, Array  # in the same folder

Row = dict[str, Any]
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#999999", "#000000")


def best_within(rows: Sequence[Row], budget: float, score: str) -> Row | None:
    """Return the setting with the best score among those with a mean budget of at most `budget`, or None."""
    sign = 1 if score == "regret" else -1
    return min((row for row in rows if row["budget"] <= budget + 1e-9), key=lambda row: sign * row[score], default=None)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows that have all the `wanted` values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def budget_table(rows: Sequence[Row], budgets: Sequence[float]) -> str:
    """Return a table of survival and regret by family of strategies and budget."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = of(rows, family=family)
        cells = []
        for budget in budgets:
            found = {score: best_within(mine, budget, score) for score in ("survived", "whole", "regret")}
            shown = [f"{100 * row[score]:.0f}" for score, row in found.items() if row and score != "regret"]
            cells.append(f"{' / '.join(shown)} · {found['regret']['regret']:.2f}" if found["regret"] else "")
        if any(cells):
            lines.append([family, *cells])
    return table(["", *(f"{budget:.0%} of the rounds" for budget in budgets)], lines)


def setting_table(rows: Sequence[Row], settings: Sequence[str]) -> str:
    """Return a table of all scores of the families at given settings."""
    lines = [
        [
            f"{row['family']}, {row['setting']}",
            *(f"{row[name]:.0%}" for name in ("budget", "whole", "survived", "right", "top3")),
            f"{row['regret']:.2f}",
        ]
        for setting in settings
        for row in of(rows, setting=setting)
    ]
    head = ["", "rounds", "survives with all seeds", "with any", "is the answer", "answer in top 3", "regret, points"]
    return table(head, lines)


def mean_table(rows: Sequence[Row]) -> str:
    """Return a table of the families that have a grace and an eta, averaged over all settings."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows if "eta" in row["setting"]):
        mine = of(rows, family=family)
        mean = {
            name: np.mean([row[name] for row in mine]) for name in ("budget", "whole", "survived", "right", "regret")
        }
        shares = [f"{mean[name]:.0%}" for name in ("budget", "whole", "survived", "right")]
        lines.append([family, *shares, f"{mean['regret']:.2f}"])
    return table(["", "rounds", "survives with all seeds", "with any", "is the answer", "regret, points"], lines)


def figure(rows: Sequence[Row]) -> None:
    """Draw survival and regret against the share of rounds, for each number of seeds."""
    counts = sorted({row["seeds"] for row in rows})
    drawn = Figure(figsize=(4.2 * len(counts), 7), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, len(counts), squeeze=False, sharex=True, sharey="row")
    families = [name for name in dict.fromkeys(row["family"] for row in rows) if name != "nothing stopped"]
    for column, seeds in enumerate(counts):
        mine = of(rows, seeds=seeds)
        whole = of(mine, family="nothing stopped")[0]
        for panel, name, label in zip(
            panels[:, column], ("whole", "regret"), ("best arm survives with all seeds", "regret, points"), strict=True
        ):
            for colour, family in zip(COLOURS, families, strict=True):
                line = sorted(of(mine, family=family), key=lambda row: row["budget"])
                kept = [row for row in line if best_within(line, row["budget"], name) is row]
                x, y = np.array([[row["budget"], row[name]] for row in line]).T
                panel.plot(100 * x, y, ".", color=colour, alpha=0.35, markersize=5)
                x, y = np.array([[row["budget"], row[name]] for row in kept]).T
                panel.plot(100 * x, y, "-o", color=colour, markersize=4, label=family)
            panel.axhline(whole[name], color="black", linewidth=0.8, linestyle=":")
            panel.set_ylabel(label if column == 0 else "")
            panel.grid(alpha=0.25)
        panels[0, column].set_title(f"{seeds} seed{'s' * (seeds > 1)} per arm")
        panels[1, column].set_xlabel("rounds run, % of all")
    panels[0, 0].legend(fontsize=7, loc="lower right")
    drawn.savefig(RESULTS / "pruning.png", dpi=110, metadata={"Software": None})


def curves_text(labels: Sequence[str], curves: Array) -> str:
    """Describe the recorded curves: their number, the differences between arms, and the spread over seeds."""
    arms, seeds, rounds = curves.shape
    last = 100 * curves[:, :, -1]
    means = np.sort(last.mean(axis=1))[::-1]
    paired = (last - last.mean(axis=1, keepdims=True) - last.mean(axis=0) + last.mean()).ravel()
    noise = np.sqrt((paired**2).sum() / ((arms - 1) * max(seeds - 1, 1)))
    gaps = f"second {means[0] - means[1]:.2f}, fourth {means[0] - means[3]:.2f}, last {means[0] - means[-1]:.1f}"
    spread = (
        f"The residuals, after subtracting the means of arm and seed, have a standard deviation of {noise:.2f} points. "
    )
    best = labels[int(last.mean(axis=1).argmax())]
    return (
        f"{arms} arms with {seeds} seed{'s' * (seeds > 1)} over {rounds} rounds. The best mean at the last round is "
        f"{means[0]:.1f} %. Other arms are below it by these points: {gaps}. {spread * (seeds > 1)}"
        f"The best arm is {best}."
    )


def write(
    curves: tuple[list[str], Array],
    tasks: tuple[list[str], Array],
    problems: int,
    arms: int,
    budgets: Sequence[float],
    scores: Sequence[Row],
    shuffles: Sequence[Row],
    waiting: Sequence[Row],
    strata: Sequence[Row],
) -> None:
    """Write `pruning.md` and `pruning.png`."""
    figure(scores)
    counts = sorted({row["seeds"] for row in scores})
    by_budget = "\n\n".join(
        f"With {n} seed{'s' * (n > 1)}:\n\n{budget_table(of(scores, seeds=n), budgets)}" for n in counts
    )
    count = shuffles[0]["count"]
    stopped = table(
        [
            "",
            "different outcomes",
            "runs that differ from the first",
            "best arm survived",
            "stopped, worst first",
            "best first",
        ],
        [
            [row["strategy"], str(row["different"]), str(row["unlike"]), f"{row['survived']:.0%}"]
            + [f"{row[end]} of {row['trials']}" for end in ("worst first", "best first")]
            for row in shuffles
        ],
    )
    waited = table(
        ["", *(f"{workers} workers" for workers in dict.fromkeys(row["workers"] for row in waiting))],
        [
            [
                name,
                *(f"{row['time']:.0f} · {row['busy']:.0%} · {row['budget']:.0%}" for row in of(waiting, strategy=name)),
            ]
            for name in dict.fromkeys(row["strategy"] for row in waiting)
        ],
    )
    names = [name for name in strata[0] if name != "strategy"]
    per = table(
        ["", *names],
        [[row["strategy"], *(f"{row[name][0]:.0%} · {row[name][1]:.0%}" for name in names)] for row in strata],
    )
    page = PAGE.format(
        recorded=curves_text(*curves),
        tasks=curves_text(*tasks),
        problems=problems,
        arms=arms,
        by_budget=by_budget,
        means="\n\n".join(f"With {n} seed{'s' * (n > 1)}:\n\n{mean_table(of(scores, seeds=n))}" for n in counts),
        defaults=setting_table(of(scores, seeds=counts[-1]), ["grace 1, eta 3", "grace 3, eta 3", "all rounds"]),
        seeds=counts[-1],
        count=count,
        stopped=stopped,
        waited=waited,
        per=per,
    )
    (RESULTS / "pruning.md").write_text(page)


PAGE = """# Pruning on recorded curves

Written by `uv run python benchmarks/pruning.py` from `pruning_curves.csv`. The curves come from sweeps of
`pruning_curves.yaml` and `pruning_strata.yaml` without pruning.

`curves`: {recorded}

`strata`: {tasks}

## With the same number of rounds

There are {problems} problems. Each consists of {arms} random arms of `curves` and some random seeds, in a random order.
The truly best arm is the one with the best mean at the last round over *all* recorded seeds.

All problems are drawn from one sweep with {seeds} seeds, so they are similar. Differences of a few points may not hold
for another sweep. With {seeds} seeds, a problem contains the same seeds that define the truly best arm, so a strategy
that stops nothing is right by definition. This does not hold with fewer seeds.

A cell has three numbers:

- how often the truly best arm survives to the last round with at least one seed, in %
- how often it survives with all its seeds, in %; only then can the report give paired differences
- the regret: by how many points the answer is worse than the truly best arm. The answer is the arm with the best mean
  among those with finished trials.

Each number is that of the best setting (grace 1 to 3, eta 2 to 4) that spends at most the column's share of all rounds.
The settings are chosen on the same problems, which favours all strategies that have several settings.

{by_budget}

![survival and regret against rounds](pruning.png)

Without choosing settings, these are the means over all nine settings. The strategies spend different shares of the
rounds.

{means}

These are the results for two settings, with {seeds} seeds:

{defaults}

The strategies named "arms" promote an arm with all its seeds. At a rung, "arms (ours)" promotes the best arms by their
means, and further arms that are tied with the last one promoted: those that are not worse with every seed. "Nobody
spared" is plain halving by the means. "Spared by a t test" also promotes arms that a paired t test over the seeds does
not find worse (one-sided, at 10 %). The number of additional arms is at most the number of regular places.

## Dependence on the order of trials

All arms and seeds of `curves` are run {count} times in random orders, on 1 to 16 workers and with rounds of unequal
length (grace 3, eta 3). An outcome is the set of stopped trials with their last rounds. The last two columns count the
trials that a single worker stops if the arms are started in order of their quality.

{stopped}

## Waiting at rungs

The problems are those above with {seeds} seeds and rounds of unequal length (grace 3, eta 3). A cell shows the time at
which the last worker ends (in average rounds), the share of time in which workers are busy, and the share of all rounds
that were run, including rounds run ahead of a decision.

{waited}

## Tasks of unequal difficulty

A cell shows the share of a task's trials that pass the first rung, and how often the task's best arm survives with any
seed (grace 3, eta 3). The arms of `strata` are compared either all together, or "per task" only with arms of the same
task (`per: [partition.alpha]`).

{per}
"""
