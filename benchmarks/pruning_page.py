"""The Markdown page and the figure that `pruning.py` writes."""

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pruning_problems import RESULTS, Array  # in the same folder

Row = dict[str, Any]
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#999999", "#000000")


def best_within(rows: Sequence[Row], budget: float, score: str) -> Row | None:
    """Return the row with the best value of `score` among the rows that run at most the share `budget` of all rounds.

    Return None if there is no such row.
    """
    sign = 1 if score == "regret" else -1
    return min((row for row in rows if row["budget"] <= budget + 1e-9), key=lambda row: sign * row[score], default=None)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a left-aligned first column and right-aligned other columns."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows that have the `wanted` value in each of the given columns."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def budget_table(rows: Sequence[Row], budgets: Sequence[float]) -> str:
    """Return a table of the best arm's survival and the regret: a row for each strategy, a column for each budget."""
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
    """Return a table of all scores of each strategy at the given settings, e.g. `grace 3, eta 3`."""
    lines = [
        [
            f"{row['family']}, {row['setting']}",
            *(f"{row[name]:.0%}" for name in ("budget", "whole", "survived", "right", "top3")),
            f"{row['regret']:.2f}",
        ]
        for setting in settings
        for row in of(rows, setting=setting)
    ]
    head = ["", "rounds", "survives with all seeds", "with any", "selected", "selected arm in top 3", "regret, points"]
    return table(head, lines)


def mean_table(rows: Sequence[Row]) -> str:
    """Return a table of scores averaged over all settings of grace and eta, with a row for each strategy."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows if "eta" in row["setting"]):
        mine = of(rows, family=family)
        mean = {
            name: np.mean([row[name] for row in mine]) for name in ("budget", "whole", "survived", "right", "regret")
        }
        shares = [f"{mean[name]:.0%}" for name in ("budget", "whole", "survived", "right")]
        lines.append([family, *shares, f"{mean['regret']:.2f}"])
    return table(["", "rounds", "survives with all seeds", "with any", "selected", "regret, points"], lines)


def order_table(rows: Sequence[Row]) -> str:
    """Return a table that shows how the outcome of each strategy depends on the order of trials."""
    ends = ("worst first", "best first")
    head = ["", "different outcomes", "runs unlike the first", "best arm survived", *(f"pruned, {end}" for end in ends)]
    lines = [
        [row["strategy"], str(row["different"]), str(row["unlike"]), f"{row['survived']:.0%}"]
        + [f"{row[end]} of {row['trials']}" for end in ends]
        for row in rows
    ]
    return table(head, lines)


def figure(rows: Sequence[Row]) -> None:
    """Draw survival and regret against the share of rounds for each number of seeds, and write `pruning.png`."""
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
    second, fourth, last_one = means[0] - means[[1, 3, -1]]
    spread = (
        " After subtracting the mean of each arm and of each seed, the standard deviation of the values at the last "
        f"round is {noise:.2f} percentage points."
    )
    best = labels[int(last.mean(axis=1).argmax())]
    return (
        f"{arms} arms with {seeds} seed{'s' * (seeds > 1)} over {rounds} rounds. The best arm is `{best}`, with a mean "
        f"of {means[0]:.1f} % at the last round. The means of the second, fourth and last arm are {second:.2f}, "
        f"{fourth:.2f} and {last_one:.1f} percentage points below the best mean.{spread * (seeds > 1)}"
    )


def item(name: str, text: str) -> str:
    """Return an item of a Markdown list, wrapped at 120 characters."""
    return fill(f"- {name}: {text}", 120, subsequent_indent="  ", break_on_hyphens=False)


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
    """Write the page `pruning.md` and the figure `pruning.png` from the results of `pruning.py`."""
    figure(scores)
    counts = sorted({row["seeds"] for row in scores})
    by_budget = "\n\n".join(
        f"Results with {n} seed{'s' * (n > 1)}:\n\n{budget_table(of(scores, seeds=n), budgets)}" for n in counts
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
        recorded=item("`curves` (`pruning_curves.yaml`)", curves_text(*curves)),
        tasks=item("`strata` (`pruning_strata.yaml`)", curves_text(*tasks)),
        problems=problems,
        arms=arms,
        by_budget=by_budget,
        means="\n\n".join(f"Means with {n} seed{'s' * (n > 1)}:\n\n{mean_table(of(scores, seeds=n))}" for n in counts),
        defaults=setting_table(of(scores, seeds=counts[-1]), ["grace 1, eta 3", "grace 3, eta 3", "all rounds"]),
        seeds=counts[-1],
        count=shuffles[0]["count"],
        stopped=order_table(shuffles),
        waited=waited,
        per=per,
    )
    (RESULTS / "pruning.md").write_text(page)


PAGE = """# Pruning on recorded curves

Which scheduler is most likely to keep the best arm of a sweep, for the same number of rounds? `benchmarks/pruning.py`
replays recorded learning curves under each scheduler:

