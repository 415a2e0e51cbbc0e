"""Partitions that pool all domains: IID, label skew, and centralized."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.partition.base import POOL, Alpha, MinSize, Partition, Split, deal_by_dirichlet, numbered, pool
from fedsweep.types import ClientId, ImageSet


class Iid(Partition):
    """One pool of all images, dealt out at random in equal shares: the control without any skew."""

    pools: ClassVar = True

    name: Literal["iid"] = "iid"
    clients: int = Field(10, gt=0, description="N, all clients")

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """`client-<number>`, of the one domain there is, or of the pool."""
        return {client: domains[0] if len(domains) == 1 else POOL for client in numbered("client-", self.clients)}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Shares that differ by one image at most."""
        images = pool(list(train.values()))
        if len(images) < self.clients:
            raise UserError(f"`partition.clients` must be at most the {len(images)} images, but it is {self.clients}.")
        order = torch.from_numpy(stream(seed, "iid").permutation(len(images)))
        shares = [share.sort().values for share in order.tensor_split(self.clients)]
        return {
            client: images.select(rows) for client, rows in zip(numbered("client-", self.clients), shares, strict=True)
        }


class LabelSkew(Partition):
    """One pool of all images, split over clients by Dirichlet(alpha) per class (FedMS, Section 4.2)."""

    pools: ClassVar = True

    name: Literal["label_skew"] = "label_skew"
    clients: int = Field(10, gt=0, description="N, all clients")
    alpha: Alpha = 1.0
    min_size: MinSize = 10

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """`client-<number>`, of the one domain there is, or of the pool."""
        return {client: domains[0] if len(domains) == 1 else POOL for client in numbered("client-", self.clients)}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """The pool of all domains."""
        images = pool(list(train.values()))
        rng = stream(seed, "dirichlet", POOL)
        parts = deal_by_dirichlet(
            images.labels, self.clients, self.alpha, self.min_size, rng, "the pool of all domains"
        )
        ids = numbered("client-", self.clients)
        return {client: images.select(rows) for client, rows in zip(ids, parts, strict=True)}


CENTRAL = "central"


class Centralized(Partition):
    """One client with all images of all domains, the bound that federated methods are compared to."""

    pools: ClassVar = True

    name: Literal["centralized"] = "centralized"
    with_synthetic: bool = Field(False, description="and with the server's synthetic images, as FedAG compares")

    @property
    def takes_synthetic(self) -> bool:
        """As asked."""
        return self.with_synthetic

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """`central`, of the one domain there is, or of the pool."""
        return {CENTRAL: domains[0] if len(domains) == 1 else POOL}

    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """All."""
        return {CENTRAL: pool(list(train.values()))}

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """With the synthetic images among those that the client trains on."""
        given = super().joined(parts, synthetic)
        if not self.with_synthetic:
            return given
        (client,) = parts.clients
        return replace(given, clients=(replace(client, train=pool([client.train, *synthetic.values()])),))
