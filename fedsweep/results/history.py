"""The metric history of a run, with one record per communication round. This module does not import torch."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

MEASURED = ("memory", "system")  # fields of a record that are not written if they were not measured
TESTED = "evaluation/images"
"""The metric for the number of test images of the clients' domains on which the global model was evaluated."""
VALIDATION = "validation/"
"""The beginning of the names of metrics that are measured on validation images."""
MEAN_ACCURACY = "accuracy/mean"
"""The metric for the mean of the accuracies over the clients' domains."""
LAST_ROUNDS = "accuracy/last_rounds"
"""The metric for the mean of accuracy/mean over the last rounds; see `over_last_rounds`."""
TEST_LOSS = "loss/test"
"""The metric for the mean of the test losses over the clients' domains."""
LAST_ROUNDS_LOSS = "loss/last_rounds"
"""The metric for the mean of loss/test over the last rounds; see `over_last_rounds`."""
VALIDATION_LOSS = f"{VALIDATION}loss"
"""The metric for the mean of the losses on validation images over the clients' domains."""
AVERAGED = {
    MEAN_ACCURACY: LAST_ROUNDS,
    TEST_LOSS: LAST_ROUNDS_LOSS,
    f"{VALIDATION}{MEAN_ACCURACY}": f"{VALIDATION}{LAST_ROUNDS}",
    VALIDATION_LOSS: f"{VALIDATION}{LAST_ROUNDS_LOSS}",
}
"""The metrics that are averaged over the last rounds, each with the metric for its mean."""
VALIDATED = (
    *(MEAN_ACCURACY, LAST_ROUNDS, "accuracy/worst_domain", "accuracy/domain_spread", "accuracy/domain/"),
    *("accuracy/clients/", "accuracy/client/"),
    LAST_ROUNDS_LOSS,
)
"""The metrics of test images whose names on validation images only begin with `VALIDATION` in addition.

An entry with a final slash stands for several metrics.
"""
SIMULATED = "simulated/seconds"
"""The metric for the time that a round would take on the clients' devices."""
ENERGY = "lora/energy_beyond_least_rank"
"""A metric that only runs report in which clients have ranks of their own."""
ACCUMULATED = ("megabytes/sent", "bytes/up", "bytes/down", "seconds/round", SIMULATED)
"""Metrics whose value for a run is the sum over its rounds."""


@dataclass(frozen=True)
class RoundRecord:
    """The metrics of the model after `round` rounds. Round 0 is the model before fine-tuning.

    All fields except `seconds`, `memory` and `system` are reproducible.
    """

    round: int
    metrics: Mapping[str, float]
    seconds: float
    memory: int | None = field(default=None, compare=False)
    """Peak main memory of the process since the start of the run, in bytes."""
    system: Mapping[str, float] = field(default_factory=dict, compare=False)
    """CPU, memory and GPU use of the machine, if the run records them."""


History = Sequence[RoundRecord]


def to_json(history: History) -> str:
    """Return the history as JSON text. `from_json` converts the text back to bit-identical floats."""
    rows = [asdict(record) for record in history]
    return json.dumps([{name: value for name, value in row.items() if name not in MEASURED or value} for row in rows])


def from_json(text: str) -> list[RoundRecord]:
    """Parse a history from the JSON text that `to_json` returned.

    Raises:
        ValueError or TypeError: The text is not the JSON text of a history.
    """
    return [_checked(RoundRecord(**record)) for record in json.loads(text)]


def _checked(record: RoundRecord) -> RoundRecord:
    """Return `record`, or raise ValueError or TypeError if a field has a value of another type."""
    numbers = [*{**record.metrics}.values(), *{**record.system}.values(), record.seconds, record.memory or 0]
    if type(record.round) is not int or not all(type(number) in (int, float) for number in numbers):
        raise ValueError("a value in the history has the wrong type")
    return record


def total_megabytes(history: History) -> float:
    """Return the number of megabytes (10^6 bytes) that the clients and the server sent in all rounds."""
    return sum(record.metrics.get("bytes/up", 0) + record.metrics.get("bytes/down", 0) for record in history) / 1e6


def simulated_seconds(history: History) -> float | None:
    """Return the simulated time of all rounds in seconds, or None if the run has no devices."""
    seconds = [record.metrics[SIMULATED] for record in history if SIMULATED in record.metrics]
    return sum(seconds) if seconds else None


def mean_of_last(history: History, metric: str, rounds: int = 4) -> float:
    """Return the mean of a metric over the last `rounds` rounds that were evaluated, except round 0.

    The default is four rounds, as in FedRA's code.
    """
    values = [record.metrics[metric] for record in history if record.round > 0 and metric in record.metrics][-rounds:]
    return sum(values) / len(values) if values else math.nan


