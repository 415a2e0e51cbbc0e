"""What a trial is in MLflow: tags, points in time, names for people. Nothing here asks MLflow anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedsweep.arms import setting
from fedsweep.config import flat
from fedsweep.history import mean_of_last, total_megabytes
from fedsweep.plain import Json
from fedsweep.store import TrialPlan, TrialRecord
from fedsweep.tracking.origin import origin

if TYPE_CHECKING:
    from mlflow.entities import Metric

METRICS, PARAMETERS = 800, 100
"""In one request. MLflow takes at most 1,000 items, and of these at most 100 parameters."""
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "diverged": "FAILED", "failed": "FAILED"}
OUTCOME = "fedsweep.outcome"
ROUND = "fedsweep.round"
KEY = "fedsweep.key"
State = tuple[str, str | None]
"""The outcome and, of a trial that has ended, its round, as tags say them."""
RUNNING: State = ("running", None)


def state(trial: TrialRecord) -> State:
    """How a trial stands."""
    return (trial.outcome.outcome, str(trial.outcome.round)) if trial.outcome else RUNNING


def shown_state(tags: Mapping[str, str]) -> State:
    """How a trial stands by its run's tags."""
    outcome = tags.get(OUTCOME, "")
    return outcome, tags.get(ROUND) if outcome in STATUS else None


def starting(plan: TrialPlan) -> dict[str, str]:
    """The tags that a run has from its start."""
    tags = {"fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), OUTCOME: RUNNING[0]}
    tags |= {f"fedsweep.{name}_digest": digest for name, digest in plan.digests.items()}
    start = {"fedsweep.start": f"{plan.start.key} after round {plan.start.round}"} if plan.start is not None else {}
    return {**tags, **start, **marks(plan), **origin()}


def marks(plan: TrialPlan) -> dict[str, str]:
    """The tags of what a reader of a trial's numbers must know; some of it shows only on the way."""
    return {f"fedsweep.{name}": mark for name, mark in plan.marks.items()}


def standing(trial: TrialRecord) -> dict[str, str]:
    """The tags of how a trial stands, the outcome last."""
    if trial.outcome is None:
        return {OUTCOME: RUNNING[0]}
    lines = (trial.outcome.error or "").strip().splitlines()
    error = {"fedsweep.error": lines[-1][:500]} if lines else {}
    reason = {"fedsweep.reason": trial.outcome.reason} if trial.outcome.reason else {}
    return {**error, **reason, ROUND: str(trial.outcome.round), OUTCOME: trial.outcome.outcome}


def points(trial: TrialRecord, start: int, after: int) -> list[list[Metric]]:
    """The rounds after one, each with all its metrics; `start` is that of the run, in milliseconds.

    A round is dated by the run's start and the seconds that rounds took, so that it is the same point whenever it is
    written: of two equal points MLflow keeps one.
    """
    return [
        _metrics({**record.metrics, "seconds/round": record.seconds}, moment, record.round)
        for record, moment in zip(trial.history, _moments(trial, start)[1:], strict=True)
        if record.round > after
    ]


def summary(trial: TrialRecord, start: int) -> list[list[Metric]]:
    """What is said of a whole trial that has ended, dated by its last round."""
    if trial.outcome is None or trial.last_round <= 0:
        return []
    last = mean_of_last(trial.history, "accuracy/mean")
    values = {"accuracy/mean_of_last_4": last, "megabytes/sent": total_megabytes(trial.history)}
    return [_metrics(values, _moments(trial, start)[-1], 0)]


def _moments(trial: TrialRecord, start: int) -> list[int]:
    """The start and the end of each round."""
    return [start + round(1000 * passed) for passed in accumulate((one.seconds for one in trial.history), initial=0.0)]


def _metrics(values: Mapping[str, float], moment: int, step: int) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(name, value, moment, step) for name, value in values.items()]


def requests(
    rounds: Iterable[list[Metric]], parameters: Mapping[str, Json], tags: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """What is to be written, as arguments of `log_batch`: as few requests as MLflow takes, no round cut in two.

    Tags come last; within a request MLflow itself writes them last.
    """
    from mlflow.entities import Param, RunTag

    values = flat(parameters).items()
    params = [Param(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values]
    while len(params) > PARAMETERS:
        yield {"params": params[:PARAMETERS]}
        params = params[PARAMETERS:]
    batch: list[Metric] = []
    for metrics in rounds:
        if len(batch) + len(metrics) > METRICS:
            yield {"metrics": batch}
            batch = []
        batch += metrics
    if batch or params or tags:
        yield {"metrics": batch, "params": params, "tags": [RunTag(name, value) for name, value in tags.items()]}


def run_name(plan: TrialPlan) -> str:
    """For people: `rank 4 · seed 0`, `without momentum · seed 0`."""
    values = [setting(name.rsplit(".", 1)[-1], value) for name, value in plan.arm.items()]
    return " · ".join([*values, f"seed {plan.seed}"])
