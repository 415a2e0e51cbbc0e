"""What a trial is in MLflow: tags, points in time, names for people. Nothing here asks MLflow anything."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedsweep.common.config import flat
from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialPlan, TrialRecord
from fedsweep.results.arms import IN_WORDS, setting, shown_setting
from fedsweep.results.history import mean_of_last, total_megabytes
from fedsweep.tracking.origin import origin

if TYPE_CHECKING:
    from mlflow.entities import Metric

METRICS, PARAMETERS = 800, 100
"""In one request. MLflow takes at most 1,000 items, and of these at most 100 parameters."""
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "diverged": "FAILED", "failed": "FAILED"}
OUTCOME = "fedsweep.outcome"
ROUND = "fedsweep.round"
KEY = "fedsweep.key"
ARM = "arm"
"""The tag that MLflow's page groups runs by: the run's name without its seed."""
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


def starting(plan: TrialPlan, varied: Iterable[str] = ()) -> dict[str, str]:
    """The tags that a run has from its start; `varied` names what differs between arms of its sweep."""
    tags = {**grouping(plan, varied), "fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), OUTCOME: RUNNING[0]}
    tags |= {f"fedsweep.{name}_digest": digest for name, digest in plan.digests.items()}
    start = {"fedsweep.start": f"{plan.start.key} after round {plan.start.round}"} if plan.start is not None else {}
    return {**tags, **start, **marks(plan), **origin()}


def grouping(plan: TrialPlan, varied: Iterable[str] = ()) -> dict[str, str]:
    """What a person groups runs by: each varied hyperparameter under its short name, and the arm in words."""
    short = short_names(dict.fromkeys([*varied, *plan.arm]))
    tags = {
        short[name]: setting(name, value) if name in IN_WORDS else shown_setting(value, 6)
        for name, value in plan.arm.items()
    }
    return {**tags, ARM: _in_words(plan)} if plan.arm else {}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """For each dotted name the shortest end of it that no other has.

    >>> short_names(["lora.rank", "optimizer.lr", "server.lr", "without"])
    {'lora.rank': 'rank', 'optimizer.lr': 'optimizer.lr', 'server.lr': 'server.lr', 'without': 'without'}
    """
    ends = {name: [name.split(".", skip)[-1] for skip in range(name.count(".") + 1)] for name in names}
    taken = Counter(end for several in ends.values() for end in several)
    return {name: next((end for end in reversed(several) if taken[end] == 1), name) for name, several in ends.items()}


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
        _metrics({**record.metrics, **record.system, "seconds/round": record.seconds}, moment, record.round)
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
    arm = _in_words(plan)
    return f"{arm} · seed {plan.seed}" if arm else f"seed {plan.seed}"


def _in_words(plan: TrialPlan) -> str:
    return " · ".join(setting(name.rsplit(".", 1)[-1], value) for name, value in plan.arm.items())
