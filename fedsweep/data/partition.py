"""Partitions, which are rules that divide the training images among clients.

Before the division, a random part of each domain's training images can be held out for the server (proxy images).
"""

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

POOL = "pool"  # the domain of clients with images of several domains


@dataclass(frozen=True)
class Split:
    """The images of the clients and of the server in a run.

    `proxy` maps each domain to real images that are held out for the server. `synthetic` maps each domain to the
    server's synthetic images.
    """

    clients: tuple[Client, ...]
    proxy: Mapping[str, ImageSet]
    synthetic: Mapping[str, ImageSet] = field(default_factory=dict)


class Partition(Config, ABC):
    """The base class of rules that divide the training images among clients."""

    pools: ClassVar[bool] = False  # True if the images of all domains are divided together

    name: str
    proxy_share: float = Field(
        0.0, ge=0, lt=1, description="share of each domain's training images that is held out for the server"
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each client's non-test images that is held out for validation",
    )
    test_share: float = Field(
        0.0, ge=0, lt=1, description="share of each client's images that is held out to test the client's own model"
    )

    @abstractmethod
    def ids(self, source: str) -> list[ClientId]:
        """Return the ids of the clients that share the images of `source`.

        `source` is a domain, or "pool" for all domains together.
        """

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the images of a domain, or of all domains together, among clients.

        The default implementation gives all images to a single client.

        Args:
            images: The images to divide.
            source: The domain of the images, or "pool" for all domains together.
            seed: The seed of the run.

        Returns:
            The images of each client, in the order of `ids`.

        Raises:
            UserError: There are too few images for the number of clients.
        """
        return [images]

    def clients_of(self, domains: Sequence[str]) -> dict[ClientId, str]:
        """Return the domain of each client, keyed by client id.

        Clients with images from several domains have the domain "pool".
        """
        if self.pools:
            return dict.fromkeys(self.ids(POOL), domains[0] if len(domains) == 1 else POOL)
        return {client: domain for domain in domains for client in self.ids(domain)}

    def split(self, data: FederatedData, capacities: Mapping[ClientId, int], seed: int) -> Split:
        """Divide the training images between the server and the clients.

        Args:
            data: The data set.
            capacities: The number of blocks that each client can hold, keyed by client id.
            seed: The seed of the run.

        Returns:
            The clients, in the order of `clients_of`, and the proxy images that are held out for the server.

        Raises:
            UserError: There are too few images for the number of clients, or a domain or a client has too few images to
                hold some of them out.
        """
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
        """True if the clients also train on the server's synthetic images."""
        return False

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """Return `parts` with the server's synthetic images added.

        If `takes_synthetic` is true, the clients also train on these images.
        """
        clients = parts.clients
        if self.takes_synthetic:
            clients = tuple(replace(one, train=pool([one.train, *synthetic.values()])) for one in clients)
        return replace(parts, clients=clients, synthetic=synthetic)


def _hold_out(whole: ImageSet, share: float, seed: int, purpose: str, name: str) -> tuple[ImageSet | None, ImageSet]:
    """Hold out a random `share` of the examples in `whole`, and return the held-out part and the rest.

    The held-out part is None if `share` is 0. Both parts keep the original order. `purpose` and `name` select the
    random stream.
    """
    if share == 0:
        return None, whole
    if len(whole) < 2:
        raise UserError(f"`partition.{purpose}_share` {share:g} needs at least 2 images, but {name} has {len(whole)}.")
    count = min(max(round(share * len(whole)), 1), len(whole) - 1)
    order = torch.from_numpy(stream(seed, purpose, name).permutation(len(whole)))
    return whole.select(order[:count].sort().values), whole.select(order[count:].sort().values)


def pool(sets: Sequence[ImageSet]) -> ImageSet:
    """Join image sets into one set without copying pixels."""
    if len(sets) == 1:
        return sets[0]
    parts, rows, start = list[Tensor](), [], 0
    for one in sets:
        parts += one.parts
        rows.append(start + (torch.arange(len(one)) if one.rows is None else one.rows))
        start += len(one.images)
    return ImageSet(PixelStack(tuple(parts)), torch.cat([one.labels for one in sets]), torch.cat(rows))


def numbered(prefix: str, count: int) -> list[ClientId]:
    """Return `count` ids of the form `<prefix><number>`, e.g. `art/07`.

    Numbers are padded with zeros so that the ids sort by number.
    """
    digits = len(str(count - 1))
    return [f"{prefix}{number:0{digits}d}" for number in range(count)]


TRIES = 1000
Alpha = Annotated[
    float,
    Field(
        gt=0,
        le=1e6,
        description="concentration of the Dirichlet distribution; a small value gives each client few classes",
    ),
]
MinSize = Annotated[
    int,
    Field(
        gt=0,
        description="smallest number of images per client; the division is redrawn until every client has enough",
    ),
]


