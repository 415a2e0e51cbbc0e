"""Configuration classes of data sets, and functions that read prepared domains and compute digests of data sets."""

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near, summarise_list
from fedsweep.common.rules import domains_fit
from fedsweep.data.groups import check_groups_known
from fedsweep.data.image_sets import pool
from fedsweep.data.prepared.arrow_files import check_labels, map_domain
from fedsweep.data.prepared.card import StoreCard, prepared_sizes, read_card, store_folder, why_missing
from fedsweep.types import Domain, FederatedData, ImageSet


def read_domain(path: Path, name: str, listed: bool = False) -> Domain:
    """Return the domain `name`, whose images are stored in the Arrow file `path`.

    If `listed` is true, the test images that the data set lists for validation are the domain's validation images. The
    image tensors are read-only memory maps of the file. Writing to these tensors would crash the process.

    Raises:
        UserError: The file is missing or damaged, or is not a file of prepared images.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        parts = map_domain(path)
        train, test = (
            ImageSet(
                torch.from_numpy(part.images),
                torch.from_numpy(part.labels.astype(np.int64)),
                groups=None if part.groups is None else torch.from_numpy(part.groups),
            )
            for part in parts
        )
    if not listed:
        return Domain(name, train, test)
    of_validation = torch.zeros(len(test), dtype=torch.bool)
    if (marks := parts[1].validation) is not None:
        of_validation = torch.from_numpy(marks)
    validation, rest = (test.select(part.nonzero().flatten()) for part in (of_validation, ~of_validation))
    return Domain(name, train, rest, validation)


def content_digest(class_names: Sequence[str], domains: Iterable[Domain]) -> str:
    """Return the SHA-256 of a data set's content as hexadecimal digits.

    First, each class name is hashed, followed by a zero byte. Then the domains are hashed one after the other. In each
    domain, the following values are hashed for the training images and then again for the test images:

    - the name of the domain
    - the pixels (uint8, n x 3 x height x width)
    - the labels (int64, little-endian)
    """
    digest = hashlib.sha256("".join(f"{name}\0" for name in class_names).encode())
    for domain in domains:
        for part in (domain.train, domain.test):
            digest.update(domain.name.encode())
            for images, _ in part.batches(4096):
                digest.update(images.numpy().data)
            digest.update(part.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class Data(Config, ABC):
    """The base class of data sources, with the options of a data set as fields.

    A subclass declares its `name`, the `size` of its images as a property or a field, and its options. The default of
    the field `domains` lists all domains, unless the user must name them. A subclass that makes its images itself can
    check the domains with `fedsweep.common.rules.known_domains_fit`, as `DigitsData` does.
    """

    if TYPE_CHECKING:
        name: str

        @property
        def size(self) -> int:
            """The height and width of the images, in pixels."""

    domains: tuple[str, ...] = Field(min_length=1, description="domains to use; the clients follow this order")
    held_out_domains: tuple[str, ...] = Field(
        (), description="domains among `data.domains` that no client has; they are tested as out-of-domain data"
    )
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | Literal["listed"] = Field(
        0.0,
        description="share of each domain's training images that no client gets and that every round is validated on, "
        "so that a search can choose between runs without the test images; `listed` validates on the images that the "
        "data set lists for validation, which are test images otherwise",
    )

    def _violations(self) -> Iterator[str]:
        return domains_fit(self)

    @abstractmethod
    def load(self) -> FederatedData:
        """Return the data set, which must be the same for equal options.

        The domains are those of the field `domains`, in this order. The domains among `held_out_domains` are in the
        field `held_out` of the result; their training images are empty, or are not used. Images are uint8
        (n, 3, size, size). The `digest` identifies the images and labels (see `content_digest`). The images of
        `validation_fraction` are held out by the caller, unless its value is `listed`.

        Raises:
            UserError: The data set is missing or damaged.
        """

    @property
    def training_domains(self) -> tuple[str, ...]:
        """The domains of the clients, that is, all domains that are not held out."""
        return tuple(name for name in self.domains if name not in self.held_out_domains)


class PreparedData(Data):
    """The configuration of a prepared data set, which `fedsweep data prepare` has decoded and stored on disk."""

    name: Literal["prepared"] = "prepared"
    set: str = Field(min_length=1, description="name under which the data set was prepared, e.g. `pacs`")
    size: int = Field(224, gt=0, description="height and width of the images in pixels")
    digest: str | None = Field(
        None,
        pattern="^[0-9a-fA-F]{8,64}$",
        description="first digits of the SHA-256 of the data set's content; null: accept any content",
    )

    def load(self) -> FederatedData:
        """Return the data set with memory-mapped images.

        Raises:
            UserError: The data set is not prepared or is damaged, a domain is missing, the digest of the data set does
                not begin with the configured `digest`, domains are held out and the groups of the images are unknown,
                or a domain lacks the listed validation images that `validation_fraction` selects.
        """
        folder = store_folder(self.set, self.size)
        if self.size not in prepared_sizes(self.set):  # only names of prepared data sets are opened, never other paths
            wrong = "`data.size`" if prepared_sizes(self.set) else "`data.set`"
            raise UserError(f"{wrong}: {why_missing(self.set, self.size)}")
        card = read_card(folder)
        if self.digest is not None and not card.digest.startswith(self.digest.lower()):
            raise UserError(
                f"`data.digest` is {self.digest}, but the digest of {folder} is {card.digest[:12]}; "
                "its images or labels differ."
            )
        for name in self.domains:
            if name not in card.domains:
                has = f"; it has {', '.join(card.domains)}."
                raise UserError(f"`data.domains`: {self.set} has no domain `{name}`{near(name, card.domains) or has}")
        digest = card.digest
        if self.domains != tuple(card.domains):  # only some of the domains, or another order
            digest = _derived(digest, *self.domains)
        if self.validation_fraction == "listed":  # other test images
            digest = _derived(digest, "listed validation")
        listed = self.training_domains if self.validation_fraction == "listed" else ()
        found = [_read(folder, card, name, name in listed) for name in self.domains]
        training = tuple(one for one in found if one.name not in self.held_out_domains)
        if listed:
            _check_listed(card, training)
        parts = [part for one in training for part in (one.train, one.validation) if part is not None]
        known = [part.groups for part in parts if part.groups is not None]
        held_out = tuple(_all_tested(one, known) for one in found if one.name in self.held_out_domains)
        data = FederatedData(self.set, card.class_names, training, digest, held_out, card.copies is not None)
        if held_out:
            check_groups_known(data, "`data.held_out_domains`")
        return data


def _derived(digest: str, *changes: str) -> str:
    """Return the digest of the data set with this digest after `changes`."""
    return hashlib.sha256("\0".join([digest, *changes]).encode()).hexdigest()


def _all_tested(domain: Domain, known: Sequence[Tensor]) -> Domain:
    """Return a domain that no client has, with all its images as test images.

    Training images whose group is among `known`, the groups of the clients' images and of the listed validation images,
    are left out.
    """
    train = domain.train
    if train.groups is not None and known:
        train = train.select((~torch.isin(train.groups, torch.cat([*known]))).nonzero().flatten())
    return Domain(domain.name, domain.train.select(torch.arange(0)), pool([train, domain.test]))


def _check_listed(card: StoreCard, domains: Sequence[Domain]) -> None:
    """Raise UserError unless each of `domains` has listed validation images and other test images."""
    setting = "`data.validation_fraction` is listed, but"
    if card.validation is None:
        raise UserError(
            f"{setting} {card.name} was prepared by an older version of fedsweep that recorded no validation images; "
            f"prepare it again with `fedsweep data prepare {card.name} ... --force`."
        )
    if lacking := [one.name for one in domains if not (one.validation and len(one.validation) and len(one.test))]:
        raise UserError(
            f"{setting} these domains of {card.name} lack listed validation images or other test images: "
            f"{summarise_list(lacking)}; set a share of the training images instead, for example 0.2."
        )


def _read(folder: Path, card: StoreCard, name: str, listed: bool) -> Domain:
    path, counts = folder / f"{name}.arrow", card.domains[name]
    domain = read_domain(path, name, listed)
    validation = domain.validation
    train, test = len(domain.train), len(domain.test) + (0 if validation is None else len(validation))
    if (train, test) != (counts.train, counts.test):
        raise UserError(
            f"{path} contains {train} training and {test} test images, but its card lists {counts.train} and "
            f"{counts.test}; prepare the data set again."
        )
    for part in (domain.train, domain.test, *([] if validation is None else [validation])):
        check_labels(path, part.labels.numpy(), len(card.class_names))
    return domain
