"""Rules that stop single trials as soon as they report (asynchronous halving and the median rule), and their log."""

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
from fedsweep.sweep.space.settings import AsyncASHAScheduler, Goal, MedianScheduler, rungs


@dataclass(frozen=True)
class Decision:
    """The decision whether to stop a trial after a round, and the trial's value after that round.

    Larger values are better.
    """

    key: str
    round: int
    value: float
    stop: bool
    stratum: str = ""


class Decisions:
    """The decisions of a sweep, by trial and round, and the log file in which they are recorded.

    If a crash has truncated the last line of the log, that line is removed.
    """

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
    """Asynchronous successive halving, which stops a trial unless it is among the best so far.

    Trials are compared at rungs, which are certain rounds. A trial continues if its value is in the best 1/eta of the
    values that earlier trials have reached at the same rung, where eta is the reduction factor. Only trials of the same
    group (`stratum`) are compared.

    The rule is the same as in Ray's AsyncHyperBandScheduler with one bracket. The original algorithm by Li et al.
    (2020) promotes good trials instead and stops no trial.
    """

    def __init__(self, config: AsyncASHAScheduler, rounds: int, log: Path, remote: Remote = NOTHING) -> None:
        self.config, self.milestones = config, rungs(config.grace_rounds, config.reduction_factor, rounds)
        self.values: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum, made.round][made.key] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Return whether to stop the trial `key` after a round. A larger `value` is better.

        The trial is compared only with trials of the same group (`stratum`).
        """
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
    """The median rule, which stops a trial if its best value is below the median of the other trials' running means.

    A running mean is the mean of a trial's values up to the current round. Only trials of the same group (`stratum`)
    are compared.
    """

    def __init__(self, config: MedianScheduler, log: Path, remote: Remote = NOTHING) -> None:
        self.config = config
        self.values: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum][made.key][made.round] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Return whether to stop the trial `key` after a round. A larger `value` is better.

        The trial is compared only with trials of the same group (`stratum`).
        """
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
        # Recorded even if the trial continues, because other trials are compared with its value.
        self.decisions.add(Decision(key, round, value, stop, stratum))
        return stop


class StoppingScheduler(FIFOScheduler):
    """A Ray scheduler that applies a stopping rule after each reported round."""

    def __init__(self, rule: Rungs | Medians, goal: Goal, per: tuple[str, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule, self.goal, self.per = rule, goal, per

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Apply the rule to a reported round, and return `CONTINUE` or `STOP` for the trial."""
        if self.goal.metric not in result or "error" in result:  # the untuned model has no training loss
            return FIFOScheduler.CONTINUE
        sign = 1 if self.goal.mode == "max" else -1
        value, stratum = sign * result[self.goal.metric], identity([trial.config.get(one) for one in self.per])
        stop = self.rule.decide(trial.config["trial"], result["round"], value, stratum)
        return FIFOScheduler.STOP if stop else FIFOScheduler.CONTINUE
