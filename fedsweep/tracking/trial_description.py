"""The child run of a trial: name, tags, parameters, metrics and data sets."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedsweep.common.config import flat
from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialPlan, TrialRecord
from fedsweep.results.arms import IN_WORDS, setting, shown_setting
from fedsweep.results.history import mean_of_last, total_megabytes
from fedsweep.results.records import SYNTHETIC

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric


METRICS, PARAMETERS = 800, 100
"""Limits per request; MLflow accepts 1,000 items, of which at most 100 parameters."""
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "diverged": "FAILED", "failed": "FAILED"}
OUTCOME = "fedsweep.outcome"
ROUND = "fedsweep.round"
ARM = "arm"  # the tag by which MLflow's page groups runs: the run's name without its seed
State = tuple[str, str | None]  # the outcome, and the round of an ended trial, as in tags
RUNNING: State = ("running", None)


def state(trial: TrialRecord) -> State:
    """Return the state of a trial in the store."""
    return (trial.outcome.outcome, str(trial.outcome.round)) if trial.outcome else RUNNING


def recorded_state(tags: Mapping[str, str]) -> State:
    """Return the state of a trial from its run's tags."""
    outcome = tags.get(OUTCOME, "")
    return outcome, tags.get(ROUND) if outcome in STATUS else None


def start_tags(plan: TrialPlan, varied: Iterable[str] = ()) -> dict[str, str]:
    """Return the tags of a run at its start; `varied` are the hyperparameters that differ between arms."""
    tags = {"fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), OUTCOME: RUNNING[0]}
    tags |= {f"fedsweep.{name}_digest": digest for name, digest in plan.digests.items()}
    if plan.start is not None:
        tags["fedsweep.start"] = f"{plan.start.key} after round {plan.start.round}"
    return {**_grouping_tags(plan, varied), **tags, **provenance_tags(plan)}


def _grouping_tags(plan: TrialPlan, varied: Iterable[str]) -> dict[str, str]:
    """Return tags for grouping runs: each varied hyperparameter under its short name, and the arm's label."""
    short = short_names(dict.fromkeys([*varied, *plan.arm]))
    tags = {
        short[name]: setting(name, value) if name in IN_WORDS else shown_setting(value, 6)
        for name, value in plan.arm.items()
    }
    return {**tags, ARM: _in_words(plan)} if plan.arm else {}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return, for each dotted name, its shortest suffix that is unique among the names.

    >>> short_names(["lora.rank", "optimizer.lr", "server.lr", "without"])
    {'lora.rank': 'rank', 'optimizer.lr': 'optimizer.lr', 'server.lr': 'server.lr', 'without': 'without'}
    """
    ends = {name: [name.split(".", skip)[-1] for skip in range(name.count(".") + 1)] for name in names}
    taken = Counter(end for several in ends.values() for end in several)
    return {name: next((end for end in reversed(several) if taken[end] == 1), name) for name, several in ends.items()}


def provenance_tags(plan: TrialPlan) -> dict[str, str]:
    """Return the tags of a trial's provenance, some of which is known only while it runs."""
    return {f"fedsweep.{name}": mark for name, mark in plan.marks.items()}


def outcome_tags(trial: TrialRecord) -> dict[str, str]:
    """Return the tags of a trial's outcome; the tag of the outcome itself is last."""
    if trial.outcome is None:
        return {OUTCOME: RUNNING[0]}
    lines = (trial.outcome.error or "").strip().splitlines()
    error = {"fedsweep.error": lines[-1][:500]} if lines else {}
    reason = {"fedsweep.reason": trial.outcome.reason} if trial.outcome.reason else {}
    return {**error, **reason, ROUND: str(trial.outcome.round), OUTCOME: trial.outcome.outcome}


def round_metrics(trial: TrialRecord, start: int, after: int) -> list[list[Metric]]:
    """Return the metrics of each round after round `after`; `start` is the run's start in milliseconds.

    Timestamps follow from the start and the duration of rounds, so that a repeated write gives the same point, which
    MLflow keeps once.
    """
    return [
        _metrics({**record.metrics, **record.system, "seconds/round": record.seconds}, moment, record.round)
        for record, moment in zip(trial.history, _moments(trial, start)[1:], strict=True)
        if record.round > after
    ]


def final_metrics(trial: TrialRecord, start: int) -> list[list[Metric]]:
    """Return the summary metrics of an ended trial, with the timestamp of its last round."""
    if trial.outcome is None or trial.last_round <= 0:
        return []
    last = mean_of_last(trial.history, "accuracy/mean")
    values = {"accuracy/mean_of_last_4": last, "megabytes/sent": total_megabytes(trial.history)}
    return [_metrics(values, _moments(trial, start)[-1], 0)]


def _moments(trial: TrialRecord, start: int) -> list[int]:
    return [start + round(1000 * passed) for passed in accumulate((one.seconds for one in trial.history), initial=0.0)]


def _metrics(values: Mapping[str, float], moment: int, step: int) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(name, value, moment, step) for name, value in values.items()]


