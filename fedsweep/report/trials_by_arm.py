"""Arms of a sweep: trials that share the varied hyperparameters and differ in the seed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialRecord
from fedsweep.results.arms import identity
from fedsweep.results.history import RoundRecord


@dataclass(frozen=True)
class Arm:
    """One setting of the varied hyperparameters, with its trials in the order of the plan."""

    values: Mapping[str, Json]
    trials: tuple[TrialRecord, ...]

    def finished(self, metric: str) -> dict[int, TrialRecord]:
        """Trials by seed that ran to their end with a finite `metric`: the only ones that enter a mean or a test."""
        return {
            trial.plan.seed: trial
            for trial in self.trials
            if ended(trial) == "finished" and final(trial, metric) is not None
        }

    def reached(self, metric: str) -> tuple[int, float | None]:
        """The furthest round of any trial, and the mean of the metric over the trials recorded there."""
        furthest = max(trial.last_round for trial in self.trials)
        there = [final(trial, metric) for trial in self.trials if trial.last_round == furthest]
        return furthest, mean(value for value in there if value is not None)


def group(trials: Iterable[TrialRecord]) -> list[Arm]:
    """Trials by arm. Numeric hyperparameters ascend (a plan may be shuffled), others keep the order of the plan."""
    grouped: dict[str, list[TrialRecord]] = {}
    for trial in sorted(trials, key=lambda one: one.plan.number):
        grouped.setdefault(identity(trial.plan.arm), []).append(trial)
    arms = [Arm(members[0].plan.arm, tuple(members)) for members in grouped.values()]
    places = {name: _places(name, arms) for name in dict.fromkeys(name for arm in arms for name in arm.values)}
    return sorted(arms, key=lambda arm: [place[identity(arm.values.get(name))] for name, place in places.items()])


def _places(name: str, arms: Sequence[Arm]) -> dict[str, int]:
    """The place of each value of a hyperparameter, by its `identity`."""
    values = [arm.values.get(name) for arm in arms]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    ordered = sorted(numbers) if len(numbers) == len(values) else values
    return {key: place for place, key in enumerate(dict.fromkeys(map(identity, ordered)))}


def ended(trial: TrialRecord) -> str:
    """`finished`, `pruned`, `diverged`, `failed` or `unfinished`."""
    return trial.outcome.outcome if trial.outcome else "unfinished"


def recorded(history: Sequence[RoundRecord], metric: str) -> dict[int, float]:
    """Finite values of a metric by round (`loss/train` has none for the untuned model)."""
    values = {record.round: record.metrics.get(metric, math.nan) for record in history}
    return {number: value for number, value in values.items() if math.isfinite(value)}


def final(trial: TrialRecord, metric: str) -> float | None:
    """The metric at the last round recorded, or None where it is absent, infinite or not a number."""
    return recorded(trial.history[-1:], metric).get(trial.last_round)


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean, or None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def notes(arm: Arm, metric: str, show: Callable[[float], str] | None = None) -> list[str]:
    """What a reader must know about trials that are in no mean, seeds with the same fate together.

    For example `seeds 0, 2 pruned at round 3`, `seed 1 failed after round 4`; with `show`, which writes a value of the
    metric, followed by the mean that they had reached, as in `seeds 0, 2 pruned at round 3 (48.12)`.
    """
    finished, fates = arm.finished(metric), dict[str, dict[int, TrialRecord]]()
    for trial in arm.trials:
        # A search may draw an arm twice: the same seed gives the same numbers, and one of the two suffices.
        if trial.plan.seed not in finished:
            fates.setdefault(_fate(trial, metric), {})[trial.plan.seed] = trial
    found = []
    for fate, trials in fates.items():
        ends = [final(trial, metric) for trial in trials.values()]
        reached = mean(end for end in ends if end is not None)
        value = f" ({show(reached)})" if show and reached is not None else ""
        found.append(f"seed{'s' * (len(trials) > 1)} {', '.join(map(str, trials))} {fate}{value}")
    return found


def _fate(trial: TrialRecord, metric: str) -> str:
    """Why a trial is in no mean."""
    if trial.outcome is None:
        return f"unfinished at round {trial.last_round}" if trial.history else "not started"
    if trial.outcome.outcome == "pruned":
        return f"pruned at round {trial.outcome.round}"
    if (how := trial.outcome.outcome) != "finished":
        return f"{how} after round {trial.outcome.round}" if trial.outcome.round > 0 else how
    return f"finished without a finite {metric}"
