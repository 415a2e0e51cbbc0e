"""The five partitions of domains into clients."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.partition.base import POOL, Alpha, MinSize, Partition, Split, deal_by_dirichlet, numbered, pool
from fedsweep.types import ClientId, ImageSet


class FeatureSkew(Partition):
    """One client per domain: clients have the same classes in different styles (FedRA, Section 4.1)."""

    name: Literal["feature_skew"] = "feature_skew"

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Name each client after its domain."""
        return {domain: domain for domain in domains}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Give each domain to its client."""
        return dict(train)


class FeatureLabelSkew(Partition):
    """Each domain is split over several clients by Dirichlet(alpha) per class (FedRA, Section 4.1)."""

    name: Literal["feature_label_skew"] = "feature_label_skew"
    clients_per_domain: int = Field(5, gt=0, description="K, the clients that share a domain")
    alpha: Alpha = 0.5
    min_size: MinSize = 10

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Name the clients `<domain>/<number>`."""
        return {client: domain for domain in domains for client in numbered(f"{domain}/", self.clients_per_domain)}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Split each domain with its own random stream."""
        dealt: dict[ClientId, ImageSet] = {}
        for domain, images in train.items():
            ids, rng = numbered(f"{domain}/", self.clients_per_domain), stream(seed, "dirichlet", domain)
            parts = deal_by_dirichlet(images.labels, len(ids), self.alpha, self.min_size, rng, f"domain {domain}")
            dealt |= {client: images.select(rows) for client, rows in zip(ids, parts, strict=True)}
        return dealt


class Pooled(Partition, ABC):
    """Base of partitions of one pool of all images among numbered clients."""

    pools: ClassVar = True

    clients: int = Field(10, gt=0, description="N, all clients")

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Name the clients `client-<number>`; their domain is the only one, or else the pool."""
        return {client: domains[0] if len(domains) == 1 else POOL for client in numbered("client-", self.clients)}


class Iid(Pooled):
    """One pool of all images, dealt out at random in equal shares: the control without any skew."""

    name: Literal["iid"] = "iid"

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Deal shares that differ by at most one image."""
        images = pool(list(train.values()))
        if len(images) < self.clients:
            raise UserError(f"`partition.clients` must be at most the {len(images)} images, but it is {self.clients}.")
        order = torch.from_numpy(stream(seed, "iid").permutation(len(images)))
        shares = zip(numbered("client-", self.clients), order.tensor_split(self.clients), strict=True)
        return {client: images.select(share.sort().values) for client, share in shares}


class LabelSkew(Pooled):
    """One pool of all images, split over clients by Dirichlet(alpha) per class (FedMS, Section 4.2)."""

    name: Literal["label_skew"] = "label_skew"
    alpha: Alpha = 1.0
    min_size: MinSize = 10

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Split the pool of all domains."""
        images, rng = pool(list(train.values())), stream(seed, "dirichlet", POOL)
        whose = "the pool of all domains"
        parts = deal_by_dirichlet(images.labels, self.clients, self.alpha, self.min_size, rng, whose)
        ids = numbered("client-", self.clients)
        return {client: images.select(rows) for client, rows in zip(ids, parts, strict=True)}


CENTRAL = "central"


class Centralized(Partition):
    """One client with all images of all domains: the bound to which federated methods are compared."""

    pools: ClassVar = True

    name: Literal["centralized"] = "centralized"
    with_synthetic: bool = Field(False, description="and with the server's synthetic images, as FedAG compares")

    @property
    def takes_synthetic(self) -> bool:
        """True if `with_synthetic` is set."""
        return self.with_synthetic

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Name the client `central`; its domain is the only one, or else the pool."""
        return {CENTRAL: domains[0] if len(domains) == 1 else POOL}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Give the client all images."""
        return {CENTRAL: pool(list(train.values()))}

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """Add the synthetic images to the split, and to the client's training images if `with_synthetic` is set."""
        given = super().joined(parts, synthetic)
        if not self.with_synthetic:
            return given
        (client,) = parts.clients
        return replace(given, clients=(replace(client, train=pool([client.train, *synthetic.values()])),))


AnyPartition = FeatureSkew | FeatureLabelSkew | LabelSkew | Iid | Centralized
PartitionConfig = Annotated[AnyPartition, Field(discriminator="name")]

__all__ = [
    "POOL",
    "AnyPartition",
    "Centralized",
    "FeatureLabelSkew",
    "FeatureSkew",
    "Iid",
    "LabelSkew",
    "Partition",
    "PartitionConfig",
    "Split",
]
