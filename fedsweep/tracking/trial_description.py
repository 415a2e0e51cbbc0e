"""The description of a trial's run in MLflow: name, tags, metrics and data sets."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialPlan, TrialRecord
from fedsweep.results.arms import IN_WORDS, setting, short_names, shown_setting
from fedsweep.results.history import mean_of_last, total_megabytes
from fedsweep.results.records import SYNTHETIC

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric

LONGEST_TAG = 500  # characters of a tag that may have any length
STATUS = {"finished": "FINISHED", "pruned": "KILLED", "diverged": "FAILED", "failed": "FAILED"}
OUTCOME = "fedsweep.outcome"
ROUND = "fedsweep.round"
ARM = "arm"  # the tag by which MLflow's page groups runs: the run's name without its seed
NOT_COUNTED = "not counted"
"""The value of the tag `arm` of trials that tables and decisions leave out, so that no mean of an arm contains them."""


def state(tags: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the outcome and the last round of a trial, as stated in the tags of the trial's MLflow run.

    The last round is None until the trial has ended.
    """
    outcome = tags.get(OUTCOME, "")
    return outcome, tags.get(ROUND) if outcome in STATUS else None


def start_tags(plan: TrialPlan, varied: Iterable[str]) -> dict[str, str]:
    """Return the tags that a trial's MLflow run gets when it starts.

    The tags include the arm's label and each hyperparameter of the arm, so that users can group the runs by these tags
    on MLflow's page.

    Args:
        plan: The plan of the trial.
        varied: The dotted names of all hyperparameters that the sweep varies. The tags use shortened names, which are
            unique among the shortened names of `varied`.
    """
    short = short_names(dict.fromkeys([*varied, *plan.arm]))
    tags = {
        short[name]: setting(name, value) if name in IN_WORDS else shown_setting(value, 6)
        for name, value in plan.arm.items()
    }
    tags |= {ARM: _in_words(plan)} if plan.arm else {}
    tags |= {"fedsweep.arm": plan.label, "fedsweep.seed": str(plan.seed), OUTCOME: "running"}
    tags |= {f"fedsweep.{name}_digest": digest for name, digest in plan.digests.items()}
    if plan.start is not None:
        tags["fedsweep.start"] = f"{plan.start.key} after round {plan.start.round}"
    return tags | provenance_tags(plan)


def provenance_tags(plan: TrialPlan) -> dict[str, str]:
    """Return tags that state a trial's provenance, such as the source of its synthetic images.

    Some of these tags are known only after the trial has started.
    """
    return {f"fedsweep.{name}": mark[:LONGEST_TAG] for name, mark in plan.marks.items()}


def group_tags(trial: TrialRecord) -> dict[str, str]:
    """Return the tag that moves a trial out of its arm's group on MLflow's page, if the trial does not count."""
    return {} if trial.outcome is None or trial.outcome.counts else {ARM: NOT_COUNTED}


def outcome_tags(trial: TrialRecord) -> dict[str, str]:
    """Return tags for a trial's outcome, its error, the reason why it was stopped, and its last round.

    Unknown values are left out. The outcome is the last tag.
    """
    if trial.outcome is None:
        return {OUTCOME: "running"}
    lines = (trial.outcome.error or "").strip().splitlines()
    error = {"fedsweep.error": lines[-1][:500]} if lines else {}
    reason = {"fedsweep.reason": trial.outcome.reason} if trial.outcome.reason else {}
    return {**error, **reason, ROUND: str(trial.outcome.round), OUTCOME: trial.outcome.outcome}


def metrics(trial: TrialRecord, start: int, after: int, ended: bool) -> list[list[Metric]]:
    """Return the metrics that are not yet in a trial's MLflow run, as one list for each round later than `after`.

    If `ended` is true, one more list contains the metrics of the whole trial, such as the megabytes sent.

    Timestamps are computed from `start`, the run's start in milliseconds, and the durations of the rounds. If a metric
    is written twice, it therefore has the same timestamp both times, and MLflow stores it only once.
    """
    from mlflow.entities import Metric

    found, seconds = [], 0.0
    for record in trial.history:
        seconds += record.seconds
        if record.round > after:
            values = {**record.metrics, **record.system, "seconds/round": record.seconds}
            moment = start + round(1000 * seconds)
            found.append([Metric(name, value, moment, record.round) for name, value in values.items()])
    if ended and trial.last_round > 0:
        last = mean_of_last(trial.history, "accuracy/mean")
        values = {"megabytes/sent": total_megabytes(trial.history)}
        if math.isfinite(last):
            values["accuracy/mean_of_last_4"] = last
        found.append([Metric(name, value, start + round(1000 * seconds), 0) for name, value in values.items()])
    return found


def run_name(plan: TrialPlan) -> str:
    """Return the name of a run, such as `rank 4 · seed 0` or `without momentum · seed 0`."""
    arm = _in_words(plan)
    return f"{arm} · seed {plan.seed}" if arm else f"seed {plan.seed}"


def _in_words(plan: TrialPlan) -> str:
    return " · ".join(setting(name.rsplit(".", 1)[-1], value) for name, value in plan.arm.items())


SHOWN = 12  # recorded digits of a digest; MLflow's limit is 36
COLUMNS = [{"name": "image", "type": "uint8 (3, size, size)"}, {"name": "label", "type": "class"}]
SCHEMA = json.dumps({"mlflow_colspec": COLUMNS})


def dataset_inputs(plan: TrialPlan) -> list[DatasetInput]:
    """Return the test images, the clients' training images and any synthetic images as MLflow data sets.

    The list is empty if the plan does not describe the images. Test images have the context `eval`, and their digest
    covers all images and labels. Training images have the context `train`, and their digest also covers the data
    options, the partition and the seed. If the training images of two trials have the same digest, each client has the
    same images in both trials.
    """
    data, partition = plan.config.get("data"), plan.config.get("partition")
    content, _, of_synthetic = plan.digests.get("data", "").partition(" ")
    if not isinstance(data, Mapping) or not isinstance(partition, Mapping) or not content:
        return []
    name, held_out = str(data.get("set") or data["name"]), set(data.get("held_out_domains") or ())
    domains = [one for one in data["domains"] if one not in held_out]
    tested = {"domains": len(data["domains"]), "names": data["domains"], "held_out": sorted(held_out)}
    clients = _clients(partition, len(domains))
    divided = {"domains": len(domains), "clients": clients, "partition": partition, "seed": plan.seed}
    split = _digest([content, dict(data), dict(partition), plan.seed])
    found = [
        _input(name, content[:SHOWN], "eval", tested),
        _input(f"{name}/{partition['name']}", split, "train", divided),
    ]
    if source := plan.marks.get(SYNTHETIC):
        made = of_synthetic[:SHOWN] or _digest([split, plan.config.get("synthetic")])
        found.append(_input(f"synthetic/{source}", made, "train", {"source": source}))
    return found


def _input(name: str, digest: str, context: str, profile: Mapping[str, Json]) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(name, digest, "local", json.dumps({"uri": name}), SCHEMA, json.dumps(profile))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _clients(partition: Mapping[str, Json], domains: int) -> Json:
    if partition["name"] in ("centralized", "centralized_synthetic"):
        return 1
    return partition.get("clients") or domains * int(str(partition.get("clients_per_domain", 1)))


def _digest(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:SHOWN]
