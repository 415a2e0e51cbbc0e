"""Trials that are stopped one by one: asynchronous successive halving whose decisions survive the process.

Ray's own schedulers keep what they know in memory and forget it when a sweep is resumed. Here every decision is
appended to a log under the trial's content key; a resumed sweep reads the log and repeats the decisions that were made.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ray.tune.schedulers import FIFOScheduler

from fedsweep.results.arms import identity
from fedsweep.results.remote import NOTHING, Remote
from fedsweep.sweep.decisions import Decision, Decisions
from fedsweep.sweep.objective import Objective
from fedsweep.sweep.schedulers import ASHAScheduler


class Rule(Protocol):
    """Whether a trial is stopped, from what it and others have reported by then."""

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Whether the trial is stopped after this round. `value` is better when larger."""


class Rungs:
    """Asynchronous successive halving that stops: below the top 1/eta of a rung as filled so far, a trial ends.

    The rule is that of Ray's AsyncHyperBandScheduler with one bracket; Li et al. (2020) promote instead of stopping.
    Each stratum has rungs of its own.
    """

    def __init__(self, config: ASHAScheduler, rounds: int, log: Path, remote: Remote = NOTHING) -> None:
        self.config = config
        self.milestones: list[int] = []
        milestone = float(config.grace_rounds)
        while milestone < rounds:
            self.milestones.append(int(milestone))
            milestone *= config.reduction_factor
        self.values: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum, made.round][made.key] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Whether the trial is stopped after this round. `value` is better when larger."""
        if round not in self.milestones:
            return False
        if (made := self.decisions.made.get((key, round))) is not None:
            return made.stop
        rung = self.values[stratum, round]
        others = list(rung.values())
        stop = bool(others) and bool(value < np.percentile(others, (1 - 1 / self.config.reduction_factor) * 100))
        self.decisions.add(Decision(key, round, value, stop, stratum))
        rung[key] = value
        return stop


class StoppingScheduler(FIFOScheduler):
    """Ray's view of a rule: continue or stop after each reported round."""

    def __init__(self, rule: Rule, objective: Objective, per: tuple[str, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule, self.objective, self.per = rule, objective, per

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Ray in the driver for each report."""
        if self.objective.metric not in result or "error" in result:  # the untuned model has no training loss, for one
            return FIFOScheduler.CONTINUE
        sign = 1 if self.objective.mode == "max" else -1
        value, stratum = sign * result[self.objective.metric], identity([trial.config.get(one) for one in self.per])
        stop = self.rule.decide(trial.config["trial"], result["round"], value, stratum)
        return FIFOScheduler.STOP if stop else FIFOScheduler.CONTINUE