def averaged_rounds(round: int, rounds: int, every: int = 1) -> list[int]:
    """Return the rounds whose mean is `LAST_ROUNDS` after `round`, which is the last of them.

    Args:
        round: The round, which was evaluated.
        rounds: The number of last rounds.
        every: The number of rounds from one evaluation to the next. Earlier rounds between, which are evaluated because
            a scheduler compares trials there, do not count, so the result does not depend on the scheduler.

    >>> averaged_rounds(10, 5), averaged_rounds(10, 5, every=3), averaged_rounds(2, 5)
    ([6, 7, 8, 9, 10], [6, 9, 10], [1, 2])
    """
    earlier = range(max(0, round - rounds) + 1, round)
    return [*(one for one in earlier if one % every == 0), round]


def over_last_rounds(
    history: History, round: int, metrics: Mapping[str, float], rounds: int, every: int = 1
) -> dict[str, float]:
    """Return the means of the metrics in `AVERAGED` over the evaluated rounds among the last `rounds` rounds.

    Metrics that the round lacks are left out, such as those of validation images if there are none. Round 0 counts only
    in round 0. The dict is empty if the round was not evaluated.

    Args:
        history: The records of the earlier rounds.
        round: The round.
        metrics: The other metrics of the round.
        rounds: The number of rounds.
        every: The number of rounds from one evaluation to the next; see `averaged_rounds`.
    """
    found = {}
    *earlier, _ = averaged_rounds(round, rounds, every)
    recent = [one.metrics for one in history if one.round in earlier]
    for name, mean in AVERAGED.items():
        if name in metrics:
            values = [one[name] for one in (*recent, metrics) if name in one]
            found[mean] = sum(values) / len(values)
    return found


def on_validation(metric: str) -> str | None:
    """Return the name of a metric of test images if it is measured on validation images.

    The result is None for other metrics, and for metrics of which there is no such version.

    >>> on_validation("accuracy/mean"), on_validation("loss/test"), on_validation("accuracy/out_of_domain_mean")
    ('validation/accuracy/mean', 'validation/loss', None)
    """
    if metric == TEST_LOSS:
        return VALIDATION_LOSS
    return f"{VALIDATION}{metric}" if metric.startswith(VALIDATED) else None


def validation_names(metrics: Iterable[str]) -> list[str]:
    """Return the names on validation images of metrics of test images, without metrics that have no such name."""
    return [name for name in map(on_validation, metrics) if name is not None]


def on_test(metric: str) -> str:
    """Return the name of a metric if it is measured on test images.

    >>> on_test("validation/accuracy/mean"), on_test("validation/loss"), on_test("loss/train")
    ('accuracy/mean', 'loss/test', 'loss/train')
    """
    return TEST_LOSS if metric == VALIDATION_LOSS else metric.removeprefix(VALIDATION)


def uses_test_images(metric: str) -> bool:
    """Return whether a metric compares predictions with the labels of test images."""
    return metric.startswith("accuracy/") or metric in (TEST_LOSS, LAST_ROUNDS_LOSS)


def is_of_clients(metric: str) -> bool:
    """Return whether a metric is an accuracy of the clients' own models, on test images or on validation images.

    >>> (
    ...     is_of_clients("accuracy/clients/worst"),
    ...     is_of_clients("validation/accuracy/client/a"),
    ...     is_of_clients("loss/test"),
    ... )
    (True, True, False)
    """
    return on_test(metric).startswith(("accuracy/clients/", "accuracy/client/"))


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss, of which smaller values are better.

    >>> is_loss("loss/last_rounds"), is_loss("validation/loss"), is_loss("accuracy/mean")
    (True, True, False)
    """
    return metric.removeprefix(VALIDATION).split("/")[0] == "loss"


def last(history: History, metric: str) -> float | None:
    """Return the value of a metric after the last recorded round, or None if there is no such value."""
    return history[-1].metrics.get(metric) if history else None


def over_the_run(history: History, metric: str) -> float | None:
    """Return the value of a metric for a whole run.

    For the metrics in `ACCUMULATED`, such as `bytes/up`, this value is the sum over all rounds. For all other metrics,
    it is the value after the last round. The result is None if the run did not record the metric.
    """
    if metric == SIMULATED:
        return simulated_seconds(history)
    if not history or metric not in ACCUMULATED:
        return last(history, metric)
    if metric == "megabytes/sent":
        return total_megabytes(history)
    return sum(one.seconds if metric == "seconds/round" else one.metrics.get(metric, 0) for one in history)
