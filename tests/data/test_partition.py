"""From domains to clients."""

import pytest

from fedsweep.data import load
from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import FeatureSkew


def test_feature_skew_is_one_client_per_domain():
    data = load(DigitsData(domains=("thick", "plain")))
    clients = FeatureSkew().split(data, [7, 2])
    assert [(client.id, client.domain, client.capacity) for client in clients] == [
        ("thick", "thick", 7),
        ("plain", "plain", 2),
    ]
    assert all(client.train is domain.train for client, domain in zip(clients, data.domains, strict=True))
    assert FeatureSkew().num_clients(2) == 2


def test_depths_must_match_the_domains():
    with pytest.raises(ValueError, match="zip"):
        FeatureSkew().split(load(DigitsData(domains=("thick", "plain"))), [7])
