"""Client drift, compared with loops over pairs of clients."""

from itertools import combinations

import numpy as np
import pytest
import torch

from fedsweep.federation.rounds import federate
from fedsweep.methods.capabilities import StandIns
from fedsweep.models.layered import completed
from fedsweep.testing.rounds import one_round
from fedsweep.training.drift_and_structural_bias import (
    DRIFT_METRICS,
    head_distance,
    mean_pairwise_distance,
    representation,
)


def cosine_distance(one: np.ndarray, other: np.ndarray) -> float:
    return 1 - one @ other / (np.linalg.norm(one) * np.linalg.norm(other))


def test_the_distance_is_the_mean_over_pairs_and_images():
    features = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0))
    arrays = features.double().numpy()
    pairs = [cosine_distance(arrays[i, n], arrays[j, n]) for i, j in combinations(range(4), 2) for n in range(5)]
    assert mean_pairwise_distance(features) == pytest.approx(sum(pairs) / len(pairs), rel=1e-9)


def test_clients_with_equal_representations_have_distance_zero():
    features = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0))
    assert mean_pairwise_distance(features) == 0.0
    assert mean_pairwise_distance(features.repeat(3, 1, 1)) == pytest.approx(0.0, abs=1e-9)
    assert mean_pairwise_distance(torch.cat([features, -features])) == pytest.approx(2.0)


def test_the_heads_distance_is_that_of_all_heads_that_a_client_trains():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "backbone.head.weight": (2, 3),
        "heads.3.weight": (2, 3),
        "backbone.blocks.0.x.lora_A.default.weight": (2,),
    }
    before, after, update = (
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(3)
    )
    del update["heads.3.weight"]
    own, of_server = (
        (state["backbone.head.weight"] - before["backbone.head.weight"]).flatten() for state in (update, after)
    )
    assert head_distance(before, after, update) == pytest.approx(
        cosine_distance(own.double().numpy(), of_server.double().numpy())
    )
    assert head_distance(before, after, after) == pytest.approx(0.0, abs=1e-9)


METHODS = [{"name": "fedra"}, {"name": "depthfl"}, {"name": "fedbrick", "server_epochs": 1}]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_a_rounds_drift_is_that_of_its_clients_own_models(federation, method):
    changes = {"method": method, "partition.proxy_share": 0.2, "federation.rounds": 1}
    changes |= {"data.domains": ["plain", "noisy"], "federation.depths": [6, 3]}
    small = federation({**changes, "evaluation.metrics": ["drift"]})
    _, result = federate(small)
    plain = list(federate(federation(changes)))[-1].metrics
    assert dict(plain) == {name: value for name, value in result.metrics.items() if name not in DRIFT_METRICS}

    start, updates = one_round(small)
    images = torch.cat([domain.test.take(torch.arange(len(domain.test)))[0] for domain in small.domains])
    seen = []
    for client, update in zip(small.cohort(1), updates, strict=True):
        walk = completed(update.allocation.held, StandIns.of_method(small.method).stand_ins(small.model, client))
        assert len(walk) == (12 if method["name"] == "fedbrick" else client.capacity)
        seen.append(representation(small.model, start.state.adapter | update.adapter, walk, images))
    # All test images are used, because each domain has only ten.
    assert result.metrics["drift/representation"] == pytest.approx(mean_pairwise_distance(torch.stack(seen)), rel=1e-5)
    heads = [head_distance(start.state.adapter, result.state.adapter, update.adapter) for update in updates]
    assert result.metrics["drift/head"] == pytest.approx(sum(heads) / 2, rel=1e-9)
    assert 0.01 < result.metrics["drift/representation"] < 2


def test_a_single_client_has_no_drift(federation):
    _, result = federate(
        federation({"evaluation.metrics": ["drift"], "federation.clients_per_round": 1, "federation.rounds": 1})
    )
    assert [result.metrics[name] for name in DRIFT_METRICS] == pytest.approx([0.0, 0.0], abs=1e-9)
