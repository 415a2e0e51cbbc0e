"""Problems for `pruning.py`, resampled from the curves of finished sweeps, and the scores of strategies on them."""

import csv
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsweep.results import SweepStore
from fedsweep.results.arms import arm_label

RESULTS = Path(__file__).parent / "results"
CURVES = RESULTS / "pruning_curves.csv"
Array = NDArray[np.float64]
Rounds = NDArray[np.int64]
"""The number of rounds that each trial runs, (arms, seeds)."""
Trial = tuple[int, int]
"""The indices of an arm and a seed."""


@dataclass(frozen=True)
class Problem:
    """A sweep with known results: the complete curves of its trials, and the true values of its arms."""

    curves: Array
    """Accuracies from 0 to 1, (arms, seeds, rounds)."""
    truth: Array
    """The true value of each arm: its mean at the last round over all recorded seeds, (arms,)."""
    order: Sequence[Trial]
    """The order in which trials are started."""
    arms: Sequence[int]
    """The indices of the problem's arms among the recorded arms."""

    @property
    def best(self) -> int:
        """The index of the truly best arm."""
        return int(self.truth.argmax())


@dataclass(frozen=True)
class Score:
    """The scores of a strategy on a problem."""

    budget: float
    """The share of all rounds that were run."""
    survived: float
    """1 if at least one trial of the truly best arm reached the last round, else 0."""
    whole: float
    """1 if all trials of the truly best arm reached the last round, else 0."""
    right: float
    """1 if the truly best arm has the highest mean among the arms that reached the last round, else 0."""
    top3: float
    """1 if the selected arm, which has the highest of these means, is among the three truly best arms, else 0."""
    regret: float
    """The true value of the truly best arm minus the true value of the selected arm, in percentage points."""

    @classmethod
    def of(cls, problem: Problem, rounds: Rounds) -> "Score":
        """Return the scores of a strategy, given the number of rounds that the strategy ran of each trial."""
        ended = rounds == problem.curves.shape[2]
        last = np.where(ended, problem.curves[:, :, -1], np.nan)
        finished = ended.any(axis=1)
        means = np.full(len(rounds), -math.inf)
        means[finished] = np.nanmean(last[finished], axis=1)
        answer, truth, best = int(means.argmax()), problem.truth, problem.best
        return cls(
            budget=float(rounds.sum() / problem.curves.size),
            survived=float(finished[best]),
            whole=float(ended[best].all()),
            right=float(answer == best),
            top3=float((truth > truth[answer]).sum() < 3),
            regret=float(100 * (truth[best] - truth[answer])),
        )


def read(sweep: str) -> tuple[list[str], Array]:
    """Return the labels of a recorded sweep's arms, and its curves (arms, seeds, rounds) for common seeds."""
    with CURVES.open(newline="") as file:
        lines = [line for line in csv.reader(file) if line[0] == sweep]
    arms = list(dict.fromkeys(line[1] for line in lines))
    found = {(line[1], int(line[2])): [float(value) for value in line[3:]] for line in lines}
    seeds = [seed for seed in sorted({seed for _, seed in found}) if all((arm, seed) in found for arm in arms)]
    return arms, np.array([[found[arm, seed] for seed in seeds] for arm in arms])


def record(folders: Sequence[Path]) -> None:
    """Write the objective in finished sweeps to a CSV file, with a row for each trial and a column for each round."""
    lines = []
    for sweep in map(SweepStore, folders):
        manifest = sweep.manifest()
        shutil.copy(sweep.folder / "search_space.yaml", RESULTS / f"pruning_{manifest.name}.yaml")
        sign = 1 if manifest.mode == "max" else -1
        for trial in sweep.trials():
            values = [sign * one.metrics[manifest.metric] for one in trial.history if one.round > 0]
            if len(values) == manifest.rounds:
                key = (manifest.name, arm_label(trial.plan.arm), trial.plan.seed)
                lines.append((trial.plan.number, [*key, *(f"{value:.6f}" for value in values)]))
    lines.sort(key=lambda line: (line[1][0], line[0], line[1][2]))
    with CURVES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sweep", "arm", "seed", *range(1, len(lines[0][1]) - 2)])
        writer.writerows(line for _, line in lines)


def problems(curves: Array, arms: int, seeds: int, count: int) -> list[Problem]:
    """Return `count` problems with random arms, seeds and orders. Each call returns the same problems."""
    rng = np.random.default_rng(arms * 100 + seeds)
    found = []
    for _ in range(count):
        chosen = rng.choice(len(curves), arms, replace=False)
        some = rng.choice(curves.shape[1], seeds, replace=False)
        trials = [(arm, seed) for arm in range(arms) for seed in range(seeds)]
        order = [trials[place] for place in rng.permutation(len(trials))]
        found.append(Problem(curves[chosen][:, some], curves[chosen, :, -1].mean(axis=1), order, chosen.tolist()))
    return found
