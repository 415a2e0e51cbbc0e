"""A run's metric history: one record per communication round. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

MEASURED = ("memory", "system")  # fields of a record that are not written if they were not measured
ACCUMULATED = ("megabytes/sent", "bytes/up", "bytes/down", "seconds/round")
"""Metrics whose value for a run is the sum over its rounds."""


@dataclass(frozen=True)
class RoundRecord:
    """Metrics after `round` rounds; round 0 is the untuned model.

    A repetition changes only seconds, memory and system.
    """

    round: int
    metrics: Mapping[str, float]
    seconds: float
    memory: int | None = field(default=None, compare=False)
    """Peak main memory of the process since it began the run, in bytes."""
    system: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Use of the machine, if the run records it."""


History = Sequence[RoundRecord]


def to_json(history: History) -> str:
    """Return the history as JSON; floats survive bit-identically."""
    rows = [asdict(record) for record in history]
    return json.dumps([{name: value for name, value in row.items() if name not in MEASURED or value} for row in rows])


def from_json(text: str) -> list[RoundRecord]:
    """Return the history that `to_json` wrote."""
    return [RoundRecord(**record) for record in json.loads(text)]


def total_megabytes(history: History) -> float:
    """Return the MB (10^6 bytes) sent in both directions over all rounds."""
    return sum(record.metrics.get("bytes/up", 0) + record.metrics.get("bytes/down", 0) for record in history) / 1e6


def mean_of_last(history: History, metric: str, rounds: int = 4) -> float:
    """Return the mean of a metric over the last rounds (four in FedRA's code), without the untuned model."""
    values = [record.metrics[metric] for record in history if record.round > 0][-rounds:]
    return sum(values) / len(values)


def last(history: History, metric: str) -> float | None:
    """Return a metric at the last recorded round, or None if it is absent."""
    return history[-1].metrics.get(metric) if history else None


def over_the_run(history: History, metric: str) -> float | None:
    """Return a metric of a whole run: the sum over rounds for accumulated metrics, or else the last value."""
    if not history or metric not in ACCUMULATED:
        return last(history, metric)
    if metric == "megabytes/sent":
        return total_megabytes(history)
    return sum(one.seconds if metric == "seconds/round" else one.metrics.get(metric, 0) for one in history)
