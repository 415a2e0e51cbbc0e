"""Partitions of domains into clients: the five rules, after the server's share is held out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.types import Client, ClientId, FederatedData, ImageSet, PixelStack

POOL = "pool"  # the domain of a client whose images come from all domains


@dataclass(frozen=True)
class Split:
    """The clients, and the server's proxy images, which no client holds, and synthetic images by domain."""

    clients: tuple[Client, ...]
    proxy: Mapping[str, ImageSet]
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)


class Partition(Config, ABC):
    """A rule that deals training images to clients, after the server's proxy share is held out."""

    pools: ClassVar[bool] = False  # True if clients draw from all domains as from one

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
    def ids(self, source: str) -> list[ClientId]:
        """Return the ids of the clients that share a domain, or the pool of all."""

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the images of a domain or of the pool among its clients, or raise UserError; a lone one gets all."""
        return [images]

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Return the domain of every client by id; that of a pool's clients is the only one, or else the pool."""
        if self.pools:
            return dict.fromkeys(self.ids(POOL), domains[0] if len(domains) == 1 else POOL)
        return {client: domain for domain in domains for client in self.ids(domain)}

    def split(self, data: FederatedData, capacities: Mapping[ClientId, int], seed: int) -> Split:
        """Return the clients in the order of `clients_of`, with `capacities[id]` blocks each, or raise UserError."""
        shares = {one.name: _hold_out(one.train, self.proxy_share, seed, "proxy", one.name) for one in data.domains}
        sources = {name: rest for name, (_, rest) in shares.items()}
        if self.pools:
            sources = {POOL: pool(list(sources.values()))}
        dealt: dict[ClientId, ImageSet] = {}
        for source, images in sources.items():
            dealt.update(zip(self.ids(source), self.cut(images, source, seed), strict=True))
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
        """Add the server's synthetic images to the split, and to the clients' training images if they take them."""
        clients = parts.clients
        if self.takes_synthetic:
            clients = tuple(replace(one, train=pool([one.train, *synthetic.values()])) for one in clients)
        return replace(parts, clients=clients, synthetic=synthetic)


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


class FeatureSkew(Partition):
    """One client per domain: clients have the same classes in different styles (FedRA, Section 4.1)."""

    name: Literal["feature_skew"] = "feature_skew"

    def ids(self, source: str) -> list[ClientId]:
        """Name the client after its domain."""
        return [source]


class FeatureLabelSkew(Partition):
    """Each domain is split over several clients by Dirichlet(alpha) per class (FedRA, Section 4.1)."""

    name: Literal["feature_label_skew"] = "feature_label_skew"
    clients_per_domain: int = Field(5, gt=0, description="K, the clients that share a domain")
    alpha: Alpha = 0.5
    min_size: MinSize = 10

    def ids(self, source: str) -> list[ClientId]:
        """Name the clients `<domain>/<number>`."""
        return numbered(f"{source}/", self.clients_per_domain)

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Split a domain with its own random stream."""
        rng, whose = stream(seed, "dirichlet", source), f"domain {source}"
        parts = deal_by_dirichlet(images.labels, self.clients_per_domain, self.alpha, self.min_size, rng, whose)
        return [images.select(rows) for rows in parts]


class Pooled(Partition, ABC):
    """Base of partitions of one pool of all images among numbered clients."""

    pools: ClassVar = True

    clients: int = Field(10, gt=0, description="N, all clients")

    def ids(self, source: str) -> list[ClientId]:
        """Name the clients `client-<number>`."""
        return numbered("client-", self.clients)


class Iid(Pooled):
    """One pool of all images, dealt out at random in equal shares: the control without any skew."""

    name: Literal["iid"] = "iid"

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Deal shares that differ by at most one image."""
        if len(images) < self.clients:
            raise UserError(f"`partition.clients` must be at most the {len(images)} images, but it is {self.clients}.")
        order = torch.from_numpy(stream(seed, "iid").permutation(len(images)))
        return [images.select(share.sort().values) for share in order.tensor_split(self.clients)]


class LabelSkew(Pooled):
    """One pool of all images, split over clients by Dirichlet(alpha) per class (FedMS, Section 4.2)."""

    name: Literal["label_skew"] = "label_skew"
    alpha: Alpha = 1.0
    min_size: MinSize = 10

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Split the pool of all domains."""
        rng, whose = stream(seed, "dirichlet", source), "the pool of all domains"
        parts = deal_by_dirichlet(images.labels, self.clients, self.alpha, self.min_size, rng, whose)
        return [images.select(rows) for rows in parts]


class Centralized(Partition):
    """One client with all images of all domains: the bound to which federated methods are compared."""

    pools: ClassVar = True

    name: Literal["centralized"] = "centralized"
    with_synthetic: bool = Field(False, description="and with the server's synthetic images, as FedAG compares")

    @property
    def takes_synthetic(self) -> bool:
        """True if `with_synthetic` is set."""
        return self.with_synthetic

    def ids(self, source: str) -> list[ClientId]:
        """Name the client `central`."""
        return ["central"]


AnyPartition = FeatureSkew | FeatureLabelSkew | LabelSkew | Iid | Centralized
PartitionConfig = Annotated[AnyPartition, Field(discriminator="name")]
