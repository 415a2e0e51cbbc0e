"""The base of all partitions: fields, held-out shares, and the Dirichlet draw."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.types import Client, ClientId, FederatedData, ImageSet, PixelStack

POOL = "pool"
"""The domain of a client whose images come from all domains."""


@dataclass(frozen=True)
class Split:
    """The clients, and the server's proxy images, which no client holds, and synthetic images by domain."""

    clients: tuple[Client, ...]
    proxy: Mapping[str, ImageSet]
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)


class Partition(Config, ABC):
    """A rule that deals training images to clients, after the server's proxy share is held out."""

    pools: ClassVar[bool] = False
    """True if clients draw from all domains as from one."""

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
        """Return the domain of every client by id, without reading images."""

    @abstractmethod
    def deal(self, train: Mapping[str, ImageSet], seed: int) -> dict[ClientId, ImageSet]:
        """Deal the training images of each domain to the clients, or raise UserError if that is impossible."""

    def split(self, data: FederatedData, capacities: Mapping[ClientId, int], seed: int) -> Split:
        """Return the clients in the order of `clients_of`, with `capacities[id]` blocks each, or raise UserError."""
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
        """True if a client trains on the server's synthetic images."""
        return False

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """Return the split with the server's synthetic images."""
        return replace(parts, synthetic=synthetic)


def _hold_out(whole: ImageSet, share: float, seed: int, purpose: str, name: str) -> tuple[ImageSet | None, ImageSet]:
    """Split off a random `share` of the examples, in their order, with at least one on either side."""
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
    """Join all examples of several domains into one set, without copying pixels."""
    if len(sets) == 1:
        return sets[0]
    parts, rows, start = list[Tensor](), [], 0
    for one in sets:
        parts += one.parts
        rows.append(start + (torch.arange(len(one)) if one.rows is None else one.rows))
        start += len(one.images)
    return ImageSet(PixelStack(tuple(parts)), torch.cat([one.labels for one in sets]), torch.cat(rows))


def numbered(prefix: str, count: int) -> list[ClientId]:
    """Return ids that sort by number: `art/0`, or `art/00` if there are more than ten."""
    digits = len(str(count - 1))
    return [f"{prefix}{number:0{digits}d}" for number in range(count)]


TRIES = 1000
Alpha = Annotated[float, Field(gt=0, le=1e6, description="Dirichlet concentration; small: few classes per client")]
MinSize = Annotated[
    int, Field(gt=0, description="images that every client has at least; shares are drawn anew until it is so")
]


def deal_by_dirichlet(
    labels: Tensor, clients: int, alpha: float, min_size: int, rng: np.random.Generator, whose: str
) -> list[Tensor]:
    """Return the ascending positions of each client's examples, or raise UserError if all draws leave one too few.

    The shuffled examples of each class are cut at the cumulative shares p ~ Dirichlet(alpha, ..., alpha). All shares
    are drawn anew until every client has `min_size` examples. `whose` names the images in error messages.
    """
    if clients * min_size > len(labels):
        raise UserError(
            f"`partition.min_size` {min_size} for each of {clients} clients needs {clients * min_size} images, "
            f"but {whose} has {len(labels)}."
        )
    of_example = labels.numpy()
    classes = [rng.permutation(np.flatnonzero(of_example == label)) for label in np.unique(of_example)]
    counts = np.array([len(positions) for positions in classes])[:, None]
    best = 0
    for _ in range(TRIES):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(classes))
        ends = np.rint(shares.cumsum(axis=1) * counts).astype(np.int64)  # (classes, clients)
        ends[:, -1] = counts[:, 0]  # whatever the sum's last digits
        smallest = int(np.diff(ends, prepend=0, axis=1).sum(axis=0).min())
        if smallest >= min_size:
            parts = [np.split(positions, end[:-1]) for positions, end in zip(classes, ends, strict=True)]
            return [torch.from_numpy(np.sort(np.concatenate(mine))) for mine in zip(*parts, strict=True)]
        best = max(best, smallest)
    raise UserError(
        f"`partition.alpha` {alpha:g} leaves one of the {clients} clients of {whose} with fewer images than "
        f"`partition.min_size` {min_size} in each of {TRIES} draws (at best {best} of {len(labels)}); "
        "a larger alpha, fewer clients or a smaller minimum would do."
    )
