"""Pruning strategies for `pruning.py`: functions that map a problem to the number of rounds that each trial runs."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from pruning_problems import Array, Problem, Rounds  # in the same folder
from pruning_workers import asha, medians, work
from scipy import stats

from fedsweep.sweep.pruning.arm_rules import halve, places
from fedsweep.sweep.space.settings import rungs

Play = Callable[[Problem], Rounds]


def halved(
    problem: Problem, grace: int, eta: float, together: bool = True, strata: Sequence[int] | None = None
) -> Rounds:
    """Run synchronous halving of whole arms if `together` is set, and of single trials otherwise.

    Args:
        problem: The sweep to replay.
        grace: The round of the first rung.
        eta: At each rung, one in `eta` of the arms or trials is promoted.
        together: Whether all seeds of an arm are pruned together.
        strata: The task of each arm, if only arms of the same task are compared; ignored for single trials.

    Returns:
        The number of rounds that each trial runs, (arms, seeds).
    """
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
    """Run ASHA on four workers with rounds of equal length, and return the number of rounds that each trial runs.

    If `strata` is given, it contains the task of each arm, and only trials of the same task are compared.
    """
    strategy = asha(problem.curves, problem.order, grace, eta, strata)
    return work(strategy, problem.curves.shape[:2], 4, dict.fromkeys(problem.order, 1.0)).rounds


def by_medians(problem: Problem, grace: int) -> Rounds:
    """Run the median stopping rule on four workers with rounds of equal length.

    Return the number of rounds that each trial runs.
    """
    strategy = medians(problem.curves, problem.order, grace)
    return work(strategy, problem.curves.shape[:2], 4, dict.fromkeys(problem.order, 1.0)).rounds


def some_trials(problem: Problem, budget: float) -> Rounds:
    """Run random trials to their last round until the share `budget` of all rounds is spent.

    Return the number of rounds that each trial runs.
    """
    rounds = np.zeros(problem.curves.shape[:2], dtype=np.int64)
    for trial in problem.order[: max(1, round(budget * len(problem.order)))]:
        rounds[trial] = problem.curves.shape[2]
    return rounds


def some_arms(problem: Problem, budget: float) -> Rounds:
    """Run random arms with all seeds to their last round until the share `budget` of all rounds is spent.

    Return the number of rounds that each trial runs.
    """
    order = list(dict.fromkeys(arm for arm, _ in problem.order))
    rounds = np.zeros(problem.curves.shape[:2], dtype=np.int64)
    rounds[order[: max(1, round(budget * len(order)))]] = problem.curves.shape[2]
    return rounds


def ruled(problem: Problem, grace: int, eta: float, spares: Callable[[Array, Array], bool]) -> Rounds:
    """Prune whole arms by successive halving, with a given rule for arms that are not promoted by their mean.

    Args:
        problem: The sweep to replay.
        grace: The round of the first rung.
        eta: At each rung, one in `eta` of the arms is promoted by its mean over the seeds.
        spares: A function that returns whether another arm continues, too. Its arguments are the values (seeds,) of
            this arm at the rung, and those of the last arm that is promoted by its mean.

    Returns:
        The number of rounds that each trial runs, (arms, seeds).
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
    """Return False for every arm: in plain successive halving, arms continue only if their mean is among the best."""
    return False


def by_t_test(one: Array, last: Array) -> bool:
    """Return False if a paired t-test finds the values `one` of an arm worse than `last`, else True.

    `last` has the values of the last arm that is promoted by its mean. The test is one-sided, at the 10 % level. With a
    single seed, the result is False.
    """
    difference = one - last
    if len(difference) == 1:
        return False
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return bool(difference.mean() + stats.t.ppf(0.9, len(difference) - 1) * error >= 0)
