"""Clients differ in their classes alone."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from fedsweep.common.randomness import stream
from fedsweep.data.partition.base import POOL, Partition, numbered, pool
from fedsweep.data.partition.dirichlet import Alpha, MinSize, deal_by_dirichlet
from fedsweep.types import ClientId, ImageSet


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