```sh
uv run python benchmarks/pruning.py
```

The script writes this page from `pruning_curves.csv`. The curves come from two sweeps without pruning. Only the seeds
that finished in every arm are used.

{recorded}
{tasks}

The tables compare these strategies:

- *arms (ours)*: the scheduler `arms`, which promotes or prunes all seeds of an arm together. At each rung, the arms
  with the best means are promoted. Another arm is *spared*, that is, it also continues, if it is at least as good as
  the last promoted arm on at least one seed. All remaining arms are pruned.
- *arms, nobody spared*: successive halving by the mean over the seeds, without spared arms.
- *arms, spared by a t test*: like *arms (ours)*, but an arm is spared unless a paired t-test over the seeds finds that
  the arm is worse than the last promoted arm (one-sided, at the 10 % level). With a single seed, no arms are spared.
- *per-trial ASHA*, *per-trial median stopping*: the schedulers `asha_async` and `median`, which prune single
  trials.
- *synchronous halving of trials*: successive halving of single trials.
- *random search*: complete arms or complete trials in random order, until the rounds are used up.

A *rung* is a round after which arms or trials are judged. *Grace* is the round of the first rung. At each rung, about
one in *eta* of the arms or trials is promoted. A strategy spares at most as many arms as it promotes by their means.

## Survival for the same number of rounds

The script drew {problems} problems at random. Each problem contains {arms} of the arms of `curves`, some of their
seeds, and a random order of the trials. The *truly best arm* of a problem is the arm with the highest mean at the last
round over *all* recorded seeds. The *answer* of a strategy is the arm with the highest mean over its finished trials.

Each cell of the next tables has three numbers: `survives with any seed / survives with all seeds · regret`.

- `survives with any seed`: percentage of the problems in which at least one trial of the truly best arm reaches the
  last round.
- `survives with all seeds`: percentage of the problems in which all seeds of the truly best arm reach the last round,
  so that all paired differences of this arm are available.
- `regret`: difference between the true means of the truly best arm and of the answer, in percentage points.

Each strategy that prunes was run with several settings: with grace 1 to 3 and eta 2 to 4 or, for median stopping, with
grace 1, 2, 3, 4 and 6. Each number belongs to the best setting that runs at most the share of all rounds in the heading
of its column. The best setting can differ between the three numbers of a cell. The settings were chosen on the same
problems, so the numbers are optimistic for all strategies that prune.

The results have two limits:

- All problems are drawn from one sweep of {seeds} seeds and resemble each other. Differences of a few percent may not
  occur in another sweep.
- With {seeds} seeds, a problem contains exactly the seeds that define the truly best arm, so a strategy that prunes
  nothing always selects this arm. With fewer seeds, no strategy always selects this arm.

{by_budget}

![survival of the best arm and regret against the share of rounds](pruning.png)

The next tables list means over all nine settings of grace and eta. The strategies run different shares of the rounds,
which the column "rounds" lists. The column "selected" lists the share of the problems in which the truly best arm is
the answer.

{means}

The last table of this section compares the strategies with {seeds} seeds at two settings. The last row of this table
is the result without pruning. The column "selected arm in top 3" lists the share of the problems in which the answer is
one of the three truly best arms.

{defaults}

## Dependence on the order of trials

Each strategy ran {count} times on all arms and seeds of `curves` (grace 3, eta 3). Each time, the trials had another
order, the number of workers was between 1 and 16, and rounds had unequal durations. An outcome is the set of pruned
trials with the rounds at which they were pruned. The last two columns list the number of pruned trials if a single
worker runs all trials. In the column "worst first", the worker starts with the truly worst arm. In the column "best
first", the worker starts with the truly best arm.

{stopped}

## Waiting at rungs

With the strategy "arms, waiting at rungs", each trial stops at a rung until its arm is promoted or pruned. With the
strategy "arms, running ahead (ours)", idle workers continue trials beyond a rung before the decision on their arm. The
problems are drawn as in the first section, with {seeds} seeds and with rounds of unequal duration (grace 3, eta 3).
Each cell has three numbers: `time · utilisation · rounds`.

- `time`: time until the last worker has finished, in mean durations of a round.
- `utilisation`: share of the time in which workers are busy.
- `rounds`: share of all rounds that were run, including the rounds that idle workers ran beyond a rung before the
  decision.

{waited}

## Tasks of unequal difficulty

In `strata`, the arms belong to three tasks of unequal difficulty, and each column of the table belongs to one task.
Each cell has two numbers: the share of the task's trials that pass the first rung, and the share of the problems in
which the task's best arm survives with any seed. The strategies with "per task" in their name compare only arms or
trials of the same task (`per: [partition.alpha]`). The other strategies compare the arms or trials of all tasks. All
strategies use grace 3 and eta 3.

{per}
"""
