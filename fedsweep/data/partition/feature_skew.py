"""Clients differ in the style of their images."""

from collections.abc import Mapping, Sequence
from typing import Literal

from fedsweep.data.partition.base import Partition
from fedsweep.types import ClientId, ImageSet


class FeatureSkew(Partition):
    """One client per domain: the same classes, another style (FedRA, Section 4.1)."""

    name: Literal["feature_skew"] = "feature_skew"

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Clients bear their domains' names."""
        return {domain: domain for domain in domains}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Each domain to its client."""
        return dict(train)
