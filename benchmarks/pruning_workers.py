"""Simulated workers for `pruning.py`, which run the rounds of trials under a pruning strategy."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from pruning_problems import Array, Rounds, Trial  # in the same folder

from fedsweep.sweep.pruning.arm_rules import Verdicts, halve
from fedsweep.sweep.pruning.trial_rules import Decision, Decisions, Medians, Rungs
from fedsweep.sweep.space.settings import AsyncASHAScheduler, MedianScheduler, rungs

NO_LOG = Path("not written")


class Strategy(Protocol):
    """A pruning strategy: it chooses the next trial to run, and decides after each round whether a trial continues."""

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """Return the next trial for a free worker and the round up to which it runs, or None if none can run now."""

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Record a finished round, and return whether the trial continues."""


@dataclass(frozen=True)
class Work:
    """The result of a simulation: the number of rounds that were run of each trial, and the time until the end."""

    rounds: Rounds
    time: float
    """The time at which the last round ended, in the unit of the durations passed to `work`."""


def work(strategy: Strategy, shape: tuple[int, int], workers: int, seconds: Mapping[Trial, float]) -> Work:
    """Run a strategy on simulated workers until no trial is left.

    Rounds that end at the same time are reported in the order in which their trials were started.

    Args:
        strategy: The strategy.
        shape: The number of arms and the number of seeds.
        workers: The number of workers.
        seconds: The duration of a round of each trial.
    """
    rounds = np.zeros(shape, dtype=np.int64)
    running: dict[Trial, int] = {}
    events: list[tuple[float, int, Trial]] = []
    now, begun = 0.0, 0
    while True:
        while len(running) < workers and (offer := strategy.next(running)) is not None:
            trial, until = offer
            running[trial] = until
            begun += 1
            heapq.heappush(events, (now + seconds[trial], begun, trial))
        if not events:
            return Work(rounds, now)
        now, number, trial = heapq.heappop(events)
        rounds[trial] += 1
        if strategy.goes_on(trial, int(rounds[trial])) and rounds[trial] < running[trial]:
            heapq.heappush(events, (now + seconds[trial], number, trial))
        else:
            del running[trial]


class Unlogged(Decisions):
    """Pruning decisions that are kept in memory only."""

    def add(self, decision: Decision) -> None:
        """Keep a decision in memory."""
        self.made[decision.key, decision.round] = decision


class TrialByTrial:
    """A strategy that runs trials in a given order, and prunes each trial by a rule on the values reported so far."""

    def __init__(
        self, rule: Rungs | Medians, curves: Array, order: Sequence[Trial], strata: Sequence[int] | None = None
    ) -> None:
        self.rule, self.curves, self.left, self.strata = rule, curves, iter(order), strata
        rule.decisions = Unlogged(NO_LOG)

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """Return the next trial in the given order, to be run up to the last round."""
        trial = next(self.left, None)
        return None if trial is None else (trial, self.curves.shape[2])

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Return whether the trial has rounds left and the rule does not prune it."""
        if round == self.curves.shape[2]:
            return False
        stratum = str(self.strata[trial[0]]) if self.strata else ""
        return not self.rule.decide(str(trial), round, float(self.curves[*trial, round - 1]), stratum)


def asha(
    curves: Array, order: Sequence[Trial], grace: int, eta: float, strata: Sequence[int] | None = None
) -> TrialByTrial:
    """Return a strategy that prunes single trials by ASHA.

    If `strata` is given, it contains the task of each arm, and only trials of the same task are compared.
    """
    rule = Rungs(AsyncASHAScheduler(grace_rounds=grace, reduction_factor=eta), curves.shape[2], NO_LOG)
    return TrialByTrial(rule, curves, order, strata)


def medians(curves: Array, order: Sequence[Trial], grace: int) -> TrialByTrial:
    """Return a strategy that prunes single trials by the median stopping rule."""
    return TrialByTrial(Medians(MedianScheduler(grace_rounds=grace), NO_LOG), curves, order)


class Arms:
    """A strategy that prunes whole arms by successive halving.

    If `ahead` is set, idle workers run trials beyond a rung before the decision at this rung.
    """

    def __init__(self, curves: Array, order: Sequence[Trial], grace: int, eta: float, ahead: bool = True) -> None:
        self.curves, self.order, self.eta, self.ahead = curves, order, eta, ahead
        self.rounds = curves.shape[2]
        self.milestones = rungs(grace, eta, self.rounds)
        self.histories: dict[int, dict[int, dict[int, float]]] = {}
        for arm, seed in order:
            self.histories.setdefault(arm, {})[seed] = {}
        self.verdicts = self._halve()

    def stopped_at(self, arm: int) -> int:
        """Return the round at which an arm was pruned, or the number of the last round if the arm was not pruned."""
        pruned = self.verdicts.pruned.get(arm)
        return pruned.round if pruned else self.rounds

    def _halve(self) -> Verdicts[int]:
        return halve(self.histories, self.milestones, self.rounds, self.eta)

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """Return the next trial and the round up to which it runs, or None; promoted arms precede undecided arms."""
        offers = {**self.verdicts.promoted, **(self.verdicts.undecided if self.ahead else {})}
        for arm, until in offers.items():
            for seed, history in self.histories[arm].items():
                if len(history) < until and (arm, seed) not in running:
                    return (arm, seed), until
        return None

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Record a round, update the decisions and return True: each trial always runs to the round set by `next`."""
        arm, seed = trial
        self.histories[arm][seed][round] = float(self.curves[arm, seed, round - 1])
        if round in (*self.milestones, self.rounds):
            self.verdicts = self._halve()
        return True
