"""Compare pruning strategies on recorded curves: how often the best arm survives, and the share of rounds run.

    uv run python benchmarks/pruning.py
    uv run python benchmarks/pruning.py --record mlruns/sweeps/curves/* mlruns/sweeps/strata/*

The first command replays `results/pruning_curves.csv`, and writes `results/pruning.md`, `pruning.png` and
`pruning_scores.csv`. The second command writes `results/pruning_curves.csv` from two finished sweeps. To run these two
sweeps, copy `results/pruning_curves.yaml` and `pruning_strata.yaml` to your search spaces as `curves` and `strata`.

A problem is a random choice of arms and seeds in a random order. The true value of an arm is its mean at the last round
over all recorded seeds. The strategies use the code of fedsweep's schedulers:

- Per-trial ASHA uses `fedsweep.sweep.pruning.trial_rules.Rungs`, which receives the rounds of simulated workers.
- Pruning of whole arms uses `fedsweep.sweep.pruning.arm_rules.halve`.
- Synchronous halving of trials uses `halve`, too, and passes each trial as an arm with one seed.
"""

import argparse
import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pruning_page
from pruning_plays import Play, by_asha, by_medians, by_t_test, halved, nobody, ruled, some_arms, some_trials
from pruning_problems import RESULTS, Array, Problem, Score, Trial, problems, read, record
from pruning_workers import Arms, asha, work
from rich.console import Console
from rich.progress import track

BUDGETS = (0.25, 0.3, 0.4, 0.5, 0.6)
"""The budgets, as shares of the rounds of all trials."""
SETTINGS = [(grace, eta) for grace in (1, 2, 3) for eta in (2, 3, 4)]
ARMS = 16
"""The number of arms in a problem."""
DEFAULTS = (3, 3)
"""The default grace and eta of a search space."""
OURS = "arms (ours)"
console = Console(stderr=True, highlight=False)


def families() -> dict[str, dict[str, Play]]:
    """Return a dict from each strategy to its settings, and from each setting to the function that runs it."""

    def settings(play: Any, **more: Any) -> dict[str, Play]:
        return {f"grace {grace}, eta {eta}": partial(play, grace=grace, eta=eta, **more) for grace, eta in SETTINGS}

    return {
        OURS: settings(halved),
        "arms, nobody spared": settings(ruled, spares=nobody),
        "arms, spared by a t test": settings(ruled, spares=by_t_test),
        "per-trial ASHA": settings(by_asha),
        "per-trial median stopping": {f"grace {one}": partial(by_medians, grace=one) for one in (1, 2, 3, 4, 6)},
        "synchronous halving of trials": settings(halved, together=False),
        "random search, whole arms": {f"{one:.0%}": partial(some_arms, budget=one) for one in BUDGETS},
        "random search, whole trials": {f"{one:.0%}": partial(some_trials, budget=one) for one in BUDGETS},
        "nothing stopped": {"all rounds": partial(some_arms, budget=1.0)},
    }


def study(of_seeds: dict[int, list[Problem]]) -> list[dict[str, Any]]:
    """Return a row for each number of seeds, strategy and setting, with the scores averaged over the problems.

    `of_seeds` is a dict from the number of seeds to the problems with this number of seeds.
    """
    rows = []
    jobs = [(seeds, family, *one) for seeds in of_seeds for family, all in families().items() for one in all.items()]
    for seeds, family, setting, play in track(jobs, description="problems", console=console):
        scores = [Score.of(problem, play(problem)) for problem in of_seeds[seeds]]
        mean = {name: float(np.mean([getattr(one, name) for one in scores])) for name in Score.__annotations__}
        rows.append({"seeds": seeds, "family": family, "setting": setting, **mean})
    return rows


def shuffles(curves: Array, grace: int, eta: float, count: int) -> list[dict[str, Any]]:
    """Compare the sets of pruned trials if the same trials run `count` times in random orders, on 1 to 16 workers.

    Return a row for each strategy.
    """
    arms, seeds, _ = curves.shape
    trials = [(arm, seed) for arm in range(arms) for seed in range(seeds)]
    problem = Problem(curves, curves[:, :, -1].mean(axis=1), trials, range(arms))
    rows = []
    for name in (OURS, "per-trial ASHA"):
        rng = np.random.default_rng(0)
        outcomes: list[frozenset[Trial]] = []
        survived = []
        for _ in range(count):
            order = [problem.order[place] for place in rng.permutation(len(problem.order))]
            seconds = {trial: float(rng.lognormal(0, 0.3)) for trial in problem.order}
            strategy = Arms(curves, order, grace, eta) if name == OURS else asha(curves, order, grace, eta)
            done = work(strategy, (arms, seeds), int(rng.choice([1, 2, 4, 8, 16])), seconds)
            ended = done.rounds
            if isinstance(
                strategy, Arms
            ):  # trials run ahead of a decision, beyond the round at which their arm is pruned
                ended = np.array([[strategy.stopped_at(arm)] * seeds for arm in range(arms)])
            outcomes.append(frozenset((*trial, int(ended[trial])) for trial in problem.order))  # type: ignore[misc]
            survived.append(Score.of(problem, ended).survived)
        upwards = sorted(problem.order, key=lambda trial: problem.truth[trial[0]])
        rows.append(
            {
                "strategy": name,
                "trials": len(upwards),
                "worst first": stopped_of(name, problem, upwards, grace, eta),
                "best first": stopped_of(name, problem, upwards[::-1], grace, eta),
                "different": len(set(outcomes)),
                "count": count,
                "unlike": sum(one != outcomes[0] for one in outcomes),
                "survived": float(np.mean(survived)),
            }
        )
    return rows


