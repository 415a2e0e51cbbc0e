"""Partitions whose clients belong to one domain each: feature skew, and feature and label skew."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fedsweep.common.randomness import stream
from fedsweep.data.partition.base import Alpha, MinSize, Partition, deal_by_dirichlet, numbered
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


class FeatureLabelSkew(Partition):
    """Each domain is split over several clients by Dirichlet(alpha) per class (FedRA, Section 4.1)."""

    name: Literal["feature_label_skew"] = "feature_label_skew"
    clients_per_domain: int = Field(5, gt=0, description="K, the clients that share a domain")
    alpha: Alpha = 0.5
    min_size: MinSize = 10

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """`<domain>/<number>`."""
        return {client: domain for domain in domains for client in numbered(f"{domain}/", self.clients_per_domain)}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Domain by domain, each from a stream of its own."""
        dealt: dict[ClientId, ImageSet] = {}
        for domain, images in train.items():
            rng = stream(seed, "dirichlet", domain)
            parts = deal_by_dirichlet(
                images.labels, self.clients_per_domain, self.alpha, self.min_size, rng, f"domain {domain}"
            )
            ids = numbered(f"{domain}/", self.clients_per_domain)
            dealt |= {client: images.select(rows) for client, rows in zip(ids, parts, strict=True)}
        return dealt
