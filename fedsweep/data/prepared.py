"""A data set that `fedsweep data prepare` has put on disk, mapped into memory."""

import hashlib
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from fedsweep.common.errors import UserError, near
from fedsweep.data.base import Data
from fedsweep.data.imagestore import read_domain
from fedsweep.data.partition.base import pool
from fedsweep.images.card import StoreCard, prepared_sizes, read_card, store_folder, why_missing
from fedsweep.images.files import check_labels
from fedsweep.types import Domain, FederatedData


class PreparedData(Data):
    """Images on disk, decoded once by `fedsweep data prepare`; all trials of a machine share one memory map."""

    name: Literal["prepared"] = "prepared"
    set: str = Field(min_length=1, description="name that the data set was prepared under, e.g. `pacs`")
    size: int = Field(224, gt=0, description="height and width of its images, pixels")
    digest: str | None = Field(
        None, pattern="^[0-9a-fA-F]{8,64}$", description="first digits of its content's SHA-256; null for any"
    )

    def load(self) -> FederatedData:
        """Map the domains into memory.

        Raises:
            UserError: the set is not prepared at this size, is damaged, has other content, or lacks a domain.
        """
        folder = store_folder(self.set, self.size)
        if self.size not in prepared_sizes(self.set):  # a name of the list, never a path
            wrong = "`data.size`" if prepared_sizes(self.set) else "`data.set`"
            raise UserError(f"{wrong}: {why_missing(self.set, self.size)}")
        card = read_card(folder)
        if self.digest is not None and not card.digest.startswith(self.digest.lower()):
            raise UserError(
                f"`data.digest` must be that of {folder}, {card.digest[:12]}, but it is {self.digest}; "
                "its images or labels are others."
            )
        for name in self.domains:
            if name not in card.domains:
                has = f"; it has {', '.join(card.domains)}."
                raise UserError(f"`data.domains`: {self.set} has no domain `{name}`{near(name, card.domains) or has}")
        domains = tuple(_read(folder, card, name) for name in self.domains)
        digest = card.digest
        if self.domains != tuple(card.domains):  # a part of the set, or another order
            digest = hashlib.sha256("\0".join([digest, *self.domains]).encode()).hexdigest()
        return FederatedData(
            self.set,
            card.class_names,
            tuple(one for one in domains if one.name not in self.held_out_domains),
            digest,
            tuple(_all_for_testing(one) for one in domains if one.name in self.held_out_domains),
        )


def _all_for_testing(domain: Domain) -> Domain:
    """A domain that no client has: all its images are tested on, whatever their split."""
    nothing = domain.train.select(torch.arange(0))
    return Domain(domain.name, nothing, pool([domain.train, domain.test]))


def _read(folder: Path, card: StoreCard, name: str) -> Domain:
    path, said = folder / f"{name}.arrow", card.domains[name]
    domain = read_domain(path, name)
    train, test = len(domain.train), len(domain.test)
    if (train, test) != (said.train, said.test):
        raise UserError(
            f"{path} holds {train} training and {test} test images, but its card says {said.train} and {said.test}; "
            "prepare it again."
        )
    for part in (domain.train, domain.test):
        check_labels(path, part.labels.numpy(), len(card.class_names))
    return domain
