"""Problems for `pruning.py`: curves that finished sweeps recorded, resampled, and what an outcome is worth."""

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
"""(arms, seeds), rounds played of each trial."""
Trial = tuple[int, int]
"""An arm and a seed, by number."""


@dataclass(frozen=True)
class Problem:
    """What a sweep would record if nothing were stopped, and which arm is the best."""

    curves: Array
    """(arms, seeds, rounds), accuracies from 0 to 1."""
    truth: Array
    """(arms,), the last round's mean over all recorded seeds."""
    order: Sequence[Trial]
    """In which the trials are started."""
    arms: Sequence[int]
    """Which of the recorded arms these are."""

    @property
    def best(self) -> int:
        """The truly best arm."""
        return int(self.truth.argmax())


@dataclass(frozen=True)
class Score:
    """What a strategy made of a problem. Averaged over problems, in this order."""

    budget: float
    """Rounds played, as a share of all."""
    survived: float
    """Whether a trial of the truly best arm reached the last round."""
    whole: float
    """Whether all its trials did, so that its seeds pair with the others'."""
    right: float
    """Whether the truly best arm is answered: of the arms that reached the last round the one with the best mean."""
    top3: float
    regret: float
    """How much better the truly best arm is than the answer, in points."""

    @classmethod
    def of(cls, problem: Problem, rounds: Rounds) -> "Score":
        """Judge what was played."""
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
    """The labels of a recorded sweep's arms, and their curves (arms, seeds, rounds) with the seeds of all."""
    with CURVES.open(newline="") as file:
        lines = [line for line in csv.reader(file) if line[0] == sweep]
    arms = list(dict.fromkeys(line[1] for line in lines))
    found = {(line[1], int(line[2])): [float(value) for value in line[3:]] for line in lines}
    seeds = [seed for seed in sorted({seed for _, seed in found}) if all((arm, seed) in found for arm in arms)]
    return arms, np.array([[found[arm, seed] for seed in seeds] for arm in arms])


def record(folders: Sequence[Path]) -> None:
    """Write what finished sweeps recorded of their objective, one line a trial; untuned models (round 0) left out."""
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
    """Random arms, seeds and orders, the same for every strategy."""
    rng = np.random.default_rng(arms * 100 + seeds)
    found = []
    for _ in range(count):
        chosen = rng.choice(len(curves), arms, replace=False)
        some = rng.choice(curves.shape[1], seeds, replace=False)
        trials = [(arm, seed) for arm in range(arms) for seed in range(seeds)]
        order = [trials[place] for place in rng.permutation(len(trials))]
        found.append(Problem(curves[chosen][:, some], curves[chosen, :, -1].mean(axis=1), order, chosen.tolist()))
    return found
