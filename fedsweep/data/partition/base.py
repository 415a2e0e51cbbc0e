"""What a partition is: which of the training images each client holds. A function of data and seed alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.types import Client, ClientId, FederatedData, ImageSet, PixelStack

POOL = "pool"
"""The domain of a client whose images come from all of them."""


@dataclass(frozen=True)
class Split:
    """The clients, and by domain the server's proxy images, which no client holds, and its synthetic ones."""

    clients: tuple[Client, ...]
    proxy: Mapping[str, ImageSet]
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)


class Partition(Config, ABC):
    """A rule that deals training images to clients, after the server's proxy share is taken out."""

    pools: ClassVar[bool] = False
    """Whether clients draw from all domains as from one."""

    name: str
    proxy_share: float = Field(
        0.0, ge=0, lt=1, description="share of each domain's training images held out of the clients for the server"
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of its images, without those of `test_share`, that each client holds out of its training",
    )
    test_share: float = Field(
        0.0, ge=0, lt=1, description="share of its images that each client tests its own model on, and nothing else"
    )

    @abstractmethod
    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Every client's id and domain, known before any image is read."""

    @abstractmethod
    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """The clients' images, from what is left of each domain for training.

        Raises:
            UserError: no such division exists, or none was found.
        """

    def split(self, data: FederatedData, capacities: Mapping[ClientId, int], seed: int) -> Split:
        """Clients with `capacities[id]` blocks each, in the order of `clients_of`.

        Raises:
            UserError: as `deal`, or a share cannot be held out.
        """
        shares = {one.name: _hold_out(one.train, self.proxy_share, seed, "proxy", one.name) for one in data.domains}
        dealt = self.deal({name: rest for name, (_, rest) in shares.items()}, seed)
        clients = []
        for client, domain in self.clients_of([one.name for one in data.domains]).items():
            test, rest = _hold_out(dealt[client], self.test_share, seed, "test", client)
            validation, train = _hold_out(rest, self.validation_share, seed, "validation", client)
            clients.append(Client(client, domain, train, capacities[client], validation, test))
        return Split(tuple(clients), {name: proxy for name, (proxy, _) in shares.items() if proxy is not None})

    @property
    def takes_synthetic(self) -> bool:
        """Whether a client trains on the server's synthetic images."""
        return False

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """With the server's synthetic images."""
        return replace(parts, synthetic=synthetic)


def _hold_out(whole: ImageSet, share: float, seed: int, purpose: str, name: str) -> tuple[ImageSet | None, ImageSet]:
    """A random `share` of the examples, and the rest in its old order; at least one on either side.

    Raises:
        UserError: there are not two.
    """
    if share == 0:
        return None, whole
    if len(whole) < 2:
        raise UserError(
            f"`partition.{purpose}_share` is {share:g}, but of {len(whole)} image of {name} none can be held out."
        )
    count = min(max(round(share * len(whole)), 1), len(whole) - 1)
    order = torch.from_numpy(stream(seed, purpose, name).permutation(len(whole)))
    return whole.select(order[:count].sort().values), whole.select(order[count:].sort().values)


def pool(sets: Sequence[ImageSet]) -> ImageSet:
    """All examples of several domains as one set, without copying pixels."""
    if len(sets) == 1:
        return sets[0]
    parts, rows, start = list[Tensor](), [], 0
    for one in sets:
        parts += one.parts
        rows.append(start + (torch.arange(len(one)) if one.rows is None else one.rows))
        start += len(one.images)
    return ImageSet(PixelStack(tuple(parts)), torch.cat([one.labels for one in sets]), torch.cat(rows))


def numbered(prefix: str, count: int) -> list[ClientId]:
    """Ids that sort by number: `art/0`, or `art/00` where there are more than ten."""
    digits = len(str(count - 1))
    return [f"{prefix}{number:0{digits}d}" for number in range(count)]
