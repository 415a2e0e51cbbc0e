"""Asynchronous successive halving whose decisions survive the process.

Ray's own ASHA keeps its rungs in memory and forgets them when a sweep is resumed. Here every rung decision is appended
to a log under the trial's content key; a resumed sweep reads the log and repeats the decisions that were made.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune.schedulers import FIFOScheduler

from fedsweep.checkpoint import write_atomically
from fedsweep.sweep.space import ASHAScheduler, Objective


class Rungs:
    """Asynchronous successive halving that stops: below the top 1/eta of a rung as filled so far, a trial ends.

    The rule is that of Ray's AsyncHyperBandScheduler with one bracket; Li et al. (2020) promote instead of stopping.
    """

    def __init__(self, config: ASHAScheduler, rounds: int, log: Path) -> None:
        self.config = config
        self.log = log
        self.milestones: list[int] = []
        milestone = float(config.grace_rounds)
        while milestone < rounds:
            self.milestones.append(int(milestone))
            milestone *= config.reduction_factor
        self.values: dict[int, dict[str, float]] = {milestone: {} for milestone in self.milestones}
        self.stopped: dict[tuple[str, int], bool] = {}
        for entry in _read_lines(log):
            self._remember(entry["key"], entry["round"], entry["value"], entry["stop"])

    def decide(self, key: str, round: int, value: float) -> bool:
        """Whether the trial is stopped after this round. `value` is better when larger."""
        if round not in self.values:
            return False
        if (key, round) in self.stopped:
            return self.stopped[key, round]
        others = list(self.values[round].values())
        stop = bool(others) and value < np.percentile(others, (1 - 1 / self.config.reduction_factor) * 100)
        self._append({"key": key, "round": round, "value": value, "stop": bool(stop)})
        self._remember(key, round, value, bool(stop))
        return bool(stop)

    def _remember(self, key: str, round: int, value: float, stop: bool) -> None:
        self.values[round][key] = value
        self.stopped[key, round] = stop

    def _append(self, entry: dict[str, Any]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


class RungScheduler(FIFOScheduler):
    """Ray's view of the rungs: continue or stop after each reported round."""

    def __init__(self, rungs: Rungs, objective: Objective) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rungs = rungs
        self.objective = objective

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Ray in the driver for each report."""
        if result["round"] not in self.rungs.values:  # the untuned model has no training loss, for one
            return FIFOScheduler.CONTINUE
        sign = 1 if self.objective.mode == "max" else -1
        stop = self.rungs.decide(trial.config["trial"], result["round"], sign * result[self.objective.metric])
        return FIFOScheduler.STOP if stop else FIFOScheduler.CONTINUE


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The log's entries; a last line torn by a crash in the middle of writing is cut off."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_atomically(path, whole.encode())
    return [json.loads(line) for line in whole.splitlines()]
