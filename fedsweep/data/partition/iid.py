"""Clients do not differ: the control."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.partition.base import POOL, Partition, numbered, pool
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
