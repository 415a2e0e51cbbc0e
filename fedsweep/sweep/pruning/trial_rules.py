"""Schedulers that stop single trials, by successive halving or the median rule, with a log of decisions."""

import json
import os
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune.schedulers import FIFOScheduler

from fedsweep.common.files import write_atomically
from fedsweep.results.arms import identity
from fedsweep.results.remote import NOTHING, Remote
from fedsweep.sweep.pruning.arm_rules import rungs
from fedsweep.sweep.space.settings import ASHAScheduler, MedianScheduler, Objective


@dataclass(frozen=True)
class Decision:
    """The decision whether to stop a trial after a round, and the trial's value then, better when larger."""

    key: str
    round: int
    value: float
    stop: bool
    stratum: str = ""


class Decisions:
    """The decisions of a sweep, by trial and round, stored in a log. An incomplete last line is discarded."""

    def __init__(self, log: Path, remote: Remote = NOTHING) -> None:
        self.log, self._remote = log, remote.below(log.name)
        self.made: dict[tuple[str, int], Decision] = {}
        text = log.read_text() if log.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_atomically(log, whole.encode())
        for decision in (Decision(**json.loads(line)) for line in whole.splitlines()):
            self.made[decision.key, decision.round] = decision

    def add(self, decision: Decision) -> None:
        """Write a decision to the log, and wait until it is on disk."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(json.dumps(asdict(decision)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._remote.push()
        self.made[decision.key, decision.round] = decision


class Rungs:
    """Asynchronous successive halving: stop a trial that is not in the top 1/eta of its stratum at a rung so far.

    This is the rule of Ray's AsyncHyperBandScheduler with one bracket; Li et al. (2020) promote instead of stopping.
    """

    def __init__(self, config: ASHAScheduler, rounds: int, log: Path, remote: Remote = NOTHING) -> None:
        self.config, self.milestones = config, rungs(config.grace_rounds, config.reduction_factor, rounds)
        self.values: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum, made.round][made.key] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Return whether to stop the trial after this round; `value` is better when larger."""
        if round not in self.milestones:
            return False
        if (made := self.decisions.made.get((key, round))) is not None:
            return made.stop
        rung, percent = self.values[stratum, round], (1 - 1 / self.config.reduction_factor) * 100
        stop = bool(rung) and bool(value < np.percentile(list(rung.values()), percent))
        self.decisions.add(Decision(key, round, value, stop, stratum))
        rung[key] = value
        return stop


class Medians:
    """Median rule: stop a trial whose best value so far is below the median of its stratum's other running means."""

    def __init__(self, config: MedianScheduler, log: Path, remote: Remote = NOTHING) -> None:
        self.config = config
        self.values: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum][made.key][made.round] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Return whether to stop the trial after this round; `value` is better when larger."""
        if round < 1:
            return False  # the untuned model
        if (made := self.decisions.made.get((key, round))) is not None:
            return made.stop
        known = self.values[stratum]
        known[key][round] = value
        others = [
            statistics.fmean(one for at, one in values.items() if at <= round)
            for other, values in known.items()
            if other != key and round in values
        ]
        enough = round >= self.config.grace_rounds and len(others) >= self.config.fewest
        stop = enough and max(known[key].values()) < statistics.median(others)
        self.decisions.add(Decision(key, round, value, stop, stratum))  # also without a stop: others need the value
        return stop


class StoppingScheduler(FIFOScheduler):
    """Scheduler of Ray that applies a rule after each reported round."""

    def __init__(self, rule: Rungs | Medians, objective: Objective, per: tuple[str, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule, self.objective, self.per = rule, objective, per

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Apply the rule to a report that has the objective."""
        if self.objective.metric not in result or "error" in result:  # the untuned model has no training loss
            return FIFOScheduler.CONTINUE
        sign = 1 if self.objective.mode == "max" else -1
        value, stratum = sign * result[self.objective.metric], identity([trial.config.get(one) for one in self.per])
        stop = self.rule.decide(trial.config["trial"], result["round"], value, stratum)
        return FIFOScheduler.STOP if stop else FIFOScheduler.CONTINUE
