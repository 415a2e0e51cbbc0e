"""Simulated workers for `pruning.py`: a trial's rounds take time, and what a strategy stops is told as rounds end."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from pruning_problems import Array, Rounds, Trial  # beside this file

from fedsweep.sweep.pruning.arm_rules import Verdicts, halve, rungs
from fedsweep.sweep.pruning.trial_rules import Decision, Decisions, Medians, Rungs
from fedsweep.sweep.space.settings import ASHAScheduler, MedianScheduler

NO_LOG = Path("not written")


class Strategy(Protocol):
    """What is played next, and whether a trial goes on."""

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """A trial and the round up to which a free worker plays it; None if there is nothing at the moment."""

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Told after each round."""


@dataclass(frozen=True)
class Work:
    """What workers did."""

    rounds: Rounds
    time: float
    """When the last of them ended, in the time of an average round."""


def work(strategy: Strategy, shape: tuple[int, int], workers: int, seconds: Mapping[Trial, float]) -> Work:
    """Let workers play until nothing is left. Of rounds ending at once, the earlier trial counts first."""
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
    """Decisions without the file that a resumed sweep reads."""

    def add(self, decision: Decision) -> None:
        """Remember it."""
        self.made[decision.key, decision.round] = decision


class TrialByTrial:
    """Trials in a given order, each stopped by a rule that sees what others have reported by then."""

    def __init__(
        self, rule: Rungs | Medians, curves: Array, order: Sequence[Trial], strata: Sequence[int] | None = None
    ) -> None:
        self.rule, self.curves, self.left, self.strata = rule, curves, iter(order), strata
        rule.decisions = Unlogged(NO_LOG)

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """The next trial in the given order, to its last round."""
        trial = next(self.left, None)
        return None if trial is None else (trial, self.curves.shape[2])

    def goes_on(self, trial: Trial, round: int) -> bool:
        """What the rule decides."""
        if round == self.curves.shape[2]:
            return False
        stratum = str(self.strata[trial[0]]) if self.strata else ""
        return not self.rule.decide(str(trial), round, float(self.curves[*trial, round - 1]), stratum)


def asha(
    curves: Array, order: Sequence[Trial], grace: int, eta: float, strata: Sequence[int] | None = None
) -> TrialByTrial:
    """Per-trial ASHA."""
    rule = Rungs(ASHAScheduler(grace_rounds=grace, reduction_factor=eta), curves.shape[2], NO_LOG)
    return TrialByTrial(rule, curves, order, strata)


def medians(curves: Array, order: Sequence[Trial], grace: int) -> TrialByTrial:
    """Median stopping."""
    return TrialByTrial(Medians(MedianScheduler(grace_rounds=grace), NO_LOG), curves, order)


class Arms:
    """Arms that are halved together; where nothing else is left, workers may play ahead of a rung's decision."""

    def __init__(self, curves: Array, order: Sequence[Trial], grace: int, eta: float, ahead: bool = True) -> None:
        self.curves, self.order, self.eta, self.ahead = curves, order, eta, ahead
        self.rounds = curves.shape[2]
        self.milestones = rungs(grace, eta, self.rounds)
        self.histories: dict[int, dict[int, dict[int, float]]] = {}
        for arm, seed in order:
            self.histories.setdefault(arm, {})[seed] = {}
        self.verdicts = self._halve()

    def stopped_at(self, arm: int) -> int:
        """The round at which an arm was pruned, or the last."""
        pruned = self.verdicts.pruned.get(arm)
        return pruned.round if pruned else self.rounds

    def _halve(self) -> Verdicts[int]:
        return halve(self.histories, self.milestones, self.rounds, self.eta)

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """A trial of the first arm that has one to play."""
        offers = {**self.verdicts.promoted, **(self.verdicts.undecided if self.ahead else {})}
        for arm, until in offers.items():
            for seed, history in self.histories[arm].items():
                if len(history) < until and (arm, seed) not in running:
                    return (arm, seed), until
        return None

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Always, up to the round that was asked for."""
        arm, seed = trial
        self.histories[arm][seed][round] = float(self.curves[arm, seed, round - 1])
        if round in (*self.milestones, self.rounds):
            self.verdicts = self._halve()
        return True
