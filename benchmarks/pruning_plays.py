"""Pruning strategies for `pruning.py`: functions that map a problem to the number of rounds that each trial runs."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from pruning_problems import Array, Problem, Rounds  # in the same folder
from pruning_workers import asha, medians, work
from scipy import stats

from fedsweep.sweep.pruning.arm_rules import halve, places, rungs

Play = Callable[[Problem], Rounds]


def halved(
    problem: Problem, grace: int, eta: float, together: bool = True, strata: Sequence[int] | None = None
) -> Rounds:
    """Prune whole arms by synchronous halving if `together` is set, and individual trials otherwise."""
    arms, seeds, rounds = problem.curves.shape
    of_trial = {
        (arm, seed): {step + 1: value for step, value in enumerate(problem.curves[arm, seed].tolist())}
        for arm in range(arms)
        for seed in range(seeds)
    }
    milestones = rungs(grace, eta, rounds)
    if together:
        by_arm = {arm: {seed: of_trial[arm, seed] for seed in range(seeds)} for arm in range(arms)}
        pruned = halve(by_arm, milestones, rounds, eta, strata=dict(enumerate(strata)) if strata else None).pruned
        return np.array([[pruned[arm].round if arm in pruned else rounds] * seeds for arm in range(arms)])
    alone = halve({trial: {0: history} for trial, history in of_trial.items()}, milestones, rounds, eta).pruned
    ended = [alone[trial].round if trial in alone else rounds for trial in of_trial]
    return np.array(ended).reshape(arms, seeds)


def by_asha(problem: Problem, grace: int, eta: float, strata: Sequence[int] | None = None) -> Rounds:
    """Prune trials with ASHA, on four workers and with rounds of equal length."""
    strategy = asha(problem.curves, problem.order, grace, eta, strata)
    return work(strategy, problem.curves.shape[:2], 4, dict.fromkeys(problem.order, 1.0)).rounds


def by_medians(problem: Problem, grace: int) -> Rounds:
    """Prune trials with the median stopping rule, on four workers and with rounds of equal length."""
    strategy = medians(problem.curves, problem.order, grace)
    return work(strategy, problem.curves.shape[:2], 4, dict.fromkeys(problem.order, 1.0)).rounds


def some_trials(problem: Problem, budget: float) -> Rounds:
    """Run random trials to their last round until the budget is spent."""
    rounds = np.zeros(problem.curves.shape[:2], dtype=np.int64)
    for trial in problem.order[: max(1, round(budget * len(problem.order)))]:
        rounds[trial] = problem.curves.shape[2]
    return rounds


def some_arms(problem: Problem, budget: float) -> Rounds:
    """Run random arms with all seeds to their last round until the budget is spent."""
    order = list(dict.fromkeys(arm for arm, _ in problem.order))
    rounds = np.zeros(problem.curves.shape[:2], dtype=np.int64)
    rounds[order[: max(1, round(budget * len(order)))]] = problem.curves.shape[2]
    return rounds


def ruled(problem: Problem, grace: int, eta: float, spares: Callable[[Array, Array], bool]) -> Rounds:
    """Prune whole arms as `halve` does, but with another rule for arms that are not among the best at a rung.

    `spares` returns whether such an arm continues nevertheless. It receives the values (seeds,) of the arm, and of the
    last arm that is promoted by its mean.
    """
    curves = problem.curves
    arms, seeds, last = curves.shape
    ended = np.full(arms, last)
    for rung, milestone in enumerate(rungs(grace, eta, last)):
        on = places(arms, eta, rung)
        ranked = sorted(np.flatnonzero(ended == last), key=lambda arm: -curves[arm, :, milestone - 1].mean())
        line = curves[ranked[:on][-1], :, milestone - 1]
        spared = [arm for arm in ranked[on:] if spares(curves[arm, :, milestone - 1], line)][:on]
        ended[[arm for arm in ranked[on:] if arm not in spared]] = milestone
    return np.repeat(ended[:, None], seeds, axis=1)


def nobody(_one: Array, _last: Array) -> bool:
    """Spare no arm, as in plain successive halving."""
    return False


def by_t_test(one: Array, last: Array) -> bool:
    """Spare an arm unless a paired t-test finds it worse than the last promoted arm, one-sided at 10 %."""
    difference = one - last
    if len(difference) == 1:
        return False
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return bool(difference.mean() + stats.t.ppf(0.9, len(difference) - 1) * error >= 0)