def deal_by_dirichlet(
    labels: Tensor, clients: int, alpha: float, min_size: int, rng: np.random.Generator, whose: str
) -> list[Tensor]:
    """Divide the examples of each class among clients in proportions drawn from a Dirichlet distribution.

    The examples of a class are shuffled and divided in the proportions p ~ Dirichlet(alpha, ..., alpha). The
    proportions of all classes are redrawn until every client has at least `min_size` examples.

    Args:
        labels: The class of each example, int64 (n,).
        clients: The number of clients.
        alpha: The concentration of the Dirichlet distribution; a small value gives each client few classes.
        min_size: The smallest number of examples per client.
        rng: The random generator.
        whose: The source of the examples, e.g. "domain art", for error messages.

    Returns:
        For each client, the positions of its examples in `labels`, in ascending order.

    Raises:
        UserError: There are too few examples, or no draw gives every client `min_size` examples.
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
        ends[:, -1] = counts[:, 0]  # the sum may differ from 1 by rounding
        smallest = int(np.diff(ends, prepend=0, axis=1).sum(axis=0).min())
        if smallest >= min_size:
            parts = [np.split(positions, end[:-1]) for positions, end in zip(classes, ends, strict=True)]
            return [torch.from_numpy(np.sort(np.concatenate(mine))) for mine in zip(*parts, strict=True)]
        best = max(best, smallest)
    raise UserError(
        f"`partition.alpha` {alpha:g} leaves one of the {clients} clients of {whose} with fewer images than "
        f"`partition.min_size` {min_size} in each of {TRIES} draws (at best {best} of {len(labels)}); "
        "increase alpha, or decrease the number of clients or the minimum."
    )


class FeatureSkew(Partition):
    """A partition with one client per domain, so clients differ in style but not in classes (FedRA, Section 4.1)."""

    name: Literal["feature_skew"] = "feature_skew"

    def ids(self, source: str) -> list[ClientId]:
        """Return the id of the domain's only client, which is the name of the domain."""
        return [source]


class FeatureLabelSkew(Partition):
    """A partition in which several clients share the images of each domain (FedRA, Section 4.1).

    The images of each class are divided among these clients in proportions drawn from Dirichlet(alpha).
    """

    name: Literal["feature_label_skew"] = "feature_label_skew"
    clients_per_domain: int = Field(5, gt=0, description="K, the number of clients of each domain")
    alpha: Alpha = 0.5
    min_size: MinSize = 10

    def ids(self, source: str) -> list[ClientId]:
        """Return the ids of the clients in the domain `source`, in the form `<domain>/<number>`."""
        return numbered(f"{source}/", self.clients_per_domain)

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the images of each class among the domain's clients in proportions drawn from Dirichlet(alpha).

        Each domain has its own random stream.
        """
        rng, whose = stream(seed, "dirichlet", source), f"domain {source}"
        parts = deal_by_dirichlet(images.labels, self.clients_per_domain, self.alpha, self.min_size, rng, whose)
        return [images.select(rows) for rows in parts]


class Pooled(Partition, ABC):
    """The base class of partitions that pool the images of all domains before dividing them."""

    pools: ClassVar = True

    clients: int = Field(10, gt=0, description="N, the number of clients")

    def ids(self, source: str) -> list[ClientId]:
        """Return the ids of all clients, in the form `client-<number>`."""
        return numbered("client-", self.clients)


class Iid(Pooled):
    """A partition that divides the images of all domains at random into equal parts, one per client.

    All clients have about the same label distribution, so this partition is the control without skew.
    """

    name: Literal["iid"] = "iid"

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the images at random into one part per client.

        The sizes of the parts differ by at most one image.
        """
        if len(images) < self.clients:
            raise UserError(
                f"`partition.clients` must be at most {len(images)}, the number of images, but it is {self.clients}."
            )
        order = torch.from_numpy(stream(seed, "iid").permutation(len(images)))
        return [images.select(share.sort().values) for share in order.tensor_split(self.clients)]


class LabelSkew(Pooled):
    """A partition of the pooled images of all domains (FedMS, Section 4.2).

    The images of each class are divided among the clients in proportions drawn from Dirichlet(alpha).
    """

    name: Literal["label_skew"] = "label_skew"
    alpha: Alpha = 1.0
    min_size: MinSize = 10

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the pooled images of each class among the clients in proportions drawn from Dirichlet(alpha)."""
        rng, whose = stream(seed, "dirichlet", source), "the pool of all domains"
        parts = deal_by_dirichlet(images.labels, self.clients, self.alpha, self.min_size, rng, whose)
        return [images.select(rows) for rows in parts]


class Centralized(Partition):
    """A partition that gives all images to a single client.

    The accuracy of such centralised training is an upper bound for federated methods.
    """

    pools: ClassVar = True

    name: Literal["centralized"] = "centralized"
    with_synthetic: bool = Field(
        False, description="whether the client also trains on the server's synthetic images, as in FedAG's baselines"
    )

    @property
    def takes_synthetic(self) -> bool:
        """True if the client also trains on the server's synthetic images, as configured by `with_synthetic`."""
        return self.with_synthetic

    def ids(self, source: str) -> list[ClientId]:
        """Return the id of the only client, `central`."""
        return ["central"]


AnyPartition = FeatureSkew | FeatureLabelSkew | LabelSkew | Iid | Centralized
PartitionConfig = Annotated[AnyPartition, Field(discriminator="name")]