def requests(
    rounds: Iterable[list[Metric]], parameters: Mapping[str, Json], tags: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of as few `log_batch` calls as possible, without splitting a round; tags come last."""
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
    """Return the name of a run, such as `rank 4 · seed 0` or `without momentum · seed 0`."""
    arm = _in_words(plan)
    return f"{arm} · seed {plan.seed}" if arm else f"seed {plan.seed}"


def _in_words(plan: TrialPlan) -> str:
    return " · ".join(setting(name.rsplit(".", 1)[-1], value) for name, value in plan.arm.items())


SHOWN = 12  # digits of a digest; MLflow's limit is 36
COLUMNS = [{"name": "image", "type": "uint8 (3, size, size)"}, {"name": "label", "type": "class"}]


@dataclass(frozen=True)
class Images:
    """One data set that a trial uses, as MLflow records it."""

    name: str
    digest: str
    context: str
    """`train` or `eval`."""
    profile: str
    """JSON with domains and clients."""


def images_of(plan: TrialPlan) -> list[Images]:
    """Return the test images and the clients' training images; empty if the plan does not describe them.

    The digest for `eval` covers all images and labels. The digest for `train` also covers data options, partition and
    seed: if two are equal, each client has the same images.
    """
    data, partition = plan.config.get("data"), plan.config.get("partition")
    content, _, of_synthetic = plan.digests.get("data", "").partition(" ")
    if not isinstance(data, Mapping) or not isinstance(partition, Mapping) or not content:
        return []
    name, held_out = str(data.get("set") or data["name"]), set(data.get("held_out_domains") or ())
    domains = [one for one in data["domains"] if one not in held_out]
    tested = {"domains": len(data["domains"]), "names": data["domains"], "held_out": sorted(held_out)}
    divided = {"domains": len(domains), "clients": _clients(partition, len(domains)), "partition": partition}
    split = _digest([content, dict(data), dict(partition), plan.seed])
    found = [
        Images(name, content[:SHOWN], "eval", json.dumps(tested)),
        Images(f"{name}/{partition['name']}", split, "train", json.dumps({**divided, "seed": plan.seed})),
    ]
    if source := plan.marks.get(SYNTHETIC):
        made = of_synthetic[:SHOWN] or _digest([split, plan.config.get("synthetic")])
        found.append(Images(f"synthetic/{source}", made, "train", json.dumps({"source": source})))
    return found


def dataset_inputs(images: Iterable[Images]) -> list[DatasetInput]:
    """Return the arguments of `log_inputs`, which ignores duplicates."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    schema = json.dumps({"mlflow_colspec": COLUMNS})
    return [
        DatasetInput(
            Dataset(one.name, one.digest, "local", json.dumps({"uri": one.name}), schema, one.profile),
            [InputTag("mlflow.data.context", one.context)],
        )
        for one in images
    ]


def _clients(partition: Mapping[str, Json], domains: int) -> Json:
    """Return the number of clients."""
    if partition["name"] == "centralized":
        return 1
    return partition.get("clients") or domains * int(str(partition.get("clients_per_domain", 1)))


def _digest(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:SHOWN]