def stopped_of(name: str, problem: Problem, order: Sequence[Trial], grace: int, eta: float) -> int:
    """Return the number of trials that the strategy `name` prunes if a single worker runs the trials in this order."""
    strategy = (Arms if name == OURS else asha)(problem.curves, order, grace, eta)
    rounds = work(strategy, problem.curves.shape[:2], 1, dict.fromkeys(order, 1.0)).rounds
    return int((rounds < problem.curves.shape[2]).sum())


def waiting(of_problems: Sequence[Problem], grace: int, eta: float) -> list[dict[str, Any]]:
    """Compare sweeps whose workers wait at rungs with sweeps whose idle workers run ahead of the decisions.

    Returns:
        A row for each number of workers and strategy, with means over the problems: the time of the sweep in mean
        durations of a round, the share of this time in which workers are busy, and the share of all rounds that were
        run.
    """
    rows = []
    for workers in (2, 4, 8, 16):
        for name in ("arms, waiting at rungs", "arms, running ahead (ours)", "per-trial ASHA"):
            times, budgets, busy = [], [], []
            for number, problem in enumerate(of_problems):
                drawn = np.random.default_rng(number).lognormal(0, 0.3, len(problem.order))
                seconds = dict(zip(problem.order, (drawn / drawn.mean()).tolist(), strict=True))
                strategy = (
                    asha(problem.curves, problem.order, grace, eta)
                    if name == "per-trial ASHA"
                    else Arms(problem.curves, problem.order, grace, eta, ahead="ahead" in name)
                )
                done = work(strategy, problem.curves.shape[:2], workers, seconds)
                times.append(done.time)
                budgets.append(done.rounds.sum() / problem.curves.size)
                busy.append(sum(done.rounds[trial] * seconds[trial] for trial in problem.order) / done.time / workers)
            means = {"time": np.mean(times), "budget": np.mean(budgets), "busy": np.mean(busy)}
            rows.append({"workers": workers, "strategy": name} | {key: float(value) for key, value in means.items()})
    return rows


def stratified(labels: Sequence[str], curves: Array, seeds: int, grace: int, eta: float) -> list[dict[str, Any]]:
    """Compare pruning over all tasks with pruning per task, on a sweep over tasks of unequal difficulty.

    Returns:
        A row for each strategy. For each task, the row has the share of trials that pass the first rung, and the share
        of problems in which the best arm of the task survives.
    """
    tasks = list(dict.fromkeys(label.split(", ")[0] for label in labels))
    of_arm = [tasks.index(label.split(", ")[0]) for label in labels]
    rows = []
    for name in ("per-trial ASHA", "per-trial ASHA, per task", "arms", "arms, per task (ours)"):
        passed, survived = np.zeros(len(tasks)), np.zeros(len(tasks))
        posed = problems(curves, len(curves), seeds, 300)
        for problem in posed:
            strata = [of_arm[arm] for arm in problem.arms]
            play = by_asha if "ASHA" in name else halved
            rounds = play(problem, grace, eta, strata=strata if "per task" in name else None)
            for task in range(len(tasks)):
                mine = [arm for arm in range(len(labels)) if strata[arm] == task]
                passed[task] += (rounds[mine] > grace).mean() / len(posed)
                best = max(mine, key=problem.truth.item)
                survived[task] += (rounds[best] == curves.shape[2]).any() / len(posed)
        rows.append({"strategy": name} | {task: (passed[n], survived[n]) for n, task in enumerate(tasks)})
    return rows


def main() -> None:
    """Replay the recorded curves and write the page or, with `--record`, record the curves of finished sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", nargs="+", type=Path, metavar="SWEEP", help="folders of finished sweeps whose curves are recorded"
    )
    parser.add_argument("--problems", type=int, default=200, help="number of random problems for each number of seeds")
    given = parser.parse_args()
    if given.record:
        record(given.record)
        return
    labels, curves = read("curves")
    counts = [seeds for seeds in (1, 2, 3) if seeds <= curves.shape[1]]
    scores = study({seeds: problems(curves, ARMS, seeds, given.problems) for seeds in counts})
    _, of_tasks = tasks = read("strata")
    with (RESULTS / "pruning_scores.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(scores[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in scores)
    pruning_page.write(
        curves=(labels, curves),
        tasks=tasks,
        problems=given.problems,
        arms=ARMS,
        budgets=BUDGETS,
        scores=scores,
        shuffles=shuffles(curves, *DEFAULTS, 100),
        waiting=waiting(problems(curves, ARMS, counts[-1], 30), *DEFAULTS),
        strata=stratified(*tasks, of_tasks.shape[1], *DEFAULTS),
    )


if __name__ == "__main__":
    main()
