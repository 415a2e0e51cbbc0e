"""The images of a trial as MLflow's dataset inputs: what it was tested on, and how what it trained on was divided.

All of it follows from the trial's plan. Nothing is opened or decoded, and the images may lie on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialPlan
from fedsweep.results.provenance import SYNTHETIC

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

SHOWN = 12
"""Letters of a digest: enough to tell apart by eye. MLflow takes 36."""
COLUMNS = [{"name": "image", "type": "uint8 (3, size, size)"}, {"name": "label", "type": "class"}]


@dataclass(frozen=True)
class Images:
    """Images that a trial reads, by name and digest."""

    name: str
    digest: str
    context: str
    """`train` or `eval`."""
    profile: str
    """JSON: the domains, the clients."""


def images_of(plan: TrialPlan) -> list[Images]:
    """What a trial is tested on, and what its clients train on; none where the plan says nothing of its images.

    The digest for `eval` is that of all images and labels; that for `train` is of how they are divided too: data,
    partition and seed. Where it is the same, each client holds the same images.
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


def inputs(images: Iterable[Images]) -> list[DatasetInput]:
    """As arguments of `log_inputs`, which takes the same one twice as one."""
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
    """How many there are: said, or one or some for each domain."""
    if partition["name"] == "centralized":
        return 1
    return partition.get("clients") or domains * int(str(partition.get("clients_per_domain", 1)))


def _digest(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:SHOWN]
