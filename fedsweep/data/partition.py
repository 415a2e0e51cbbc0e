"""Partitions, which are rules that divide the training images among clients.

Before the division, a random part of each domain's training images can be held out for the server (proxy images).
Images of the same group, such as the renderings of a scan, are never divided between training and held-out images.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.randomness import stream
from fedsweep.data.dealing import deal_by_dirichlet, deal_evenly
from fedsweep.data.groups import check_groups_known
from fedsweep.data.image_sets import hold_out, pool
from fedsweep.types import Client, ClientId, FederatedData, ImageSet

POOL = "pool"  # the domain of clients with images of several domains
MOST_CLIENTS = 100_000  # enough for any data set; more clients would only delay the error about too few images


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
        description="share of each client's remaining images that is held out for validation during training",
    )
    tuning_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each client's non-test images that is held out for tuning: the validation metrics of the "
        "clients' own models are measured on them",
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
            UserError: There are too few images for the number of clients, a domain or a client has too few images to
                hold some of them out, or images are held out and their groups are unknown.
        """
        for purpose in ("proxy", "test", "tuning", "validation"):
            if getattr(self, f"{purpose}_share"):
                check_groups_known(data, f"`partition.{purpose}_share`")
        proxy, sources = hold_out({one.name: one.train for one in data.domains}, self.proxy_share, seed, "proxy")
        if self.pools:
            sources = {POOL: pool(list(sources.values()))}
        dealt: dict[ClientId, ImageSet] = {}
        for source, images in sources.items():
            dealt.update(zip(self.ids(source), self.cut(images, source, seed), strict=True))
        test, rest = hold_out(dealt, self.test_share, seed, "test")
        tuning, rest = hold_out(rest, self.tuning_share, seed, "tuning")
        validation, train = hold_out(rest, self.validation_share, seed, "validation")
        clients = (
            Client(
                client,
                domain,
                train[client],
                capacities[client],
                validation.get(client),
                test.get(client),
                tuning.get(client),
            )
            for client, domain in self.clients_of([one.name for one in data.domains]).items()
        )
        return Split(tuple(clients), proxy)

    @property
    def draws(self) -> bool:
        """True if the split depends on the seed, because images are dealt or held out at random."""
        return self.deals or any((self.proxy_share, self.test_share, self.tuning_share, self.validation_share))

    @property
    def deals(self) -> bool:
        """True if `cut` divides images at random; false if a single client gets all images of a source."""
        return False

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


def numbered(prefix: str, count: int) -> list[ClientId]:
    """Return `count` ids of the form `<prefix><number>`, e.g. `art/07`.

    Numbers are padded with zeros so that the ids sort by number.
    """
    digits = len(str(count - 1))
    return [f"{prefix}{number:0{digits}d}" for number in range(count)]


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
    clients_per_domain: int = Field(5, gt=0, le=MOST_CLIENTS, description="K, the number of clients of each domain")
    alpha: Alpha = 0.5
    min_size: MinSize = 10

    @property
    def deals(self) -> bool:
        """True if several clients share the images of a domain."""
        return self.clients_per_domain > 1

    def ids(self, source: str) -> list[ClientId]:
        """Return the ids of the clients in the domain `source`, in the form `<domain>/<number>`."""
        return numbered(f"{source}/", self.clients_per_domain)

    def cut(self, images: ImageSet, source: str, seed: int) -> list[ImageSet]:
        """Divide the images of each class among the domain's clients in proportions drawn from Dirichlet(alpha).

        Each domain has its own random stream.
        """
        rng, whose = stream(seed, "dirichlet", source), f"domain {source}"
        parts = deal_by_dirichlet(images, self.clients_per_domain, self.alpha, self.min_size, rng, whose)
        return [images.select(rows) for rows in parts]


class Pooled(Partition, ABC):
    """The base class of partitions that pool the images of all domains before dividing them."""

    pools: ClassVar = True

    clients: int = Field(10, gt=0, le=MOST_CLIENTS, description="N, the number of clients")

    @property
    def deals(self) -> bool:
        """True if there are several clients."""
        return self.clients > 1

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

        The sizes of the parts differ by at most one image. Groups of several images are dealt one after the other, each
        to the client with the fewest images.
        """
        parts = deal_evenly(images, self.clients, stream(seed, "iid"))
        return [images.select(rows) for rows in parts]


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
        parts = deal_by_dirichlet(images, self.clients, self.alpha, self.min_size, rng, whose)
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


class CentralizedSynthetic(Partition):
    """A partition with a single client that trains only on the server's synthetic images.

    Compared with the partition `centralized`, it shows how far synthetic images can replace real images (FedAG,
    Figure 3).
    """

    pools: ClassVar = True

    name: Literal["centralized_synthetic"] = "centralized_synthetic"

    @property
    def takes_synthetic(self) -> bool:
        """True, because the client trains on the server's synthetic images."""
        return True

    def ids(self, source: str) -> list[ClientId]:
        """Return the id of the only client, `central`."""
        return ["central"]

    def joined(self, parts: Split, synthetic: Mapping[str, ImageSet]) -> Split:
        """Return `parts` with the server's synthetic images as the only training images of the client."""
        (client,) = parts.clients
        only = replace(client, train=pool(list(synthetic.values())))
        return replace(parts, clients=(only,), synthetic=synthetic)


AnyPartition = FeatureSkew | FeatureLabelSkew | LabelSkew | Iid | Centralized | CentralizedSynthetic
PartitionConfig = Annotated[AnyPartition, Field(discriminator="name")]
