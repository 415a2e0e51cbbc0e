"""A run's metric history: one record per communication round. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class RoundRecord:
    """Metrics after `round` rounds (0 is the untuned model). Repetition changes `seconds`, `memory`, `system` alone."""

    round: int
    metrics: Mapping[str, float]
    seconds: float
    memory: int | None = field(default=None, compare=False)
    """Bytes of main memory that the process has held at most since it began to play the run."""
    system: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What the machine did meanwhile, where that was asked for."""


History = Sequence[RoundRecord]
MEASURED = ("memory", "system")
"""Not written where it was not measured."""


def to_json(history: History) -> str:
    """Exact: floats survive to the last bit."""
    rows = [asdict(record) for record in history]
    return json.dumps([{name: value for name, value in row.items() if name not in MEASURED or value} for row in rows])


def from_json(text: str) -> list[RoundRecord]:
    """The inverse of `to_json`."""
    return [RoundRecord(**record) for record in json.loads(text)]


def total_megabytes(history: History) -> float:
    """Bytes sent in both directions over all rounds, in MB of 10^6."""
    return sum(record.metrics.get("bytes/up", 0) + record.metrics.get("bytes/down", 0) for record in history) / 1e6


def mean_of_last(history: History, metric: str, rounds: int = 4) -> float:
    """Mean of a metric over the last rounds (FedRA's code reports four), the untuned model left out."""
    values = [record.metrics[metric] for record in history if record.round > 0][-rounds:]
    return sum(values) / len(values)


def last(history: History, metric: str) -> float | None:
    """A metric at the last round recorded, or None where it is absent."""
    return history[-1].metrics.get(metric) if history else None


ACCUMULATED = ("megabytes/sent", "bytes/up", "bytes/down", "seconds/round")
"""Costs, of which a run's value is the sum over its rounds."""


def over_the_run(history: History, metric: str) -> float | None:
    """Return a metric of a whole run: the sum over rounds of what accumulates, of any other its last value."""
    if not history or metric not in ACCUMULATED:
        return last(history, metric)
    if metric == "megabytes/sent":
        return total_megabytes(history)
    return sum(one.seconds if metric == "seconds/round" else one.metrics.get(metric, 0) for one in history)
