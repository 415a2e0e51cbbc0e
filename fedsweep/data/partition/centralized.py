"""No federation: all images in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from fedsweep.data.partition.base import POOL, Partition, Split, pool
from fedsweep.types import ClientId, ImageSet

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
