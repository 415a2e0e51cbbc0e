"""From domains to clients."""

from collections.abc import Sequence
from typing import Literal

from fedsweep.config import Config
from fedsweep.types import Client, FederatedData


class FeatureSkew(Config):
    """One client per domain: the same labels, another style (FedRA, Section 4.1)."""

    name: Literal["feature_skew"] = "feature_skew"

    def num_clients(self, num_domains: int) -> int:
        """As many clients as domains."""
        return num_domains

    def split(self, data: FederatedData, depths: Sequence[int]) -> list[Client]:
        """Client i holds domain i's training images and `depths[i]` blocks."""
        return [
            Client(id=domain.name, domain=domain.name, train=domain.train, capacity=depth)
            for domain, depth in zip(data.domains, depths, strict=True)
        ]
