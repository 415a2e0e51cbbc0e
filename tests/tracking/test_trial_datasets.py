"""A trial's data sets in MLflow, whose digests are equal if and only if the clients have the same images."""

import hashlib
import json
from typing import Any

import pytest
import torch
from mlflow.entities import Dataset

from fedsweep.federation.build_and_run import content_digests, split
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import TrialPlan
from fedsweep.tracking.trial_description import dataset_inputs
from tests.tracking.helpers import PLAN


def plan_of(config: RunConfig, marks: dict[str, str] | None = None) -> TrialPlan:
    resolved, digests = config.model_dump(mode="json"), content_digests(config)
    return TrialPlan(
        key="k", number=0, arm={}, seed=config.seed, config=resolved, digests=digests, marks=marks or config.marks()
    )


def dataset_of(plan: TrialPlan, context: str) -> Dataset:
    """Return a trial's data set of real images for `context`, which is `train` or `eval`."""
    found = {one.tags[0].value: one.dataset for one in dataset_inputs(plan) if "synthetic/" not in one.dataset.name}
    return found[context]


def divided(config: RunConfig) -> str:
    """Return a digest of how training images are divided among the clients of a configuration."""
    whole = hashlib.sha256()
    for client in split(config)[1].clients:
        images, labels = client.train.take(torch.arange(len(client.train)))
        whole.update(f"{client.id} {hashlib.sha256(images.numpy().data).hexdigest()} {labels.tolist()}".encode())
    return whole.hexdigest()


IID = {"partition": {"name": "iid", "clients": 3}}
LABELS = {"partition": {"name": "label_skew", "clients": 3}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {"lora.rank": 2, "method": {"name": "all_small"}}, True),
        ({**IID, "seed": 3}, {**IID, "seed": 3, "optimizer.lr": 0.5, "federation.depths": [3]}, True),
        (IID, {**IID, "seed": 1}, False),
        (IID, LABELS, False),
        (LABELS, {"partition": {**LABELS["partition"], "alpha": 0.2}}, False),
        ({}, {"data.held_out_domains": ["noisy"], "federation.depths": [12, 6]}, False),
    ],
)
def test_the_training_digest_depends_on_the_clients_images(
    tiny: RunConfig, one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    first, second = tiny.override(one, "test"), tiny.override(other, "test")
    assert (divided(first) == divided(second)) is same
    assert (dataset_of(plan_of(first), "train").digest == dataset_of(plan_of(second), "train").digest) is same


def test_the_test_digest_covers_all_images(tiny: RunConfig) -> None:
    first, second = (
        dataset_of(plan_of(tiny), "eval"),
        dataset_of(plan_of(tiny.override({**IID, "seed": 1}, "test")), "eval"),
    )
    assert dict(first) == dict(second)
    assert content_digests(tiny)["data"].startswith(first.digest)
    assert json.loads(first.profile)["names"] == ["plain", "inverted", "noisy"]
    fewer = dataset_of(plan_of(tiny.override({"data.domains": ["plain"], "federation.depths": [3]}, "test")), "eval")
    assert fewer.digest != first.digest


@pytest.mark.parametrize(
    ("partition", "clients"),
    [
        ({"name": "feature_skew"}, 3),
        ({"name": "feature_label_skew", "clients_per_domain": 2}, 6),
        ({"name": "iid", "clients": 4}, 4),
        ({"name": "centralized"}, 1),
        ({"name": "centralized", "with_synthetic": True, "proxy_share": 0.2}, 1),
        ({"name": "centralized_synthetic", "proxy_share": 0.2}, 1),
    ],
)
def test_the_profile_counts_clients_as_the_split_does(tiny: RunConfig, partition: dict[str, Any], clients: int) -> None:
    config = tiny.override({"partition": partition, "federation.depths": [3], "synthetic": "surrogate"}, "test")
    found = dataset_of(plan_of(config), "train")
    assert found.name == f"digits/{partition['name']}"
    assert json.loads(found.profile)["clients"] == clients == len(split(config)[1].clients)


def test_synthetic_images_are_an_input_of_their_own(tiny: RunConfig) -> None:
    plan = plan_of(tiny, {"synthetic": "surrogate"})
    made = [one.dataset for one in dataset_inputs(plan)]
    assert [one.name for one in made] == ["digits", "digits/feature_skew", "synthetic/surrogate"]
    filed = plan.model_copy(update={"digests": {"data": f"{plan.digests['data']} {'ab' * 32}"}})
    from_files = [one.dataset for one in dataset_inputs(filed)]
    assert from_files[2].digest == "ab" * 6
    assert [dict(one) for one in from_files[:2]] == [dict(one) for one in made[:2]]


def test_mlflow_accepts_the_data_sets_and_a_plan_without_images_has_none(tiny: RunConfig) -> None:
    made = dataset_inputs(plan_of(tiny))
    assert [one.tags[0].value for one in made] == ["eval", "train"]
    assert all(len(one.dataset.digest) <= 36 and json.loads(one.dataset.source) for one in made)
    assert dataset_inputs(PLAN.model_copy(update={"digests": {}})) == []
