"""The schedules of population-based training: the hyperparameters by round, as CSV and as sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ended, final, recorded
from fedsweep.report.text_tables import texts
from fedsweep.results import SweepManifest, TrialRecord

POPULATION = "pbt"  # the scheduler whose trials continue other trials


@dataclass(frozen=True)
class Lineage:
    """A trial of a population and its ancestors, oldest first. Each trial continues the training of its predecessor."""

    trials: tuple[TrialRecord, ...]

    @classmethod
    def of(cls, trial: TrialRecord, by_key: Mapping[str, TrialRecord]) -> "Lineage":
        """Return the lineage of a trial; its ancestors are looked up in `by_key`, a dict from key to trial."""
        found = [trial]
        while (start := found[-1].plan.start) is not None and start.key in by_key:
            found.append(by_key[start.key])
        return cls(tuple(reversed(found)))

    @property
    def end(self) -> TrialRecord:
        """The youngest trial; its history contains all rounds of the lineage."""
        return self.trials[-1]

    def segments(self) -> list[tuple[int, int, TrialRecord]]:
        """Return the first round, the last round and the trial of each segment of the lineage.

        A segment is the range of rounds that one trial trained. Trials that trained no round of the lineage are left
        out.
        """
        firsts = [one.plan.start.round + 1 if one.plan.start else 1 for one in self.trials]
        lasts = [*(first - 1 for first in firsts[1:]), self.end.last_round]
        found = zip(firsts, lasts, self.trials, strict=True)
        return [(first, last, one) for first, last, one in found if last >= first]

    def values(self, name: str) -> list[tuple[int, int, float]]:
        """Return the first round, the last round and the value of the hyperparameter `name` for each segment.

        Segments in which the value is not a number are left out.
        """
        return [
            (first, last, float(value))
            for first, last, one in self.segments()
            if isinstance(value := one.plan.arm.get(name), int | float)
        ]


def best(manifest: SweepManifest, found: Sequence[Lineage]) -> Lineage | None:
    """Return the lineage with the best final objective among those whose youngest trial has finished.

    Return None if no such lineage has a finite final objective.
    """
    sign = 1 if manifest.mode == "max" else -1
    ends = [(final(one.end, manifest.metric), one) for one in found if ended(one.end) == "finished"]
    known = [(sign * value, -one.end.plan.number, one) for value, one in ends if value is not None]
    return max(known, key=lambda entry: entry[:2])[2] if known else None


def played(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[Lineage]:
    """Return the lineage of each member of a population, in the order of the plan.

    Members are the trials that were not replaced by a copy of a better trial. Members that have not completed a round
    are left out. The list is empty if the sweep does not use population-based training.
    """
    if manifest.scheduler != POPULATION:
        return []
    by_key = {one.plan.key: one for one in trials}
    members = (Lineage.of(one, by_key) for one in trials if ended(one) != "pruned")
    return [one for one in members if one.segments()]


def schedule_sentences(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[str]:
    """Return sentences about the replaced trials of a population and about the hyperparameters of its best member.

    The list is empty if the sweep does not use population-based training.
    """
    if manifest.scheduler != POPULATION:
        return []
    schedules = []
    if (one := best(manifest, played(manifest, trials))) is not None and len(one.trials) > 1:
        schedules = [
            f"{name.rsplit('.', 1)[-1]} "
            + ", ".join(f"{value:.4g} from round {first}" for first, _, value in one.values(name))
            for name in manifest.varied
        ]
    continued = sum(one.plan.start is not None for one in trials)
    return texts("population", continued=continued, trials=len(trials), schedules=schedules)


def schedules(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> str | None:
    """Return the hyperparameters of a population by round as CSV, or None if no member has completed a round.

    Each member of the population has one row per round, with the trial that trained the round, the hyperparameters of
    this trial, and the objective after the round.
    """
    rows: list[dict[str, Json]] = []
    for lineage in played(manifest, trials):
        objective = recorded(lineage.end.history, manifest.metric)
        for first, last, one in lineage.segments():
            for round in range(first, last + 1):
                place: dict[str, Json] = {"member": lineage.end.plan.number, "round": round, "trial": one.plan.number}
                rows.append({**place, **one.plan.arm, manifest.metric: objective.get(round)})
    columns = ["member", "round", "trial", *manifest.varied, manifest.metric]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False) if rows else None
